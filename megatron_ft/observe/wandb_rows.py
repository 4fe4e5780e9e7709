"""From events to the numbers that wandb charts: the same numbers, under wandb's names."""

from __future__ import annotations

import collections
from typing import Any

from megatron_ft.observe.event_table import Event

Row = dict[str, Any]

# Fields of a `step` event by the name of their chart.
_STEP = {
    "lm_loss": "train/lm_loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "tokens_per_second": "train/tokens_per_second",
    "seconds": "train/step_seconds",
    "microbatches": "ft/microbatches",
    "live_replicas": "ft/live_replicas",
    "live_processes": "ft/live_processes",
    "recomputed_microbatches": "ft/recomputed_microbatches",
    "degraded_stages": "ft/degraded_stages",
}
# Measurements that any other event may carry.
_MEASURED = (
    *("detect_s", "repair_s", "restore_s", "recompute_s", "downtime_s"),
    *("transfer_s", "transfer_bytes"),
)


class RowBuilder:
    """Turns events into rows; counts kinds, so it must see all events of the run."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()

    def row(self, event: Event) -> Row:
        """The row of one event: chart name -> number, with `iteration`; empty if it charts none."""
        kind = event["kind"]
        row: Row = {"iteration": event["iteration"], "ft/epoch": event["epoch"]}
        if kind == "step":
            row |= {chart: event[name] for name, chart in _STEP.items() if _has(event, name)}
        elif kind == "eval":
            row[f"{event.get('split', 'validation')}/lm_loss"] = event["lm_loss"]
        elif kind in ("run_started", "run_finished"):
            return {}
        else:
            self._counts[kind] += 1
            row[f"ft/count/{kind}"] = self._counts[kind]
            row |= {f"ft/{name}": event[name] for name in _MEASURED if _has(event, name)}
        for use, size in event.get("overhead_bytes", {}).items():
            row[f"ft/overhead_bytes/{use}"] = size
        return row


def _has(event: Event, name: str) -> bool:
    return event.get(name) is not None
