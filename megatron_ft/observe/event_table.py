"""The one table of event kinds and their fields, and the check against it.

Every event has the fields `id`, `time` (Unix seconds), `iteration` (Megatron's, from 1; 0 before
the first), `epoch` (world epoch), `kind` and `process`. The rest depends on the kind, and a field
that the table does not list is refused: a misspelt measurement would be lost silently. What fits
nowhere goes into `detail`, a mapping that every kind accepts.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]

COMMON = ("id", "time", "iteration", "epoch", "kind", "process")
STATUSES = ("ok", "degraded", "stopped")

# Field name -> type. A trailing "?" allows None.
FIELDS: dict[str, str] = {
    # sizes of the job
    "num_processes": "int",
    "num_slots": "int",
    "num_replicas": "int",
    "num_stages": "int",
    "global_microbatches": "int",
    "micro_batch_size": "int",
    "seq_length": "int",
    "train_iters": "int",
    "versions": "mapping",
    "flags": "mapping",
    "faults": "strings",
    # one step
    "lm_loss": "number",
    "grad_norm": "number?",
    "learning_rate": "number",
    "microbatches": "int",
    "planned_microbatches": "int",
    "samples_digest": "string",
    "seconds": "number",
    "tokens_per_second": "number",
    "live_replicas": "int",
    "live_processes": "int",
    "quotas": "ints",
    "recomputed_microbatches": "int",
    "degraded_stages": "int",
    "overhead_bytes": "mapping",
    # where and who
    "slot": "int?",
    "slots": "ints",
    "joined": "ints",
    "stage": "int?",
    "stages": "ints",
    "replica": "int?",
    "failed_process": "int?",
    "by_process": "int",
    "by_slot": "int",
    "from_slot": "int?",
    "point": "string",
    "how": "string",
    "method": "string",
    "role": "string",
    "previous_role": "string",
    "fault": "string",
    "fault_kind": "string",
    "n": "int?",
    "restart": "int",
    "from_iteration": "int",
    "steps_lost": "int",
    # times measured, in seconds, and bytes
    "detect_s": "number",
    "repair_s": "number",
    "waited_s": "number",
    "join_s": "number",
    "restore_s": "number",
    "recompute_s": "number",
    "transfer_s": "number",
    "transfer_bytes": "int",
    "downtime_s": "number",
    "down_s": "number",
    # checkpoint, evaluation, end
    "path": "string",
    "bytes": "int",
    "reason": "string",
    "split": "string",
    "status": "string",
    "exit_code": "int",
    "message": "string",
    "detail": "mapping",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of event."""

    doc: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


_TRANSFER = ("transfer_s", "transfer_bytes", "from_slot")

KINDS: dict[str, Kind] = {
    "run_started": Kind(
        "the job, or a new start of it, is about to train",
        (
            *("num_processes", "num_slots", "num_replicas", "num_stages"),
            *("global_microbatches", "micro_batch_size", "seq_length", "versions", "flags"),
        ),
        ("faults", "train_iters"),
    ),
    "run_restarted": Kind(
        "the launcher has started the job again; down_s is since the last event before",
        ("restart", "exit_code", "from_iteration", "steps_lost"),
        ("down_s",),
    ),
    "step": Kind(
        "a training step was committed",
        (
            *("lm_loss", "grad_norm", "microbatches", "samples_digest", "seconds"),
            *("tokens_per_second", "live_replicas", "live_processes", "quotas"),
        ),
        (
            *("learning_rate", "planned_microbatches", "recomputed_microbatches"),
            *("degraded_stages", "overhead_bytes"),
        ),
    ),
    "fault_injected": Kind(
        "an injected fault is about to happen in this process",
        ("fault", "fault_kind", "point"),
        ("slot", "stage", "n"),
    ),
    "fault_detected": Kind(
        "a death was noticed; slot is None when the process served none",
        ("slot", "how"),
        ("failed_process", "replica", "stage", "point", "detect_s"),
    ),
    "repaired": Kind(
        "the world is whole again under a new epoch, which is this event's epoch",
        ("repair_s", "live_replicas", "live_processes"),
        (
            *("num_replicas", "quotas", "recomputed_microbatches", "detect_s", "restore_s"),
            *("recompute_s", "transfer_s", "transfer_bytes", "downtime_s"),
            *("waited_s", "joined", "join_s"),
        ),
    ),
    "slot_filled": Kind(
        "a process took over a vacant slot",
        ("slot", "by_process"),
        ("replica", "stage", *_TRANSFER),
    ),
    "replica_dark": Kind(
        "a replica gave up; its healthy processes joined the pool",
        ("replica",),
        ("slots", "reason"),
    ),
    "slot_barred": Kind(
        "a slot is not filled any more, because its replacements keep dying",
        ("slot", "reason"),
        ("replica", "stage"),
    ),
    "stage_rebuilt": Kind(
        "a stage lost in every replica was rebuilt from others",
        ("stage", "method"),
        ("slot", "replica", "transfer_s", "transfer_bytes"),
    ),
    "stage_adopted": Kind(
        "the process of by_slot now serves the vacant slot too",
        ("slot", "by_slot"),
        ("replica", "stage", *_TRANSFER),
    ),
    "stages_degraded": Kind(
        "from this iteration on these stages of a replica are trained in MeCeFO mode",
        ("replica", "stages"),
    ),
    "stages_restored": Kind(
        "from this iteration on these stages of a replica are trained exactly again",
        ("replica", "stages"),
    ),
    "role_changed": Kind(
        "a replica or process has another part in the step (major, minor, spare, pool)",
        ("role",),
        ("previous_role", "slot", "replica", "by_process"),
    ),
    "checkpoint": Kind("a checkpoint is complete", ("path", "seconds"), ("bytes", "reason")),
    "eval": Kind("an evaluation is complete", ("lm_loss",), ("split", "seconds")),
    "run_finished": Kind(
        "this start of the job ends; status is " + ", ".join(STATUSES),
        ("status", "exit_code"),
        ("message", "overhead_bytes", "live_replicas"),
    ),
}


def check(kind: str, fields: Mapping[str, Any]) -> Event:
    """The fields as they are written to JSON.

    numpy's and other registered numbers become int and float, tuples become lists. A float that is
    not finite stays what it is; `jsonl.encode` decides on its spelling.

    Raises:
        ValueError: unknown kind, unknown or missing field, or a value of another type than the
            table's.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown event kind {kind!r}; there are {', '.join(KINDS)}")
    entry = KINDS[kind]
    allowed = (*entry.required, *entry.optional, "detail")
    if unknown := sorted(set(fields) - set(allowed)):
        raise ValueError(
            f"event {kind!r} has no field {', '.join(unknown)}; it has {', '.join(allowed)}"
        )
    if missing := [name for name in entry.required if name not in fields]:
        raise ValueError(f"event {kind!r} needs {', '.join(missing)}")
    checked = {name: _convert(kind, name, value) for name, value in fields.items()}
    if kind == "run_finished" and checked["status"] not in STATUSES:
        raise ValueError(f"status {checked['status']!r} is none of {', '.join(STATUSES)}")
    return checked


def _convert(kind: str, name: str, value: Any) -> Any:
    declared = FIELDS[name]
    if value is None and declared.endswith("?"):
        return None
    match declared.rstrip("?"):
        case "int" if _is_int(value):
            return int(value)
        case "number" if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
        case "string" if isinstance(value, str):
            return value
        case "mapping" if isinstance(value, Mapping):
            return dict(value)
        case "ints" if isinstance(value, list | tuple) and all(map(_is_int, value)):
            return [int(item) for item in value]
        case "strings" if isinstance(value, list | tuple):
            if all(isinstance(item, str) for item in value):
                return list(value)
    raise ValueError(f"event {kind!r}: {name} must be {declared}, not {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number_field(name: str) -> bool:
    """Whether a string in this field is the spelling of a float that JSON cannot hold."""
    return FIELDS.get(name, "").startswith("number")


def spell_float(value: float) -> float | str:
    """JSON has no NaN: the strings NaN, Infinity, -Infinity stand for it, others stay floats."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
