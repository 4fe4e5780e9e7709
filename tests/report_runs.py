"""Writes run directories with the product's own event log, for tests of the report."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from megatron_ft.observe.event_table import FIELDS, KINDS
from megatron_ft.observe.events import EventLog
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.summary import write_summary

BEGIN = 1_700_000_000.0
BATCH = 32


class Writer:
    """One run directory: `data` replicas of `pipeline` stages, whose clock this class moves."""

    def __init__(self, path: Path, *, data: int = 4, pipeline: int = 2, pool: int = 1) -> None:
        self.run_dir = RunDirectory(path)
        self.data, self.pipeline, self.pool = data, pipeline, pool
        self.now = BEGIN
        self.iteration = 0
        self.epoch = 0
        self.live = data
        self.quotas = [BATCH // data] * data
        self.log = EventLog(self.run_dir, 7, elected=True, clock=lambda: self.now)

    def emit(self, kind: str, after: float = 0.0, **fields: Any) -> None:
        self.now += after
        self.log.emit(kind, iteration=self.iteration, epoch=self.epoch, **fields)

    def begin(self, **changes: Any) -> None:
        """A start of the job."""
        slots = self.data * self.pipeline
        sizes = {
            "num_processes": slots + self.pool,
            "num_slots": slots,
            "num_replicas": self.data,
            "num_stages": self.pipeline,
            "global_microbatches": BATCH,
            "micro_batch_size": 2,
            "seq_length": 64,
        }
        self.epoch = 0
        fields = {"versions": {"torch": "2"}, "flags": {"argv": ["--lr", "1e-3"]}, **sizes}
        self.emit("run_started", **{**fields, **changes})

    def step(self, seconds: float = 0.5, **changes: Any) -> None:
        """Commit the next step."""
        self.iteration += 1
        noise = random.Random(self.iteration).gauss(0, 0.03)
        fields: dict[str, Any] = {
            "lm_loss": 1.8 + 4 * math.exp(-self.iteration / 400) + noise,
            "grad_norm": 1.5 + abs(noise) * 8,
            "microbatches": BATCH,
            "samples_digest": f"{self.iteration:016x}",
            "seconds": seconds,
            "tokens_per_second": BATCH * 128 / seconds,
            "live_replicas": self.live,
            "live_processes": self.live * self.pipeline,
            "quotas": self.quotas,
            "learning_rate": 1e-3 / self.iteration,
        }
        self.emit("step", seconds, **{**fields, **changes})

    def steps(self, number: int, seconds: float = 0.5) -> None:
        for _ in range(number):
            self.step(seconds)

    def deal(self, dark: set[int]) -> None:
        """Quotas and live replicas with these dark."""
        alive = [replica for replica in range(self.data) if replica not in dark]
        self.live = len(alive)
        self.quotas = [0] * self.data
        for microbatch in range(BATCH):
            self.quotas[alive[microbatch % len(alive)]] += 1

    def slot(self, replica: int, stage: int) -> int:
        return stage * self.data + replica

    def die(self, replica: int, stage: int, process: int, **repaired: Any) -> None:
        """A death during the next step, and the repair: its replica goes dark."""
        self.iteration += 1
        self.epoch += 1
        slot = self.slot(replica, stage)
        where = {"slot": slot, "replica": replica, "stage": stage}
        how = f"attempt of step {self.iteration}"
        self.emit("fault_detected", 0.2, how=how, failed_process=process, detect_s=0.04, **where)
        slots = [self.slot(replica, s) for s in range(self.pipeline)]
        self.emit("replica_dark", replica=replica, slots=slots)
        fields = {
            "repair_s": 0.03,
            "live_replicas": self.live,
            "live_processes": self.live * self.pipeline,
            "num_replicas": self.data,
            "recomputed_microbatches": 8,
        }
        self.emit("repaired", 0.03, **{**fields, **repaired})
        self.iteration -= 1

    def refill(self, replica: int, processes: list[int]) -> None:
        """Between two steps, processes take the slots of a dark replica."""
        self.epoch += 1
        self.emit(
            "repaired",
            0.05,
            repair_s=0.05,
            live_replicas=self.live,
            live_processes=self.live * self.pipeline,
            num_replicas=self.data,
        )
        for stage, process in enumerate(processes):
            self.emit(
                "slot_filled",
                0.01,
                slot=self.slot(replica, stage),
                by_process=process,
                replica=replica,
                stage=stage,
                transfer_s=0.04,
                transfer_bytes=5 << 20,
                from_slot=self.slot((replica + 1) % self.data, stage),
            )

    def end(self, status: str = "ok", code: int = 0, message: str = "") -> Path:
        """The end as the product leaves it; returns the run directory."""
        self.emit("run_finished", 0.1, status=status, exit_code=code, message=message)
        self.log.close()
        write_summary(self.run_dir)
        self.run_dir.write_exit_status(code, message)
        return self.run_dir.path


def eventful(path: Path) -> Path:
    """A short run in which everything happens that a run can report, each kind at least once."""
    run = Writer(path)
    fault = "kill@20:slot=1:point=reduce"
    run.begin(train_iters=90, faults=[fault])
    run.steps(19)
    struck = {"fault_kind": "kill", "point": "reduce", "slot": 1, "stage": 0, "n": None}
    run.emit("fault_injected", 0.1, fault=fault, **struck)
    run.deal({1})
    run.die(1, 0, 1, restore_s=0.004, recompute_s=0.1)
    run.step(1.1)
    run.steps(9)
    run.emit("eval", 0.4, lm_loss=4.4, seconds=0.4, split="validation")
    run.emit("checkpoint", 0.6, path="ckpt", seconds=0.6, bytes=1 << 20, reason="interval")
    run.deal(set())
    run.refill(1, [8, 5])
    run.steps(15)
    run.epoch += 1
    run.iteration += 1
    run.emit("fault_detected", slot=4, how="agreement", failed_process=4, replica=0, stage=1)
    run.emit("stage_rebuilt", stage=1, method="checkfree", slot=4, replica=0, transfer_s=0.2)
    run.emit("stage_adopted", slot=4, by_slot=0, replica=0, stage=1)
    run.emit("role_changed", role="minor", previous_role="major", replica=0)
    run.emit("repaired", 0.3, repair_s=0.3, live_replicas=4, live_processes=7)
    run.iteration -= 1
    run.step(1.0)
    run.steps(14)
    run.emit("fault_injected", fault="slow@60:slot=2", fault_kind="slow", point="forward", slot=2)
    run.emit("role_changed", role="spare", replica=3)
    run.steps(10, 0.8)
    for kind in KINDS:
        # Kinds that the story above does not know are told as they come.
        if kind not in KINDS_TOLD:
            run.emit(kind, **{name: example(name) for name in KINDS[kind].required})
    run.steps(20)
    run.emit("eval", 0.4, lm_loss=3.1, seconds=0.4)
    run.emit("eval", 0.4, lm_loss=3.2, seconds=0.4, split="test")
    return run.end("degraded")


KINDS_TOLD = {
    *("run_started", "step", "fault_injected", "fault_detected", "repaired", "slot_filled"),
    *("replica_dark", "stage_rebuilt", "stage_adopted", "role_changed", "checkpoint", "eval"),
    "run_finished",
}


def example(name: str) -> Any:
    """A value that the table accepts for a field."""
    values = {"int": 1, "number": 0.5, "string": name, "mapping": {}, "ints": [1], "strings": []}
    return values[FIELDS[name].rstrip("?")]


def restarted(path: Path) -> Path:
    """A run that was stopped by too many deaths, and started again from a checkpoint."""
    run = Writer(path, data=2, pool=0)
    run.begin(train_iters=40)
    run.steps(10)
    run.emit("checkpoint", 0.5, path="ckpt", seconds=0.5)
    run.steps(7)
    run.iteration += 1
    run.emit("fault_detected", 0.2, slot=0, how="agreement", failed_process=0, replica=0, stage=0)
    run.emit("fault_detected", slot=1, how="agreement", failed_process=1, replica=1, stage=0)
    run.emit("run_finished", 0.1, status="stopped", exit_code=75, message="no replica is whole")
    run.now += 8
    run.iteration = 10
    run.begin(train_iters=40)
    run.steps(30)
    return run.end("ok")


def running(path: Path, num_steps: int = 25) -> Path:
    """A run that has not ended; its writer is in the middle of a line."""
    run = Writer(path)
    run.begin(train_iters=1000)
    run.steps(num_steps)
    run.log.close()
    with run.run_dir.events.open("ab") as file:
        file.write(b'{"id": "7:step-26", "time": 170000')
    return run.run_dir.path


def long(path: Path, num_steps: int = 10_000, num_incidents: int = 500, data: int = 8) -> Path:
    """Many steps, many incidents: replicas go dark, and come back with new processes."""
    run = Writer(path, data=data, pipeline=2, pool=0)
    chance = random.Random(7)
    run.begin(train_iters=num_steps)
    serving = {run.slot(r, s): run.slot(r, s) for r in range(data) for s in range(2)}
    dark: dict[int, int] = {}
    newest = max(serving.values())
    left = num_incidents
    while run.iteration < num_steps:
        due = left * num_steps > num_incidents * (num_steps - run.iteration)
        if due and dark and (len(dark) > 2 or chance.random() < 0.5):
            replica, lost = dark.popitem()
            newest += 1
            serving[run.slot(replica, lost)] = newest
            run.deal(set(dark))
            run.refill(replica, [serving[run.slot(replica, stage)] for stage in range(2)])
            left -= 1
        elif due:
            replica = chance.choice([r for r in range(data) if r not in dark])
            stage = chance.randrange(2)
            dark[replica] = stage
            run.deal(set(dark))
            run.die(replica, stage, serving[run.slot(replica, stage)])
            run.step(0.9)
            left -= 1
            continue
        run.step(0.4 + chance.random() * 0.1)
        if run.iteration % 1000 == 0:
            run.emit("eval", 2.0, lm_loss=2 + 1 / run.iteration, seconds=2.0)
            run.emit("checkpoint", 3.0, path="ckpt", seconds=3.0)
    return run.end("degraded" if dark else "ok")
