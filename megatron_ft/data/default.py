"""The corpus that needs no network, made once: the standard library at byte level."""

import fcntl
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.data.corpus import StdlibCorpus
from megatron_ft.data.tokenizer import ByteTokenizer

# Raise when the same options would make other data.
_FORMAT = 1


def prepare_default(
    out_dir: str | Path,
    *,
    append_eod: bool = True,
    on_progress: Callable[[int], None] = lambda num_bytes_read: None,
) -> str:
    """Make `out_dir/stdlib_byte_text_document.bin/.idx` unless they are there and up to date.

    They are up to date while interpreter, options and the files themselves are those of a stamp
    beside them. Several processes may call this at once, on one file system: the first one works,
    the others wait and find it done.

    Args:
        out_dir: folder, made if missing.
        append_eod: end each document by token 256.
        on_progress: called with the bytes of text read since the last call.

    Returns:
        The prefix for --data-path.

    Raises:
        CorpusError: the interpreter comes without its library sources.
        OSError: the output cannot be written.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    prefix = out_dir / "stdlib_byte_text_document"
    stamp = out_dir / f"{prefix.name}.json"
    with (out_dir / f".{prefix.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _read(stamp) != _describe(prefix, append_eod):
            # Here, as most callers, and the workers of the tool, do without torch and Megatron.
            from megatron_ft.data.build import build_pairs

            build_pairs(
                StdlibCorpus(),
                ByteTokenizer(),
                out_dir / "stdlib_byte",
                append_eod=append_eod,
                on_progress=on_progress,
            )
            stamp.write_text(json.dumps(_describe(prefix, append_eod), indent=2) + "\n")
    return str(prefix)


def _read(stamp: Path) -> Any:
    """Return what the stamp says; a missing or half-written one says nothing."""
    try:
        return json.loads(stamp.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _describe(prefix: Path, append_eod: bool) -> dict[str, Any]:
    """Describe the data that should be there and the files that are."""
    description: dict[str, Any] = {
        "format": _FORMAT,
        "python": sys.version,
        "platform": sys.platform,
        "append_eod": append_eod,
    }
    for suffix in (".bin", ".idx"):
        path = prefix.with_name(prefix.name + suffix)
        if not path.exists():
            # No stamp says this, so the pair is made.
            description[suffix] = "missing"
            continue
        status = path.stat()
        description[suffix] = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return description
