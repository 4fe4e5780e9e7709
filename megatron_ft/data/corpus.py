"""Where documents come from: text files, folders, jsonl, the standard library.

Files may be gzipped. A corpus is iterated as raw `Record`s; `documents` turns one record into its
documents. Parsing is apart from reading so that worker processes can do it, and still name the file
and line of an error.
"""

import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

# Tests hold deliberately broken files; the rest is no part of the library or not source.
_STDLIB_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
}


class CorpusError(ValueError):
    """The input cannot be used as it is; the message says where and what to do."""


@dataclass(frozen=True)
class Record:
    """One unparsed piece of input: a whole text file, or one line of a jsonl file."""

    source: str
    """Path of the file, or a name for text that is in no file of its own."""
    line: int | None
    """Line number from 1 in a jsonl file, None for whole text."""
    data: bytes
    """The bytes as they are, uncompressed."""
    num_bytes_read: int
    """Bytes of the corpus as stored (compressed where it is) behind this record."""

    @property
    def place(self) -> str:
        """`file` or `file:line`, for messages."""
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Corpus(Protocol):
    """A source of records that can be read more than once, in the same order each time."""

    name: str

    @property
    def num_bytes(self) -> int:
        """Sum of `num_bytes_read` over all records, as far as known beforehand."""
        ...

    def __iter__(self) -> Iterator[Record]: ...


class FileCorpus:
    """Files, in the order given; a folder stands for its files in sorted order of their paths."""

    def __init__(self, inputs: Sequence[str | Path], suffixes: Sequence[str] | None = None) -> None:
        """Look up all files at once, so that a missing one is found before any work.

        Args:
            inputs: files and folders. A file ending in .jsonl, .ndjson or .json holds one JSON
                object a line, any other is one document; a further .gz means gzip.
            suffixes: which files of a folder to take (default: text and jsonl suffixes).

        Raises:
            CorpusError: an input is missing or a folder holds no matching file.
        """
        self.name = ", ".join(str(path) for path in inputs)
        self.files = [
            file
            for path in inputs
            for file in _files_of(Path(path), tuple(suffixes or TEXT_SUFFIXES + JSON_SUFFIXES))
        ]

    @cached_property
    def num_bytes(self) -> int:
        """Size of all files on disk."""
        return sum(file.stat().st_size for file in self.files)

    def __iter__(self) -> Iterator[Record]:
        for file in self.files:
            try:
                if _content_suffix(file) in JSON_SUFFIXES:
                    yield from _json_lines(file)
                else:
                    yield _whole_file(file)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise CorpusError(f"{file}: broken gzip data ({error})") from error
            except OSError as error:
                raise CorpusError(f"cannot read {file}: {error.strerror}") from error


class StdlibCorpus:
    """The running interpreter's standard library: each source file and pydoc topic a document.

    About 11 MB of Python and English that need no network. The order is that of the sorted paths
    (topics under `pydoc_data/topics/`), the same for every run of one interpreter.
    """

    name = "the standard library"

    @cached_property
    def _files(self) -> dict[str, Path]:
        root = Path(sysconfig.get_path("stdlib"))
        files = {}
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED_FOLDERS]
            for name in names:
                if name.endswith(".py"):
                    path = Path(folder, name)
                    files[path.relative_to(root).as_posix()] = path
        # The same text follows as documents of its own, without the quoting.
        files.pop("pydoc_data/topics.py", None)
        if not files:
            raise CorpusError(f"this interpreter has no library sources in {root}; use --input")
        return files

    @cached_property
    def _topics(self) -> dict[str, bytes]:
        from pydoc_data.topics import topics

        return {f"pydoc_data/topics/{name}": text.encode() for name, text in topics.items()}

    @cached_property
    def num_bytes(self) -> int:
        """Size of all sources and topics."""
        sizes = [path.stat().st_size for path in self._files.values()]
        return sum(sizes) + sum(map(len, self._topics.values()))

    def __iter__(self) -> Iterator[Record]:
        for name in sorted([*self._files, *self._topics]):
            data = self._topics[name] if name in self._topics else self._files[name].read_bytes()
            yield Record(name, None, data, len(data))


def documents(record: Record, keys: Sequence[str]) -> list[bytes]:
    """Return the record's documents as UTF-8, one for each key; plain text has one, for any key.

    Raises:
        CorpusError: not JSON, not an object, a key is missing or no string; names file and line.
    """
    if record.line is None:
        if len(keys) != 1:
            raise CorpusError(
                f"{record.place} is plain text and has no keys; give --json-key only one name, "
                "or only jsonl input"
            )
        return [record.data]
    try:
        entry = json.loads(record.data)
    except ValueError as error:
        raise CorpusError(f"{record.place}: not valid JSON ({error})") from error
    if not isinstance(entry, dict):
        raise CorpusError(f"{record.place}: a JSON object is needed, not {type(entry).__name__}")
    texts = []
    for key in keys:
        if key not in entry:
            present = ", ".join(sorted(map(repr, entry))) or "none"
            raise CorpusError(f"{record.place}: no key {key!r} (keys there: {present})")
        if not isinstance(entry[key], str):
            kind = type(entry[key]).__name__
            raise CorpusError(f"{record.place}: the value of {key!r} is {kind}, not a string")
        # JSON can spell half a surrogate pair, which has no UTF-8 form.
        texts.append(entry[key].encode("utf-8", errors="replace"))
    return texts


def _content_suffix(path: Path) -> str:
    """Suffix of the file without .gz, in lower case."""
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return name.suffix.lower()


def _files_of(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if not path.exists():
        raise CorpusError(f"input does not exist: {path}")
    if not path.is_dir():
        return [path]
    found = []
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    matching = [file for file in found if _content_suffix(file) in suffixes]
    if not matching:
        raise CorpusError(
            f"folder {path} holds no file ending in {' '.join(suffixes)} (or those with .gz); "
            "choose others with --suffixes"
        )
    return sorted(matching, key=lambda file: file.relative_to(path).as_posix())


def _whole_file(path: Path) -> Record:
    stored = path.read_bytes()
    data = gzip.decompress(stored) if path.suffix.lower() == ".gz" else stored
    return Record(str(path), None, data, len(stored))


def _json_lines(path: Path) -> Iterator[Record]:
    """Yield the lines that are not blank."""
    is_gzip = path.suffix.lower() == ".gz"
    with path.open("rb") as stored, gzip.GzipFile(fileobj=stored) if is_gzip else stored as stream:
        position = reported = 0
        for number, line in enumerate(stream, start=1):
            # For gzip, progress is the position in the compressed file.
            position = stored.tell() if is_gzip else position + len(line)
            if line.strip():
                yield Record(str(path), number, line, position - reported)
                reported = position
