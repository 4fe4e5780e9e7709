"""Whether the two runs of examples/demo.sh did what the demo says; exit code 1 if not."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 256
"""Bytes: a model that knows nothing of a text has a loss of ln 256 a byte."""
WELL_BELOW = 1.5
"""So much lower must the validation loss be, in nats."""

Summary = Mapping[str, Any]


def problems_of_both(name: str, summary: Summary, iterations: int) -> Iterator[str]:
    """What is wrong with a run, whatever it was to show."""
    if summary["status"] not in ("ok", "degraded") or summary["exit_code"] != 0:
        yield f"{name}: {summary['status']}, exit code {summary['exit_code']}"
    if summary["iterations"] != iterations or summary["missing_steps"]:
        yield f"{name}: {summary['iterations']} iterations of {iterations} were committed"
    if summary["steps_with_wrong_microbatches"] != 0:
        yield f"{name}: {summary['steps_with_wrong_microbatches']} steps had a wrong batch"


def problems_of_recover(summary: Summary) -> Iterator[str]:
    """What is wrong with the run in which a process was killed."""
    if summary["faults_fired"] != 1 or summary["faults_unfired"]:
        yield f"recover: the fault did not strike: {summary['faults_unfired']}"
    if summary["repairs"] < 1 or summary["live_replicas"] != summary["num_replicas"] - 1:
        yield f"recover: {summary['repairs']} repairs, {summary['live_replicas']} replicas live"
    untrained, loss = math.log(VOCABULARY), summary["validation_lm_loss"]
    if not isinstance(loss, float) or not loss < untrained - WELL_BELOW:
        yield f"recover: validation loss {loss}, and {untrained:.2f} is that of an untrained model"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_root", type=Path)
    parser.add_argument("--stock-iters", type=int, required=True)
    parser.add_argument("--recover-iters", type=int, required=True)
    arguments = parser.parse_args(argv)
    wanted = {"stock": arguments.stock_iters, "recover": arguments.recover_iters}
    found: list[str] = []
    summaries: dict[str, Summary] = {}
    for name, iterations in wanted.items():
        path = arguments.run_root / name / "summary.json"
        if not path.exists():
            found.append(f"{name}: it left no {path}")
            continue
        summaries[name] = json.loads(path.read_text())
        found += problems_of_both(name, summaries[name], iterations)
    if "recover" in summaries:
        found += problems_of_recover(summaries["recover"])
    for problem in found:
        print(f"demo: {problem}", file=sys.stderr)
    if found:
        return 1
    loss, first = (summaries["recover"][f"{n}_lm_loss"] for n in ("validation", "first"))
    print(
        f"Validation loss {loss:.2f}. It began at {first:.2f}, and who knows nothing of bytes has "
        f"ln {VOCABULARY} = {math.log(VOCABULARY):.2f}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
