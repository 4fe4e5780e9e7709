"""A process that reaches points and fails as told; test_faults.py watches it from outside.

Usage: faults_child.py RUN_DIR SPEC... [--slot N] [--process N] [--iterations N] [--rate RATE]

It prints `step ITERATION` after each of three iterations of two microbatches, and a second thread
prints nothing but stamps the file `beat` every 10 ms, as a heartbeat would.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

from megatron_ft.faults.injector import Injector
from megatron_ft.faults.plan import plan_from_flags
from megatron_ft.observe.events import EventLog
from megatron_ft.observe.rundir import RunDirectory


def beat(path: Path) -> None:
    while True:
        path.write_text(str(time.monotonic()))
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("specs", nargs="*")
    parser.add_argument("--slot", type=int, action="append", default=[])
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--rate", action="append", default=[])
    args = parser.parse_args()
    log = EventLog(RunDirectory(args.run_dir), args.process)
    injector = Injector(
        plan_from_flags(args.specs, rates=args.rate, seed=5),
        log,
        slots=lambda: args.slot,
        stage_of=lambda slot: slot // 2,
        epoch=lambda: 0,
        num_slots=4,
        num_stages=2,
        actions={"lose-stage": lambda spec: print("lost stage", spec.stage, flush=True)},
    )
    threading.Thread(target=beat, args=(args.run_dir / "beat",), daemon=True).start()
    while not (args.run_dir / "beat").exists():
        time.sleep(0.001)
    for iteration in range(1, args.iterations + 1):
        injector.reach("pool", iteration)
        for microbatch in range(2):
            injector.reach("forward", iteration, microbatch)
        for bucket in range(3):
            injector.reach("reduce", iteration, bucket)
        injector.reach("voted", iteration)
        print("step", iteration, flush=True)


if __name__ == "__main__":
    main()
