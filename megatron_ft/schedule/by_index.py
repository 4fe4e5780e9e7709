"""Microbatches of an iterator by their index, for stages that pass them in another order."""

from __future__ import annotations

from collections.abc import Iterator


class ByIndex[T]:
    """An iterator whose next item is that of the microbatch under way.

    On a swapped route a stage may pass microbatches in another order than that of the list, and may
    read those only that begin or end there. Items that come too early are kept until their
    microbatch passes, which is a few token ids each.

    Args:
        source: Gives the items in the order of the list.
    """

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._read = 0
        self._kept: dict[int, T] = {}
        self._passed: set[int] = set()
        self._at: int | None = None

    def begin(self, index: int) -> None:
        """The microbatch ``index`` passes now."""
        self._at = index

    def end(self) -> None:
        """It has passed: its item is not needed any more, read or not."""
        assert self._at is not None
        self._kept.pop(self._at, None)
        self._passed.add(self._at)
        self._at = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        assert self._at is not None, "no microbatch is under way"
        while self._read <= self._at:
            item = next(self._source)
            if self._read not in self._passed:
                self._kept[self._read] = item
            self._read += 1
        return self._kept.pop(self._at)
