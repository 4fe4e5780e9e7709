"""Telling events to a person: one line for a step, one for an incident and all that followed.

An incident is everything between the first notice of a death and the end of its repair. The
progress line, the summary's table and wandb's table all take their words from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from megatron_ft.observe.event_table import Event

FATAL = ("kill", "stop", "exception", "exit", "loop", "hold-gil")
"""Injected faults after which their process is gone."""

# What a repair consists of, apart from its first and last event.
_CONSEQUENCES = ("slot_filled", "replica_dark", "stage_rebuilt", "stage_adopted", "role_changed")


# What makes two reports of a kind, beside the epoch, reports of the same thing.
_IDENTITY: dict[str, tuple[str, ...]] = {
    "fault_detected": ("slot", "failed_process"),
    "repaired": (),
    "slot_filled": ("slot",),
    "replica_dark": ("replica",),
}


@dataclasses.dataclass(frozen=True)
class Incident:
    """One repair: its events from the first `fault_detected` to `repaired`."""

    events: tuple[Event, ...]

    @property
    def iteration(self) -> int:
        return int(self.events[-1]["iteration"])

    @property
    def epoch(self) -> int:
        """The epoch after the repair."""
        return int(self.events[-1]["epoch"])

    @property
    def time(self) -> float:
        """First notice, Unix seconds; all that was noticed is written down after the repair."""
        return min(float(self.events[0]["time"]), float(self.events[-1]["time"]) - self.repair_s)

    @property
    def detect_s(self) -> float | None:
        """Fault to first notice: the longest, where several died; None where nobody measured."""
        seconds = [float(e["detect_s"]) for e in self.events if e.get("detect_s") is not None]
        return max(seconds, default=None)

    @property
    def repair_s(self) -> float:
        """First notice to new epoch."""
        return float(self.events[-1]["repair_s"])

    @property
    def deaths(self) -> list[Event]:
        """Its `fault_detected` events; none where processes only took their slots."""
        return [e for e in self.events if e["kind"] == "fault_detected"]

    @property
    def text(self) -> str:
        """The incident in one line."""
        followed = [e for e in self.events if e["kind"] in _CONSEQUENCES]
        clauses = [*map(describe, self.deaths), *_consequences(followed), describe(self.events[-1])]
        return "; ".join(dict.fromkeys(clauses))


class IncidentCollector:
    """Sorts a stream of events into incidents and the rest."""

    def __init__(self) -> None:
        self._open: list[Event] = []
        self._epoch = 0

    def add(self, event: Event) -> Incident | Event | None:
        """Take the next event.

        Returns:
            The incident that it ends, None if it belongs to an open one or tells nothing new, or
            the event itself.
        """
        kind = event["kind"]
        if kind == "repaired":
            known, self._epoch = event["epoch"] <= self._epoch, event["epoch"]
            if known and not self._open:
                # All meet once more at the end of a job; nothing was repaired.
                return None
            incident = Incident((*self._open, event))
            self._open.clear()
            return incident
        if kind == "fault_detected" or (self._open and kind in _CONSEQUENCES):
            self._open.append(event)
            return None
        if kind == "run_started":
            # A start of the job that died in mid-repair leaves an incident that never ends.
            self._open.clear()
            self._epoch = 0
        return event


def incidents(events: Iterable[Event]) -> list[Incident]:
    """All incidents, in order; each repair once, whoever reported it.

    Several processes may report the same death and the same repair: events that say the same
    about the same epoch of the same start of the job count once.
    """
    collector = IncidentCollector()
    struck: dict[int, float] = {}
    found: list[Incident] = []
    for event in _without_echoes(events):
        if event["kind"] == "run_started":
            struck.clear()
        elif event["kind"] == "fault_injected" and event["fault_kind"] in FATAL:
            struck[event["process"]] = float(event["time"])
        item = collector.add(event)
        if isinstance(item, Incident):
            found.append(_with_detection(item, struck))
    return found


def _with_detection(incident: Incident, struck: dict[int, float]) -> Incident:
    """The incident, each death with the time from its injected fault to the first notice.

    Who notices cannot know when a fault struck another process; the events tell. A death is written
    down after the repair, so that the notice is earlier by the time which that took.
    """
    noticed = float(incident.events[-1]["time"]) - incident.repair_s
    events = []
    for event in incident.events:
        if event["kind"] == "fault_detected" and event.get("detect_s") is None:
            at = struck.get(event.get("failed_process", -1))
            if at is not None:
                event = {**event, "detect_s": max(0.0, noticed - at)}
        events.append(event)
    return Incident(tuple(events))


def _without_echoes(events: Iterable[Event]) -> Iterable[Event]:
    seen: set[tuple[object, ...]] = set()
    for event in events:
        if event["kind"] == "run_started":
            seen.clear()
        elif event["kind"] in ("fault_detected", "repaired", *_CONSEQUENCES):
            names = _IDENTITY.get(event["kind"], ("slot", "replica", "stage", "role"))
            key = (event["kind"], event["epoch"], *map(event.get, names))
            if event["kind"] == "fault_detected" and event["slot"] is not None:
                key = key[:3]
            if key in seen:
                continue
            seen.add(key)
        yield event


def describe(event: Event) -> str:
    """One event in words, without time or iteration."""
    e = event
    match e["kind"]:
        case "run_started":
            return (
                f"{e['num_processes']} processes serve {e['num_slots']} slots: "
                f"{_count(e['num_replicas'], 'replica')} of {_count(e['num_stages'], 'stage')}, "
                f"{e['global_microbatches']} microbatches a step"
            )
        case "run_restarted":
            down = f", {e['down_s']:.1f} s down" if "down_s" in e else ""
            return (
                f"restart {e['restart']} after exit code {e['exit_code']}: on from iteration "
                f"{e['from_iteration']}, {_count(e['steps_lost'], 'step')} lost{down}"
            )
        case "fault_injected":
            return f"injecting {e['fault']} at {_place(e)}"
        case "fault_detected":
            where = f" in {e['point']}" if "point" in e else ""
            return f"{_place(e)} died, noticed at {e['how']}{where}"
        case "slot_filled":
            return f"process {e['by_process']} fills {_place(e)}{_cost(e)}"
        case "replica_dark":
            why = f", {e['reason']}" if "reason" in e else ""
            return f"replica {e['replica']} goes dark{why}"
        case "slot_barred":
            return f"{_place(e)} stays vacant: {e['reason']}"
        case "stage_rebuilt":
            return f"stage {e['stage']} rebuilt ({e['method']}){_cost(e)}"
        case "stage_adopted":
            return f"slot {e['by_slot']} does {_place(e)} too{_cost(e)}"
        case "stages_degraded":
            return f"replica {e['replica']} trains {_stages(e)} degraded"
        case "stages_restored":
            return f"replica {e['replica']} trains {_stages(e)} exactly again"
        case "role_changed":
            return f"{_place(e)} is now {e['role']}"
        case "repaired":
            return _repaired(e)
        case "checkpoint":
            return f"checkpoint {e['path']} in {e['seconds']:.2f} s"
        case "eval":
            return f"{e.get('split', 'validation')} loss {e['lm_loss']:.6f}"
        case "run_finished":
            reason = f": {e['message']}" if e.get("message") else ""
            return f"finished, {e['status']}, exit code {e['exit_code']}{reason}"
    return str(e["kind"])


def step_line(event: Event, train_iters: int | None = None, num_replicas: int | None = None) -> str:
    """The progress line of a `step` event.

    The world epoch is left out: to a person who trains, an epoch is a pass over the data.
    """
    of_iters = f"/{train_iters}" if train_iters else ""
    of_replicas = f"/{num_replicas}" if num_replicas else ""
    norm = event["grad_norm"]
    return (
        f"iteration {event['iteration']:>6}{of_iters} | loss {event['lm_loss']:.6f} | "
        f"grad norm {'-' if norm is None else format(norm, '.4f')} | "
        f"{event['tokens_per_second']:>9,.0f} tokens/s | {event['seconds']:.3f} s | "
        f"replicas {event['live_replicas']}{of_replicas} | "
        f"{event['microbatches']} microbatches ({quota_text(event['quotas'])})"
    )


def quota_text(quotas: Sequence[int]) -> str:
    """`11+11+10`, or `62x131+70` where there are too many to list."""
    live = [quota for quota in quotas if quota]
    if len(live) <= 8:
        return "+".join(map(str, live))
    counts = {quota: live.count(quota) for quota in dict.fromkeys(live)}
    return "+".join(
        f"{count}x{quota}" if count > 1 else str(quota) for quota, count in counts.items()
    )


def _repaired(event: Event) -> str:
    of_all = f" of {event['num_replicas']}" if "num_replicas" in event else ""
    quotas = event.get("quotas")
    share = f" with {quota_text(quotas)} microbatches" if quotas else ""
    verb = "goes" if event["live_replicas"] == 1 else "go"
    went_on = f"{event['live_replicas']}{of_all} replicas {verb} on{share}"
    return f"{went_on}; repaired in {event['repair_s']:.3f} s"


def _consequences(events: Sequence[Event]) -> Iterable[str]:
    """Roles are many and small; the others get a clause each."""
    changes: dict[str, list[int]] = {}
    for event in events:
        if event["kind"] == "role_changed" and event.get("replica") is not None:
            changes.setdefault(event["role"], []).append(event["replica"])
        else:
            yield describe(event)
    for role, replicas in changes.items():
        name = "replica" if len(replicas) == 1 else "replicas"
        yield f"{name} {', '.join(map(str, replicas))} now {role}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _place(event: Event) -> str:
    slot = event.get("slot")
    named = [f"{n} {event[n]}" for n in ("replica", "stage") if event.get(n) is not None]
    if slot is not None:
        return f"slot {slot}" + (f" ({', '.join(named)})" if named else "")
    if named:
        return ", ".join(named)
    process = event.get("failed_process", event.get("by_process"))
    return f"process {event['process'] if process is None else process}"


def _stages(event: Event) -> str:
    numbers = " and ".join(map(str, event["stages"]))
    return f"stage{'s' if len(event['stages']) > 1 else ''} {numbers}"


def _cost(event: Event) -> str:
    if "transfer_s" not in event:
        return ""
    mib = f"{event['transfer_bytes'] / 2**20:.1f} MiB in " if "transfer_bytes" in event else ""
    return f" ({mib}{event['transfer_s']:.3f} s)"
