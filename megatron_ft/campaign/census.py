"""What a process holds after each step, from the first repair to the end: does it pile up?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
"""`epoch`, `iteration`, `groups`, `torch_groups`, `threads`, `files`, `resident`."""

COUNTED = ("groups", "torch_groups")
WRITERS_THREADS = 1
"""Threads more of who writes for all: it takes orders."""
WRITERS_FILES = 2
"""Open files more of who writes for all: the event log and the socket for orders."""
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


def new(census: Sequence[Row], what: str) -> list[str]:
    """What of several named kinds the process has more of at the end than after the first repair.

    Args:
        what: `files` or `threads`.
    """
    first, last = first_and_last(census)
    return sorted((Counter[str](last[what]) - Counter[str](first[what])).elements())
