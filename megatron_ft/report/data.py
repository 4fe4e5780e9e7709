"""What the scripts of the page draw from: plain lists and numbers, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_ft.observe.event_table import Event
from megatron_ft.report.compare import differences
from megatron_ft.report.curves import NUM_BUCKETS, Curve, curves_of, digits
from megatron_ft.report.load import RunData
from megatron_ft.report.rows import Row
from megatron_ft.report.shares import replica_lanes, shown_replicas
from megatron_ft.report.timeline import Timeline
from megatron_ft.report.world import Lane, shown_lanes, world_of

# A tip of more characters covers the plot that it explains.
_MAX_TIP = 400
_STATES = ("first", "other", "adopted", "dark", "vacant")


def run_data(run: RunData, rows: Sequence[Row], timeline: Timeline) -> dict[str, Any]:
    """Everything that is drawn of one run."""
    steps = run.accounts.steps
    lanes, world_note = _world(run, timeline)
    replicas, shares_note = _shares(run, timeline)
    return {
        "name": run.name,
        "range": {
            "step": [steps[0]["iteration"] - 0.5, steps[-1]["iteration"] + 0.5] if steps else None,
            "time": [0, round(timeline.wall_s, 3)],
        },
        "curves": {name: _curve(curve) for name, curve in curves_of(steps, timeline).items()},
        "evals": [_eval(e, timeline) for e in _of(run, "eval") if math.isfinite(e["lm_loss"])],
        "checkpoints": [
            {**_place(e, timeline), "step": e["iteration"] + 0.5, "text": _checkpoint(e)}
            for e in _of(run, "checkpoint")
        ],
        "starts": [
            {**_place(e, timeline), "text": f"start {number} of the job"}
            for number, e in enumerate(_of(run, "run_started"), start=1)
        ],
        "incidents": [_incident(number, row, timeline) for number, row in enumerate(rows)],
        **lanes,
        **replicas,
        "worldNote": world_note,
        "sharesNote": shares_note,
        # Last, when all instants have their numbers.
        "instants": {
            "step": timeline.steps,
            "time": [round(value, 3) for value in timeline.seconds],
        },
    }


def comparison_data(runs: Sequence[RunData]) -> dict[str, Any]:
    """Loss curves of all runs, and their differences from the first."""
    series = []
    for run in runs:
        curves = curves_of(run.accounts.steps, Timeline(run.events), NUM_BUCKETS)
        if "lm_loss" in curves:
            series.append({"name": run.name, **_curve(curves["lm_loss"])})
        else:
            series.append({"name": run.name, "step": [], "time": [], "y": []})
    return {
        "losses": series,
        "differences": [
            {"name": d.name, "step": d.steps, "time": d.steps, "y": d.values}
            for d in differences(runs)
        ],
    }


def _of(run: RunData, kind: str) -> list[Event]:
    return [event for event in run.events if event["kind"] == kind]


def _place(event: Event, timeline: Timeline) -> dict[str, float]:
    step, seconds = timeline.place(event)
    return {"step": step, "time": round(seconds, 3)}


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "label": curve.label,
        "step": curve.steps,
        "time": curve.seconds,
        "y": curve.values,
        "total": curve.total,
        "notFinite": curve.not_finite[:200],
        "numNotFinite": len(curve.not_finite),
    }


def _eval(event: Event, timeline: Timeline) -> dict[str, Any]:
    return {
        **_place(event, timeline),
        "step": event["iteration"],
        "y": digits(event["lm_loss"]),
        "split": event.get("split", "validation"),
    }


def _checkpoint(event: Event) -> str:
    reason = f", {event['reason']}" if "reason" in event else ""
    return f"checkpoint after step {event['iteration']} in {event['seconds']:.2f} s{reason}"


def _incident(number: int, row: Row, timeline: Timeline) -> dict[str, Any]:
    # It begins where the death was noticed; a repair's end would lie in the same step anyway.
    worst = "other"
    for tag in row.tags:
        if tag in ("died", "unrepaired", "fault"):
            worst = {"died": "died", "unrepaired": "unrepaired", "fault": worst}[tag]
    text = row.text if len(row.text) <= _MAX_TIP else row.text[: _MAX_TIP - 1] + "…"
    return {
        **_place(row.first, timeline),
        "row": number,
        "type": worst,
        "text": f"step {row.iteration:,}, epoch {row.epoch}\n{text}",
    }


def _world(run: RunData, timeline: Timeline) -> tuple[dict[str, Any], str]:
    world = world_of(run.events, timeline)
    lanes, note = shown_lanes(world.lanes)
    return {
        "epochs": [[begin, end, epoch] for begin, end, epoch in world.epochs.spans],
        "lanes": [_lane(lane) for lane in lanes],
    }, note


def _lane(lane: Lane) -> dict[str, Any]:
    named = []
    if lane.replica is not None:
        named.append(f"replica {lane.replica}")
    if lane.stage is not None:
        named.append(f"stage {lane.stage}")
    return {
        "label": f"slot {lane.slot}",
        "short": str(lane.slot),
        "place": ", ".join(named),
        "spans": [[s.begin, s.end, _STATES.index(s.state), s.process] for s in lane.spans],
        "marks": [[instant, mark, text] for instant, mark, text in lane.marks],
    }


def _shares(run: RunData, timeline: Timeline) -> tuple[dict[str, Any], str]:
    lanes, note = shown_replicas(replica_lanes(run.events, timeline))
    return {
        "replicas": [
            {
                "label": f"replica {lane.replica}",
                "short": str(lane.replica),
                "quotas": [list(span) for span in lane.quotas],
                "roles": [list(span) for span in lane.roles],
            }
            for lane in lanes
        ],
        "batch": run.summary["global_microbatches"],
    }, note
