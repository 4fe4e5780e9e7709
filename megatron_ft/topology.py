"""Slots, replicas, stages, and which process serves which slot.

A *slot* is a Megatron rank: one (tp, cp, pp, dp) coordinate. Slots are numbered as Megatron-Core's
`RankGenerator` numbers ranks and their number never changes. A *process* is an operating-system
process. An `Assignment` maps slots to processes and is versioned by the world epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Order = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]


class Coordinate(NamedTuple):
    """Where a slot stands in each parallel dimension."""

    tp: int
    cp: int
    pp: int
    dp: int


class Shard(NamedTuple):
    """The training state a slot holds: tensor-parallel part `tp` of pipeline stage `pp`.

    Slots that differ only in their context- or data-parallel index hold equal shards.
    """

    tp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The sizes of a Megatron job's parallel dimensions and the numbering of its slots.

    Raises:
        ValueError: a size is below one, or the order is not one that Megatron can be asked for.
    """

    tensor: int
    pipeline: int
    data: int
    context: int = 1
    # Megatron's default, and its order under --use-tp-pp-dp-mapping.
    order: Order = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.order not in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
            raise ValueError(
                f"unknown order {self.order!r}: use 'tp-cp-ep-dp-pp' or 'tp-cp-ep-pp-dp'"
            )

    @property
    def num_slots(self) -> int:
        return self.replica_size * self.data

    @property
    def replica_size(self) -> int:
        """Slots of one replica: tensor * context * pipeline."""
        return self.tensor * self.context * self.pipeline

    def slot(self, *, tp: int = 0, cp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """The slot at a coordinate."""
        assert 0 <= tp < self.tensor and 0 <= cp < self.context, (tp, cp)
        assert 0 <= pp < self.pipeline and 0 <= dp < self.data, (pp, dp)
        outer = pp * self.data + dp if self._stage_is_outermost else dp * self.pipeline + pp
        return (outer * self.context + cp) * self.tensor + tp

    def coordinate(self, slot: int) -> Coordinate:
        """The coordinate of a slot."""
        assert 0 <= slot < self.num_slots, slot
        rest, tp = divmod(slot, self.tensor)
        outer, cp = divmod(rest, self.context)
        if self._stage_is_outermost:
            pp, dp = divmod(outer, self.data)
        else:
            dp, pp = divmod(outer, self.pipeline)
        return Coordinate(tp=tp, cp=cp, pp=pp, dp=dp)

    def replica(self, dp: int) -> tuple[int, ...]:
        """The slots of replica `dp`, ascending."""
        return self._replicas[dp]

    def replica_of(self, slot: int) -> int:
        return self.coordinate(slot).dp

    def stage(self, pp: int) -> tuple[int, ...]:
        """The slots of stage `pp` in all replicas, ascending."""
        return tuple(slot for slot in range(self.num_slots) if self.stage_of(slot) == pp)

    def stage_of(self, slot: int) -> int:
        return self.coordinate(slot).pp

    def peers(self, slot: int) -> tuple[int, ...]:
        """The slots of the same (tp, cp, pp), one of each replica, `slot` itself included."""
        at = self.coordinate(slot)
        return tuple(self.slot(tp=at.tp, cp=at.cp, pp=at.pp, dp=dp) for dp in range(self.data))

    def columns(self, dp: int) -> tuple[tuple[int, ...], ...]:
        """The pipelines of replica `dp`: for each (cp, tp), its slots by stage."""
        return tuple(
            tuple(self.slot(tp=tp, cp=cp, pp=pp, dp=dp) for pp in range(self.pipeline))
            for cp in range(self.context)
            for tp in range(self.tensor)
        )

    def shard_of(self, slot: int) -> Shard:
        at = self.coordinate(slot)
        return Shard(tp=at.tp, pp=at.pp)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All distinct shards, by stage, then tensor-parallel index."""
        return tuple(
            Shard(tp=tp, pp=pp) for pp in range(self.pipeline) for tp in range(self.tensor)
        )

    @property
    def _stage_is_outermost(self) -> bool:
        return self.order == "tp-cp-ep-dp-pp"

    @cached_property
    def _replicas(self) -> tuple[tuple[int, ...], ...]:
        slots: list[list[int]] = [[] for _ in range(self.data)]
        for slot in range(self.num_slots):
            slots[self.replica_of(slot)].append(slot)
        return tuple(tuple(replica) for replica in slots)


@dataclass(frozen=True)
class Assignment:
    """Which process serves which slot, from one world epoch to the next.

    A process serves no slot (it is in the pool), one slot, or, in MeCeFO, two: its own and the
    one it adopted, a neighbouring stage of the same replica.
    """

    epoch: int
    process_of: tuple[int | None, ...]
    """The process of each slot, None where the slot is vacant; indexed by slot."""
    pool: tuple[int, ...] = ()
    """Living processes without a slot, ascending."""
    adopted: tuple[int, ...] = ()
    """Slots that are served by a neighbour beside its own slot (MeCeFO), ascending."""

    def slots_of(self, process: int) -> tuple[int, ...]:
        """The slots of a process: none, its own, or its own and then the adopted one."""
        return self._slots_of.get(process, ())

    @property
    def live_slots(self) -> tuple[int, ...]:
        return tuple(s for s, process in enumerate(self.process_of) if process is not None)

    @property
    def vacant_slots(self) -> tuple[int, ...]:
        return tuple(s for s, process in enumerate(self.process_of) if process is None)

    @property
    def active_processes(self) -> tuple[int, ...]:
        """The processes that serve a slot, ascending."""
        return tuple(sorted(self._slots_of))

    @property
    def processes(self) -> tuple[int, ...]:
        """All processes of this epoch's world, ascending."""
        return tuple(sorted({*self._slots_of, *self.pool}))

    def whole_replicas(self, topology: Topology) -> tuple[int, ...]:
        """Replicas in which every slot is served, adopted ones counted as served."""
        return tuple(
            dp
            for dp in range(topology.data)
            if all(self.process_of[slot] is not None for slot in topology.replica(dp))
        )

    def dark_replicas(self, topology: Topology) -> tuple[int, ...]:
        """Replicas in which no slot is served."""
        return tuple(
            dp
            for dp in range(topology.data)
            if all(self.process_of[slot] is None for slot in topology.replica(dp))
        )

    def degraded_stages(self, topology: Topology) -> frozenset[tuple[int, int]]:
        """The (dp, pp) at which a process serves two stages: MeCeFO's affected layers.

        A stage counts as degraded in a replica as soon as one of its tensor- or context-parallel
        slots is, because those peers must take part in the same backward collectives.
        """
        degraded: set[tuple[int, int]] = set()
        for process in self._slots_of:
            slots = self.slots_of(process)
            if len(slots) == 2:
                at = [topology.coordinate(slot) for slot in slots]
                degraded.update((coordinate.dp, coordinate.pp) for coordinate in at)
        return frozenset(degraded)

    def joined(self, processes: Iterable[int]) -> Assignment:
        """This assignment with new processes in the pool; the epoch grows with the next plan."""
        new = set(processes)
        assert new.isdisjoint(self.processes), f"already in the world: {sorted(new)}"
        pool = tuple(sorted({*self.pool, *new}))
        return Assignment(self.epoch, self.process_of, pool, self.adopted)

    def check(self, topology: Topology) -> None:
        """Assert what must hold of every assignment."""
        assert len(self.process_of) == topology.num_slots, (len(self.process_of), topology)
        assert tuple(sorted(set(self.pool))) == self.pool, f"pool not sorted: {self.pool}"
        assert tuple(sorted(set(self.adopted))) == self.adopted, self.adopted
        assert all(self.process_of[slot] is not None for slot in self.adopted), "vacant, adopted"
        assert self._slots_of.keys().isdisjoint(self.pool), "a process of the pool has a slot"
        adopted = set(self.adopted)
        for process, slots in self._slots_of.items():
            assert len(slots) <= 2, f"process {process} serves {slots}"
            assert slots[0] not in adopted, f"process {process} has no slot of its own: {slots}"
            if len(slots) == 2:
                assert slots[1] in adopted, f"process {process} owns {slots}"
                own, other = (topology.coordinate(slot) for slot in slots)
                assert abs(own.pp - other.pp) == 1, f"{slots} are not neighbours"
                assert own._replace(pp=other.pp) == other, f"{slots} are not of one pipeline"

    @cached_property
    def _slots_of(self) -> dict[int, tuple[int, ...]]:
        own: dict[int, tuple[int, ...]] = {}
        adopted = set(self.adopted)
        for slot, process in enumerate(self.process_of):
            if process is not None and slot not in adopted:
                own[process] = (*own.get(process, ()), slot)
        for slot in self.adopted:
            process = self.process_of[slot]
            if process is not None:
                own[process] = (*own.get(process, ()), slot)
        return own


def initial_assignment(topology: Topology, processes: Iterable[int]) -> Assignment:
    """The assignment of epoch 0: as many whole replicas as the processes give, the rest pooled.

    With one process per slot, the k-th lowest process serves slot k. With fewer, the job starts
    with the last replicas dark; with more, the extra processes wait in the pool.

    Raises:
        ValueError: not even one replica can be filled, or a process is given twice.
    """
    given = sorted(processes)
    if len(set(given)) != len(given):
        raise ValueError(f"a process is given twice: {given}")
    num_whole = min(len(given) // topology.replica_size, topology.data)
    if num_whole == 0:
        raise ValueError(
            f"{len(given)} processes cannot fill one replica of {topology.replica_size} "
            f"(tensor {topology.tensor} x context {topology.context} x pipeline "
            f"{topology.pipeline}): start more processes or lower a parallel size"
        )
    slots = sorted(slot for dp in range(num_whole) for slot in topology.replica(dp))
    process_of: list[int | None] = [None] * topology.num_slots
    for slot, process in zip(slots, given, strict=False):
        process_of[slot] = process
    return Assignment(0, tuple(process_of), tuple(given[len(slots) :]))
