"""What a process holds after each step, from the first repair to the end: does it pile up?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_ft.observe.rundir import EVENTS

Row = dict[str, Any]
"""`epoch`, `iteration`; numbers: `groups`, `torch_groups`, `resident` in bytes; names: `threads`,
`files`."""

COUNTED = ("groups", "torch_groups")
"""What may not grow at all."""
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


def new(census: Sequence[Row], what: str) -> Counter[str]:
    """What of several kinds the process has more of at the end, and how many: files, threads."""
    first, last = first_and_last(census)
    return Counter[str](last[what]) - Counter[str](first[what])


def leaked(census: Sequence[Row]) -> list[str]:
    """Files and threads that a process which lives through has no reason to hold.

    Whoever serves the highest live slot writes for all and takes orders: it has the events' file
    open, listens on a socket, and has a thread that does.
    """
    files, threads = new(census, "files"), new(census, "threads")
    sockets = [name for name in files.elements() if name.startswith("socket:")]
    more = [n for n in files.elements() if n not in sockets and not n.endswith(EVENTS)]
    return [*more, *sockets[1:], *(threads - Counter(["ft-control"])).elements()]
