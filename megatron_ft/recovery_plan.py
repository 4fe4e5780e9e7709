"""What a plan says: the actions of a repair, in order, and how to tell a person about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ft.topology import Assignment, Shard, Topology

EXIT_OUT_OF_WAYS = 75
"""Exit code of a job that stops because no rule applies any more."""


@dataclass(frozen=True)
class GoDark:
    """A replica is given up for now (rule 4). Its healthy processes may serve elsewhere at once."""

    replica: int
    released: tuple[int, ...]
    """The living processes that served it, ascending."""


@dataclass(frozen=True)
class GiveBack:
    """An adopter keeps its own slot and hands the adopted one over, to be trained exactly again."""

    slot: int
    adopter: int
    process: int
    """The process that serves the slot from now on; its `Fill` or `Rebuild` follows."""


@dataclass(frozen=True)
class Fill:
    """A process takes a slot with an exact copy of the state (rule 1)."""

    slot: int
    process: int
    source_process: int
    """Who sends the state: `process` itself where it holds it already and nothing is copied."""
    source_slot: int | None
    """A slot of the same shard that the source serves under the new assignment, else the one it
    served before; None where it served none (a pool process that still holds the state)."""

    @property
    def is_copy(self) -> bool:
        return self.source_process != self.process


@dataclass(frozen=True)
class Adopt:
    """A process serves a neighbouring slot beside its own (rule 3), with an exact copy."""

    slot: int
    process: int
    source_process: int
    source_slot: int | None

    @property
    def is_copy(self) -> bool:
        return self.source_process != self.process


@dataclass(frozen=True)
class Rebuild:
    """A process takes a slot whose state is nowhere and rebuilds it from neighbours (rule 2)."""

    slot: int
    process: int
    from_slots: tuple[int, ...]
    """The nearest surviving stage below and above, in the same pipeline: one or two slots."""


@dataclass(frozen=True)
class Stop:
    """No rule applies (rule 5): end with exit code 75."""

    rule: int
    """The rule that failed: 2 state that cannot be rebuilt, 4 too few processes."""
    reason: str
    advice: str
    missing_processes: int = 0
    """How many more ready processes would let the job go on; 0 where processes do not help."""
    can_checkpoint: bool = False
    """Every shard is still held by a living process, so that a last checkpoint is possible."""


Action = GoDark | GiveBack | Fill | Adopt | Rebuild | Stop


@dataclass(frozen=True)
class RecoveryPlan:
    """The new assignment and how to get there. All processes compute the same one."""

    topology: Topology
    before: Assignment
    failed: frozenset[int]
    assignment: Assignment
    actions: tuple[Action, ...]
    """In order: `GoDark`, `GiveBack`, copies of state that exists, `Rebuild`, copies of rebuilt
    state. Copies of the first kind read what their source held before the plan."""

    @property
    def stop(self) -> Stop | None:
        return next((action for action in self.actions if isinstance(action, Stop)), None)

    def describe(self) -> list[str]:
        """One line for what happened and one for each action, for people."""
        head = f"epoch {self.before.epoch} -> {self.assignment.epoch}: "
        dead = sorted(self.failed.intersection(self.before.processes))
        if dead:
            head += "lost " + ", ".join(self._who(process) for process in dead)
        elif self.actions:
            head += "no process lost"
        else:
            head += "nothing to do"
        return [head, *(self._line(action) for action in self.actions), self._summary()]

    def _line(self, action: Action) -> str:
        match action:
            case GoDark(replica, released):
                what = f"its {_processes(released)} can serve elsewhere" if released else "all lost"
                return f"replica {replica} goes dark: {what}"
            case GiveBack(slot, adopter, process):
                return f"process {adopter} gives {self._where(slot)} back to process {process}"
            case Fill(slot, process, source):
                how = f"copy from process {source}" if action.is_copy else "which holds its state"
                return f"{self._where(slot)} is filled by process {process}, {how}"
            case Adopt(slot, process, source):
                how = f"copy from process {source}" if action.is_copy else "which holds its state"
                return f"{self._where(slot)} is adopted by process {process}, {how}"
            case Rebuild(slot, process, from_slots):
                stages = " and ".join(str(self.topology.stage_of(s)) for s in from_slots)
                how = f"rebuilt from stage {stages}"
                return f"{self._where(slot)} is filled by process {process}, {how}"
            case Stop(rule, reason, advice):
                return f"stop, rule {rule} does not apply: {reason}. {advice}"

    def _summary(self) -> str:
        whole = len(self.assignment.whole_replicas(self.topology))
        adopted = len(self.assignment.adopted)
        line = f"{whole} of {self.topology.data} replicas live"
        if adopted:
            line += f", {adopted} slots adopted"
        return f"{line}, {len(self.assignment.pool)} processes in the pool"

    def _who(self, process: int) -> str:
        slots = self.before.slots_of(process)
        where = " and ".join(self._where(slot) for slot in slots) if slots else "pool"
        return f"process {process} ({where})"

    def _where(self, slot: int) -> str:
        at = self.topology.coordinate(slot)
        parts = [f"replica {at.dp}", f"stage {at.pp}"]
        if self.topology.tensor > 1:
            parts.append(f"tp {at.tp}")
        if self.topology.context > 1:
            parts.append(f"cp {at.cp}")
        return f"slot {slot} ({', '.join(parts)})"


def _processes(processes: tuple[int, ...]) -> str:
    return ("process " if len(processes) == 1 else "processes ") + ", ".join(map(str, processes))


def actions_between(
    topology: Topology,
    before: Assignment,
    after: Assignment,
    holds: Mapping[int, frozenset[Shard]],
) -> Iterator[Action]:
    """What leads from one assignment to the next, in the order of `RecoveryPlan.actions`.

    Args:
        holds: the shards that each living process holds the committed state of. What no one
            holds is rebuilt once and then copied.
    """
    was_dark = before.dark_replicas(topology)
    for replica in after.dark_replicas(topology):
        if replica not in was_dark:
            served = {before.process_of[slot] for slot in topology.replica(replica)}
            yield GoDark(replica, tuple(sorted(p for p in served if p is not None and p in holds)))
    for slot in before.adopted:
        adopter, process = before.process_of[slot], after.process_of[slot]
        assert adopter is not None
        keeps_own = before.slots_of(adopter)[:1] == after.slots_of(adopter)[:1]
        if process is not None and process != adopter and keeps_own:
            yield GiveBack(slot, adopter, process)

    copies: list[Action] = []
    rebuilds: list[Action] = []
    late_copies: list[Action] = []
    sources = _Sources(topology, before, after, holds)
    rebuilt: dict[Shard, tuple[int, int]] = {}
    adopted_before, adopted_after = set(before.adopted), set(after.adopted)
    for slot in after.live_slots:
        process, shard = after.process_of[slot], topology.shard_of(slot)
        assert process is not None
        kind = Adopt if slot in adopted_after else Fill
        moved = process != before.process_of[slot] or (
            slot in adopted_after and slot not in adopted_before
        )
        if shard in sources.held:
            if moved or shard not in holds[process]:
                copies.append(kind(slot, process, *sources.of(shard, process)))
        elif shard not in rebuilt:
            rebuilt[shard] = (process, slot)
            rebuilds.append(Rebuild(slot, process, sources.nearest(slot)))
        else:
            late_copies.append(kind(slot, process, *rebuilt[shard]))
    yield from copies
    yield from rebuilds
    yield from late_copies


class _Sources:
    """Who sends what is held, and what is near to what is not."""

    def __init__(
        self,
        topology: Topology,
        before: Assignment,
        after: Assignment,
        holds: Mapping[int, frozenset[Shard]],
    ) -> None:
        self.held = frozenset(shard for shards in holds.values() for shard in shards)
        self._topology = topology
        self._holds = holds
        self._stays: dict[Shard, tuple[int, int]] = {}
        for slot, process in enumerate(after.process_of):
            shard = topology.shard_of(slot)
            if process is not None and shard in holds[process]:
                self._stays.setdefault(shard, (process, slot))
        self._holder: dict[Shard, int] = {}
        self._served: dict[int, dict[Shard, int]] = {}
        for process in sorted(holds):
            for shard in holds[process]:
                self._holder.setdefault(shard, process)
            self._served[process] = {topology.shard_of(s): s for s in before.slots_of(process)}

    def of(self, shard: Shard, process: int) -> tuple[int, int | None]:
        """The source process and slot of a held shard that `process` is to serve."""
        if shard in self._holds[process]:
            return process, self._served[process].get(shard)
        if shard in self._stays:
            return self._stays[shard]
        holder = self._holder[shard]
        return holder, self._served[holder].get(shard)

    def nearest(self, slot: int) -> tuple[int, ...]:
        """The slots to rebuild `slot` from: the nearest held stage on either side of it."""
        at = self._topology.coordinate(slot)
        held = [pp for pp in range(self._topology.pipeline) if Shard(at.tp, pp) in self.held]
        stages = [pp for pp in held if pp < at.pp][-1:] + [pp for pp in held if pp > at.pp][:1]
        return tuple(self._topology.slot(tp=at.tp, cp=at.cp, pp=pp, dp=at.dp) for pp in stages)
