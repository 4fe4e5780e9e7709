"""Turn text into the .bin/.idx pairs that Megatron trains on.

    python tools/preprocess_data.py --corpus stdlib --output-prefix data/stdlib_byte --append-eod
    python tools/preprocess_data.py --input texts/ more.jsonl.gz --output-prefix data/mine \
        --append-eod --train-tokenizer 8192 --tokenizer-model data/tokenizer --workers 4

The last line printed holds the Megatron flags to train with the data made. See docs/data.md.
"""

import argparse
import logging
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

# Works in a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ft.data.corpus import (
    JSON_SUFFIXES,
    TEXT_SUFFIXES,
    Corpus,
    CorpusError,
    FileCorpus,
    StdlibCorpus,
    documents,
)
from megatron_ft.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    TokenizerError,
    load_bpe,
    train_bpe,
)

if TYPE_CHECKING:
    from megatron_ft.data.build import Summary

# Megatron deals whole documents to the splits; with fewer than this the small ones are empty.
_FEW_DOCUMENTS = 100


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description="Turn text into the .bin/.idx pairs that Megatron trains on."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="text files (one document each), jsonl files (one document a line; "
        f"{' '.join(JSON_SUFFIXES)}) and folders of them; each file may be gzipped (.gz)",
    )
    source.add_argument(
        "--corpus",
        choices=["stdlib"],
        help="a corpus that needs no network: sources and pydoc topics of this Python (11 MB)",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin and .idx; KEY is text unless --json-key is given",
    )
    parser.add_argument(
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of jsonl that hold text, each with an output of its own (default: text)",
    )
    parser.add_argument(
        "--suffixes",
        nargs="+",
        metavar="SUFFIX",
        help="which files of a folder to take "
        f"(default: {' '.join(TEXT_SUFFIXES + JSON_SUFFIXES)}, with or without .gz)",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document by an end-of-document token"
    )
    parser.add_argument(
        "--tokenizer-model",
        type=Path,
        metavar="PATH",
        help="folder (or .json) of a HuggingFace tokenizer; without it every byte is a token",
    )
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB_SIZE",
        help="train a BPE on the input first and save it at --tokenizer-model",
    )
    parser.add_argument(
        "--eod-token",
        metavar="TOKEN",
        help="end-of-document token of a --tokenizer-model that does not name one",
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that encode (default: 1)"
    )
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error("--workers must be at least 1")
    if arguments.tokenizer_model is None and (arguments.train_tokenizer or arguments.eod_token):
        parser.error("--train-tokenizer and --eod-token need --tokenizer-model PATH")
    if arguments.train_tokenizer and arguments.eod_token:
        parser.error("--eod-token is for a tokenizer that exists; a trained one has its own")
    if len(set(arguments.json_key)) != len(arguments.json_key):
        parser.error("--json-key names a key twice")
    return arguments


def choose_tokenizer(
    arguments: argparse.Namespace, corpus: Corpus, progress: Progress
) -> Tokenizer:
    """Return the byte-level tokenizer, the one to be read, or the one trained on the corpus."""
    if arguments.tokenizer_model is None:
        return ByteTokenizer()
    if arguments.train_tokenizer is None:
        return load_bpe(arguments.tokenizer_model, arguments.eod_token)
    task = progress.add_task("tokenizer", total=corpus.num_bytes)

    def texts() -> Iterator[bytes]:
        for record in corpus:
            yield from documents(record, arguments.json_key)
            progress.advance(task, record.num_bytes_read)

    return load_bpe(train_bpe(texts(), arguments.train_tokenizer, arguments.tokenizer_model))


def import_builder() -> "Callable[..., Summary]":
    """Import Megatron without its remarks on GPU libraries, which preparing data does not need."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        from megatron_ft.data.build import build_pairs
    return build_pairs


def run(arguments: argparse.Namespace) -> None:
    """Do what the command line asks and print what was made."""
    # Looked up before the seconds that importing Megatron takes: a wrong path is told at once.
    corpus: Corpus = (
        StdlibCorpus() if arguments.corpus else FileCorpus(arguments.input, arguments.suffixes)
    )
    build_pairs = import_builder()
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tokenizer = choose_tokenizer(arguments, corpus, progress)
        task = progress.add_task("tokens", total=corpus.num_bytes)
        summary = build_pairs(
            corpus,
            tokenizer,
            Path(arguments.output_prefix),
            keys=arguments.json_key,
            append_eod=arguments.append_eod,
            num_workers=arguments.workers,
            on_progress=lambda num_bytes: progress.advance(task, num_bytes),
        )
    for prefix, num_documents in zip(summary.prefixes, summary.num_documents, strict=True):
        print(f"{prefix}.bin and .idx: {num_documents:,} documents")
    print(
        f"{sum(summary.num_documents):,} documents, {summary.num_tokens:,} tokens, "
        f"{summary.num_text_bytes:,} bytes of text, {summary.seconds:.1f} seconds, "
        f"vocabulary {tokenizer.vocab_size:,}, end of document {tokenizer.eod}"
    )
    if summary.num_empty:
        print(f"note: {summary.num_empty:,} documents without text were left out")
    if summary.num_not_utf8:
        print(
            f"note: {summary.num_not_utf8:,} documents are not UTF-8; byte level keeps their "
            "bytes, a BPE sees U+FFFD in place of the bad ones"
        )
    if not arguments.append_eod:
        print("note: no end-of-document tokens (--append-eod): documents run into each other")
    if min(summary.num_documents) < _FEW_DOCUMENTS:
        print(
            "note: --split deals whole documents; with so few, prefer --train-data-path and "
            "--valid-data-path with data of their own"
        )
    flags = ["--data-path", *map(str, summary.prefixes), *tokenizer.megatron_flags()]
    print(f"Train with: {shlex.join(flags)} --split 969,30,1")


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, 1 for input or output that cannot be used, 130 if interrupted."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        run(arguments)
    except (CorpusError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = error.filename or arguments.output_prefix
        print(f"error: cannot write {place}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    """Let SIGTERM clean up like an interrupt at the keyboard."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
