"""The head line of a run and its key figures: words and numbers that page and terminal share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from megatron_ft.observe.digest import rows as digest_rows
from megatron_ft.observe.summary import Summary
from megatron_ft.report import wording
from megatron_ft.report.load import RunData
from megatron_ft.report.rows import Row

Tone = Literal["good", "warn", "bad", "plain"]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One key figure of a run."""

    name: str
    field: str
    """Field of summary.json that it shows."""
    text: str
    raw: Any
    """The value, as summary.json has it."""
    tone: Tone = "plain"


def status_of(run: RunData) -> tuple[str, Tone]:
    """One word or two, and how it is to be taken."""
    if not run.ended:
        return "no end yet", "warn"
    status = run.summary["status"]
    tones: dict[str, Tone] = {"ok": "good", "degraded": "warn", "stopped": "bad"}
    return status, tones[status]


def headline(run: RunData, now: float) -> str:
    """How the run ended, or how far it is.

    Args:
        now: Unix seconds.
    """
    if run.ended:
        # The digest's sentence, so that page, terminal and `observe.summary` say the same.
        (_, sentence), *_ = digest_rows(run.summary)
        words = sentence.plain
        return words[0].upper() + words[1:] + ("" if words.endswith(".") else ".")
    age = max(0.0, now - float(run.events[-1]["time"]))
    reached = f"{run.summary['iterations']:,}"
    planned = run.start.get("train_iters")
    of_all = f" of {planned:,}" if planned else ""
    said = ""
    if run.exit_status is not None:
        said = f" exit_status.json says exit code {run.exit_status.code}."
        if run.exit_status.message:
            said += f" {run.exit_status.message}"
    return (
        f"No end was reported: the run is still going, or it was killed. {reached}{of_all} steps "
        f"are committed; the last event is {wording.seconds(age)} old.{said}"
    )


def survived(run: RunData, rows: Sequence[Row]) -> str:
    """What the run went through, in one line."""
    deaths = sum(len(row.deaths) for row in rows)
    lost = sum(len(row.deaths) for row in rows if row.repaired is None)
    kinds = [event["kind"] for row in rows for event in row.events]
    told = [
        _plural(deaths - lost, "death survived", "deaths survived"),
        _plural(lost, "death not survived", "deaths not survived"),
        _plural(kinds.count("replica_dark"), "replica went dark", "times a replica went dark"),
        _plural(kinds.count("slot_filled"), "slot filled again", "slots filled again"),
        _plural(kinds.count("stage_rebuilt"), "stage rebuilt", "stages rebuilt"),
        _plural(kinds.count("stage_adopted"), "stage adopted", "stages adopted"),
        _plural(run.summary["starts"] - 1, "new start of the job", "new starts of the job"),
    ]
    return ", ".join(filter(None, told)) or "nothing died"


def figures_of(run: RunData) -> list[Figure]:
    """Key figures, the most important first."""
    summary = run.summary
    planned = run.start.get("train_iters")
    wrong = summary["steps_with_wrong_microbatches"]
    found = [
        _figure(
            summary, "steps", "iterations", lambda v: _of(v, planned if v != planned else None)
        ),
        _figure(summary, "final loss", "final_lm_loss", wording.loss),
        _figure(summary, "validation loss", "validation_lm_loss", wording.loss),
        _figure(summary, "goodput", "goodput", lambda v: f"{v:.1%}"),
        _figure(summary, "wall time", "wall_s", wording.seconds),
        _figure(
            summary,
            "live replicas",
            "live_replicas",
            lambda v: _of(v, summary["num_replicas"]),
            "warn" if summary["live_replicas"] != summary["num_replicas"] else "plain",
        ),
        _figure(summary, "repairs", "repairs", "{:,}".format),
        _figure(summary, "downtime", "downtime_s", lambda v: wording.seconds(sum(v))),
        _figure(summary, "recomputed microbatches", "recomputed_microbatches", "{:,}".format),
        _figure(
            summary,
            "steps with a wrong batch",
            "steps_with_wrong_microbatches",
            "{:,}".format,
            "bad" if wrong else "good",
        ),
        _figure(summary, "tokens", "tokens", "{:,}".format),
        _figure(
            summary,
            "tokens/s per process",
            "effective_tokens_per_second_per_process",
            wording.number,
        ),
        _figure(
            summary,
            "median step",
            "step_seconds",
            lambda v: wording.seconds(v["p50"]) if v else "-",
        ),
        _figure(
            summary,
            "memory for copies",
            "overhead_bytes",
            lambda v: wording.size(sum(v.values())) if v else "-",
        ),
    ]
    return found


def _figure(
    summary: Summary, name: str, field: str, words: Callable[[Any], str], tone: Tone = "plain"
) -> Figure:
    value = summary[field]
    return Figure(name, field, "-" if value is None else words(value), value, tone)


def _of(value: int, planned: int | None) -> str:
    return f"{value:,}" if planned is None else f"{value:,} of {planned:,}"


def _plural(number: int, one: str, many: str) -> str:
    return "" if number < 1 else f"{number:,} {one if number == 1 else many}"
