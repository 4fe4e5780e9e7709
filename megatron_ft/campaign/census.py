"""What a process holds after each step, from the first repair to the end: does it pile up?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
"""`epoch`, `iteration`, `groups`, `torch_groups`, `threads`, `files`, `resident`."""

COUNTED = ("groups", "torch_groups", "threads")
MEGABYTE = 1 << 20


def first_and_last(census: Sequence[Row]) -> tuple[Row, Row]:
    """After the first repair, which allocates what repairs need, and at the end.

    Raises:
        ValueError: The process saw no repair, or the run ended with it.
    """
    repaired = [row for row in census if row["epoch"] > 0]
    first = [row for row in repaired if row["epoch"] == 1]
    if len(first) < 2:
        raise ValueError("fewer than two steps were counted between the first two repairs")
    # A step later, when reading ahead and allocators have settled.
    return first[1], repaired[-1]


def growth(census: Sequence[Row], what: str) -> int:
    first, last = first_and_last(census)
    return int(last[what] - first[what])


def new_files(census: Sequence[Row]) -> set[str]:
    """Open files that were not open after the first repair."""
    first, last = first_and_last(census)
    return set(last["files"]) - set(first["files"])


def num_new_files(census: Sequence[Row]) -> int:
    first, last = first_and_last(census)
    return len(last["files"]) - len(first["files"])
