"""Writes Megatron's .bin/.idx pairs so that a pair is there whole or not at all."""

import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def token_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """Return the type in which Megatron stores ids of such a vocabulary."""
    dtype: type[np.integer[Any]] = DType.optimal_dtype(vocab_size)
    return dtype


class PairWriter:
    """Builds `<prefix>.bin` and `<prefix>.idx` under temporary names; `commit` puts them in place.

    As a context manager it removes the temporary files on the way out, whatever happened.
    """

    def __init__(self, prefix: Path, dtype: type[np.integer[Any]]) -> None:
        """Open the temporary file.

        Raises:
            OSError: the folder cannot be made or written.
        """
        self.prefix = prefix
        self.num_documents = 0
        self.num_tokens = 0
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, as a rename is atomic only within one file system.
        temporary = prefix.parent / f".{prefix.name}.{os.getpid()}.tmp"
        self._temporary_bin = temporary.with_name(temporary.name + ".bin")
        self._temporary_idx = temporary.with_name(temporary.name + ".idx")
        self._builder = IndexedDatasetBuilder(str(self._temporary_bin), dtype=dtype)

    def add(self, tokens: npt.NDArray[np.integer[Any]], lengths: list[int]) -> None:
        """Append documents given behind each other; `lengths` are in tokens and sum to all."""
        for document in np.split(tokens, np.cumsum(lengths)[:-1]) if lengths else []:
            self._builder.add_document(document, [len(document)])
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def commit(self) -> None:
        """Put the pair in place of any older one."""
        self._builder.finalize(str(self._temporary_idx))
        for path in (self._temporary_bin, self._temporary_idx):
            _sync(path)
        index = _with_suffix(self.prefix, ".idx")
        # Without its index first: an old index beside new data would be read as garbage.
        index.unlink(missing_ok=True)
        _remove_stale_caches(self.prefix)
        self._temporary_bin.replace(_with_suffix(self.prefix, ".bin"))
        self._temporary_idx.replace(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # Writes what is buffered, and so fails again where the disk is full.
            self._builder.data_file.close()
        finally:
            self._temporary_bin.unlink(missing_ok=True)
            self._temporary_idx.unlink(missing_ok=True)


def _with_suffix(prefix: Path, suffix: str) -> Path:
    # Path.with_suffix would cut a prefix such as "wiki.en".
    return prefix.with_name(prefix.name + suffix)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale_caches(prefix: Path) -> None:
    """Remove the sample orders that Megatron keeps at `<prefix>/cache/*_indices`.

    They are found again by path and options, not by content, so those of older data would be used.
    """
    for folder in (prefix / "cache").glob("*_indices"):
        shutil.rmtree(folder)
