"""Link: what connects the slots of one process group to the processes that serve them now.

A repair replaces a group's link and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Link:
    """One group's communicators now. Make it by :meth:`make`.

    The ranks of a communicator follow the order of the slots. A process may serve several slots of
    a group; it has one rank then, placed by the first of them.
    """

    slots: tuple[int, ...]
    """All members of the group; group rank ``i`` is ``slots[i]`` for ever."""
    ranks: tuple[int | None, ...]
    """For each group rank the rank in ``comm`` of the process that serves it; None if vacant."""
    comm: MPI.Intracomm | None
    """Over the processes that serve the live slots; None if that is this process alone."""
    p2p: MPI.Intracomm | None = None
    """For point-to-point messages, where these are revoked apart from collectives; else None."""
    full: bool = field(init=False)
    """Whether every slot is served by a process of its own."""

    def __post_init__(self) -> None:
        assert len(self.ranks) == len(self.slots)
        served = {rank for rank in self.ranks if rank is not None}
        assert served == set(range(len(served))), f"ranks with gaps: {self.ranks}"
        if self.comm is None:
            assert len(served) == 1, f"{len(served)} processes need a communicator"
        else:
            assert self.comm.size == len(served), f"{self.comm.size} ranks for {self.ranks}"
        object.__setattr__(self, "full", len(served) == len(self.slots))

    @classmethod
    def make(
        cls,
        slots: tuple[int, ...],
        process_of: Sequence[int | None],
        comm: MPI.Intracomm | None,
        p2p: MPI.Intracomm | None = None,
    ) -> Link:
        """Connect ``slots``.

        Args:
            slots: Members of the group, in the order of their group ranks.
            process_of: For each slot of the job the process that serves it, None if vacant.
            comm: Its ranks are the processes of ``slots`` in order of first appearance.
            p2p: A duplicate of ``comm``, or None to use ``comm`` for messages too.
        """
        rank_of: dict[int, int] = {}
        ranks: list[int | None] = []
        for slot in slots:
            process = process_of[slot]
            ranks.append(None if process is None else rank_of.setdefault(process, len(rank_of)))
        return cls(slots, tuple(ranks), comm, p2p)

    @property
    def live(self) -> tuple[int, ...]:
        """The slots that are served now."""
        return tuple(s for s, r in zip(self.slots, self.ranks, strict=True) if r is not None)

    @property
    def lowest_live(self) -> int:
        """The first slot, in group order, that is served now; its rank in ``comm`` is 0."""
        return self.slots[self.ranks.index(0)]

    @property
    def num_processes(self) -> int:
        return 1 if self.comm is None else self.comm.size

    @property
    def rank(self) -> int:
        """This process's rank in ``comm``."""
        return 0 if self.comm is None else self.comm.rank

    def rank_of(self, slot: int) -> int | None:
        """The rank in ``comm`` of the process that serves ``slot``; None if it is vacant."""
        return self.ranks[self.slots.index(slot)]

    def group_rank(self, rank: int) -> int:
        """The first group rank that the process of rank ``rank`` in ``comm`` serves."""
        return self.ranks.index(rank)
