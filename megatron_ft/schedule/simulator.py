"""Plays a compiled schedule through: is it right, and how long does it take?

Knows nothing of how schedules are compiled. It looks at the lists of actions only, as the processes
that run them do, and is what the compiler's tests rest on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.schedule.actions import COMPUTE, RECEIVE_OF, SENDS, Action, Kind, Schedule
from megatron_ft.schedule.placement import processes_of


class ScheduleError(Exception):
    """A schedule that would not compute what it is to compute, or would never end."""


@dataclass(frozen=True)
class Simulation:
    """What a schedule comes to; times in the units of the given ones."""

    makespan: float
    busy: dict[int, float]
    """For each process, the time in which it computes."""
    peak_live: tuple[int, ...]
    """For each stage, the most microbatches that are between forward and backward pass there."""

    @property
    def bubble(self) -> float:
        """The share of the processes' time in which they do not compute, from 0 to 1."""
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy.values()) / (self.makespan * len(self.busy))


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] | None = None,
    *,
    rendezvous: bool = False,
) -> Simulation:
    """Check a schedule and measure it.

    Args:
        schedule: The actions of all processes.
        forward: Time of a forward pass, of each stage or of all.
        backward: Time of a backward pass; by default twice that of the forward pass.
        rendezvous: Whether sends and receives wait for each other, as blocking calls without
            buffers do. Otherwise both are only started: a message waits to be received, and a pass
            for the message that it needs.

    Raises:
        ScheduleError: The processes lock up, receive another message than the one that comes,
            compute with something that is not there, or leave something undone.
    """
    stages = schedule.num_stages
    forwards = _of_each_stage(forward, stages)
    backwards = [2 * time for time in forwards]
    if backward is not None:
        backwards = _of_each_stage(backward, stages)
    return _Play(schedule, forwards, backwards, rendezvous).run()


def _of_each_stage(times: float | Sequence[float], num_stages: int) -> list[float]:
    listed = [float(times)] * num_stages if isinstance(times, int | float) else list(times)
    if len(listed) != num_stages:
        raise ValueError(f"{len(listed)} times for {num_stages} stages")
    return listed


# What a process has: an activation at the entrance of a stage, or a gradient at its exit.
_Thing = tuple[Kind, int, int]


class _Play:
    def __init__(
        self,
        schedule: Schedule,
        forwards: Sequence[float],
        backwards: Sequence[float],
        rendezvous: bool,
    ) -> None:
        self.schedule = schedule
        self.forwards = forwards
        self.backwards = backwards
        self.rendezvous = rendezvous
        self.processes = processes_of(schedule.placement)
        if set(schedule.actions) != set(self.processes):
            raise ScheduleError(f"actions of {sorted(schedule.actions)}, not of {self.processes}")
        self.clock = dict.fromkeys(self.processes, 0.0)
        self.busy = dict.fromkeys(self.processes, 0.0)
        self.at = dict.fromkeys(self.processes, 0)
        self.arrived: dict[int, dict[_Thing, float]] = {process: {} for process in self.processes}
        """What a process has received and not used, and since when."""
        self.to_send: dict[int, set[_Thing]] = {process: set() for process in self.processes}
        # By sender and receiver; one of the two is empty.
        self.sent: dict[tuple[int, int], deque[tuple[Action, float]]] = defaultdict(deque)
        self.posted: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.done: set[_Thing] = set()
        self.live = [0] * schedule.num_stages
        self.peak = [0] * schedule.num_stages

    def run(self) -> Simulation:
        progress = True
        while progress:
            progress = False
            for process in self.processes:
                while self._step(process):
                    progress = True
        stuck = {p: self._next(p) for p in self.processes if self._next(p) is not None}
        if stuck:
            raise ScheduleError(f"locked up: {stuck}")
        self._check_all_done()
        return Simulation(max(self.clock.values()), self.busy, tuple(self.peak))

    def _next(self, process: int) -> Action | None:
        actions, at = self.schedule.actions[process], self.at[process]
        return actions[at] if at < len(actions) else None

    def _step(self, process: int) -> bool:
        """Do the next action of a process; whether it could be done."""
        action = self._next(process)
        if action is None:
            return False
        if action.stage not in range(self.schedule.num_stages):
            raise ScheduleError(f"{action}: there is no such stage")
        if self.schedule.placement[action.stage] != process:
            raise ScheduleError(f"{action} on process {process}, which does not run that stage")
        done = (
            self._compute(process, action)
            if action.kind in COMPUTE
            else self._send(process, action)
            if action.kind in SENDS
            else self._receive(process, action)
        )
        self.at[process] += done
        return done

    # -- computing -------------------------------------------------------------------------------

    def _compute(self, process: int, action: Action) -> bool:
        kind, index, stage, _ = action
        route = self.schedule.routes[index]
        place, last = route.index(stage), len(route) - 1
        backward = kind is Kind.BACKWARD
        if backward and self.schedule.forward_only:
            raise ScheduleError(f"{action} in a schedule without backward passes")
        if backward and (Kind.FORWARD, index, stage) not in self.done:
            raise ScheduleError(f"{action} before its forward pass")
        if place != (last if backward else 0):
            needs = Kind.RECEIVE_GRADIENT if backward else Kind.RECEIVE_ACTIVATION
            if not self._take(process, (needs, index, stage), action):
                return False
        self._once((kind, index, stage), action)
        time = (self.backwards if backward else self.forwards)[stage]
        self.clock[process] += time
        self.busy[process] += time
        if place != (0 if backward else last):
            gives = Kind.SEND_GRADIENT if backward else Kind.SEND_ACTIVATION
            self._pass_on(process, gives, index, stage, route[place + (-1 if backward else 1)])
        if not self.schedule.forward_only:
            self.live[stage] += -1 if backward else 1
            self.peak[stage] = max(self.peak[stage], self.live[stage])
        return True

    def _take(self, process: int, thing: _Thing, action: Action) -> bool:
        """Wait for the input of a pass; False while it has not been sent."""
        if thing in self.arrived[process]:
            since = self.arrived[process].pop(thing)
            self.clock[process] = max(self.clock[process], since)
            return True
        coming = (p for (_, to), posts in self.posted.items() if to == process for p in posts)
        if any(post[:3] == thing for post in coming):
            return False
        raise ScheduleError(f"{action} on process {process}: its input is not there")

    def _once(self, thing: _Thing, action: Action) -> None:
        if thing in self.done:
            raise ScheduleError(f"{action} twice")
        self.done.add(thing)

    def _pass_on(self, process: int, kind: Kind, index: int, stage: int, to: int) -> None:
        """Hand over what was computed, here, or keep it until it is sent."""
        if self.schedule.placement[to] == process:
            self.arrived[process][RECEIVE_OF[kind], index, to] = self.clock[process]
        else:
            self.to_send[process].add((kind, index, stage))

    # -- messages --------------------------------------------------------------------------------

    def _send(self, process: int, action: Action) -> bool:
        peer = self._peer(process, action)
        thing = (action.kind, action.microbatch, action.stage)
        if thing not in self.to_send[process]:
            raise ScheduleError(f"{action} on process {process}: it has nothing like that to send")
        if self.rendezvous:
            answer = self._next(peer)
            if answer is None or answer.kind in COMPUTE | SENDS or answer.peer != process:
                return False
            self.clock[process] = self.clock[peer] = max(self.clock[process], self.clock[peer])
            self.at[peer] += 1
            self._arrive(peer, action, answer, self.clock[peer])
        elif self.posted[process, peer]:
            self._arrive(peer, action, self.posted[process, peer].popleft(), self.clock[process])
        else:
            self.sent[process, peer].append((action, self.clock[process]))
        self.to_send[process].remove(thing)
        return True

    def _receive(self, process: int, action: Action) -> bool:
        peer = self._peer(process, action)
        if self.rendezvous:
            return False  # the sender moves both on
        if self.sent[peer, process]:
            message, since = self.sent[peer, process].popleft()
            self._arrive(process, message, action, since)
        else:
            self.posted[peer, process].append(action)
        return True

    def _peer(self, process: int, action: Action) -> int:
        if action.peer is None or action.peer == process or action.peer not in self.at:
            raise ScheduleError(f"{action}: there is no such process")
        return action.peer

    def _arrive(self, process: int, sent: Action, received: Action, since: float) -> None:
        self._match(sent, received)
        self.arrived[process][received.kind, received.microbatch, received.stage] = since

    def _match(self, sent: Action, received: Action) -> None:
        """The message that comes next from a process is the one that is received."""
        route = self.schedule.routes[sent.microbatch]
        step = 1 if sent.kind is Kind.SEND_ACTIVATION else -1
        place = route.index(sent.stage) + step
        ok = 0 <= place < len(route) and received[:3] == (
            RECEIVE_OF[sent.kind],
            sent.microbatch,
            route[place],
        )
        if not ok:
            raise ScheduleError(f"{received} gets the message of {sent}")

    def _check_all_done(self) -> None:
        stages, count = self.schedule.num_stages, self.schedule.num_microbatches
        passes = 1 if self.schedule.forward_only else 2
        if len(self.done) != passes * stages * count:
            raise ScheduleError(f"{len(self.done)} of {passes * stages * count} passes are done")
        for process in self.processes:
            left = {*self.arrived[process], *self.to_send[process]}
            if left:
                raise ScheduleError(f"process {process} is left with {left}")
        if any(self.sent.values()) or any(self.posted.values()):
            raise ScheduleError("a message that nobody receives or nobody sends")
