"""Stands in for a job of several ranks in tests of the campaign's runner: leaves a run directory.

Takes the flags of pretrain_llama_ft.py that it needs. What it does wrong is asked for by `--wrong`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

from report_runs import Writer

WRONG = ("hang", "leave", "crash", "short-batch", "silent-fault", "say")


def finished(
    directory: Path,
    iterations: int,
    faults: list[str],
    *,
    data: int = 2,
    pipeline: int = 1,
    wrong: str = "",
    weights: bool = False,
) -> Path:
    """A run that has ended well, in which each fault made the last replica dark."""
    run = Writer(directory, data=data, pipeline=pipeline, pool=0)
    run.begin(train_iters=iterations, faults=faults)
    at = {int(fault.partition("@")[2].partition(":")[0]): fault for fault in faults}
    for iteration in range(1, iterations + 1):
        if iteration in at and wrong != "silent-fault":
            fault = at[iteration]
            run.iteration += 1
            run.emit("fault_injected", fault=fault, fault_kind="kill", point="forward")
            run.iteration -= 1
            run.die(data - 1, 0, data - 1)
            run.deal({data - 1})
        run.step(**({"microbatches": 31} if wrong == "short-batch" and iteration == 2 else {}))
    run.emit("eval", 0.2, lm_loss=3.5, seconds=0.2)
    if weights:
        dumps = directory / "dumps"
        dumps.mkdir(exist_ok=True)
        for slot in range(data * pipeline):
            digest = hashlib.sha256(str(slot // data).encode()).hexdigest()
            text = json.dumps({"committed": iterations, "digest": digest})
            (dumps / f"weights-{slot}.json").write_text(text)
    return run.end("degraded" if faults else "ok")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ft-run-dir", type=Path)
    parser.add_argument("--train-iters", type=int)
    parser.add_argument("--ft-fault", action="append", default=[])
    parser.add_argument("--wrong", choices=WRONG, default="")
    options, _ = parser.parse_known_args()
    if options.wrong == "hang":
        time.sleep(600)
    if options.wrong == "crash":
        print("something is badly wrong")
        return 3
    if options.wrong == "leave":
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        subprocess.Popen(
            [*command, "--ft-run-dir", str(options.ft_run_dir)],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
            **quiet,
        )
    finished(options.ft_run_dir, options.train_iters, options.ft_fault, wrong=options.wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
