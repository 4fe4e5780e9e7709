"""What a plan says: the actions of a repair, in order, and how to tell a person about them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.topology import Assignment, Topology

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
    """A slot of the same shard that the source serves under the new assignment; None where it
    serves none (a pool process that still holds the state, or an adopter that gives it back)."""

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
    """In the order in which to carry them out: a source holds what it sends when its turn comes."""

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
