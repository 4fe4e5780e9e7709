"""Processes that the tests of events and files start, watch and kill; each prints what it did.

Usage: observe_child.py ACTION RUN_DIR [ARGUMENT...]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megatron_ft.observe.events import EventLog
from megatron_ft.observe.rundir import RunDirectory, write_json


def step_fields(**changes: Any) -> dict[str, Any]:
    """Fields of a `step` event; four microbatches of two sequences of eight tokens."""
    fields: dict[str, Any] = {
        "lm_loss": 5.5,
        "grad_norm": 1.25,
        "microbatches": 4,
        "samples_digest": "d1ce",
        "seconds": 0.5,
        "tokens_per_second": 128.0,
        "live_replicas": 2,
        "live_processes": 4,
        "quotas": [2, 2],
    }
    return {**fields, **changes}


def start_fields(**changes: Any) -> dict[str, Any]:
    """Fields of the `run_started` event of a job with two replicas of two stages."""
    fields: dict[str, Any] = {
        "num_processes": 4,
        "num_slots": 4,
        "num_replicas": 2,
        "num_stages": 2,
        "global_microbatches": 4,
        "micro_batch_size": 2,
        "seq_length": 8,
        "versions": {"torch": "2"},
        "flags": {"train_iters": 10},
    }
    return {**fields, **changes}


def say(*words: object) -> None:
    print(*words, flush=True)


def huge(run_dir: RunDirectory, elected: str) -> None:
    """Emit lines so large that a kill strikes inside a write."""
    log = EventLog(run_dir, 1, elected=elected == "elected")
    log.emit("run_started", iteration=0, epoch=0, **start_fields())
    detail = {"filler": "x" * (256 << 20)}
    say("ready")
    log.emit("step", iteration=1, epoch=0, detail=detail, **step_fields())
    say("survived")


def many(run_dir: RunDirectory, elected: str, process: str) -> None:
    """Emit steps until killed, and say how many have been written."""
    log = EventLog(run_dir, int(process), elected=elected == "elected")
    iteration = 0
    while True:
        iteration += 1
        log.emit("step", iteration=iteration, epoch=0, **step_fields())
        say(iteration)


def merge(run_dir: RunDirectory) -> None:
    """Merge until killed."""
    log = EventLog(run_dir, 9)
    say("ready")
    while True:
        log.merge()


def summary(run_dir: RunDirectory) -> None:
    """Replace summary.json until killed, by documents of very different size."""
    say("ready")
    for count in range(1_000_000):
        write_json(run_dir.summary, {"numbers": list(range(count % 7 * 5000))})


def durable(run_dir: RunDirectory) -> None:
    log = EventLog(run_dir, 3)
    log.emit(
        "fault_injected",
        iteration=4,
        epoch=1,
        durable=True,
        fault="kill@4:slot=3",
        fault_kind="kill",
        point="forward",
    )
    os.kill(os.getpid(), signal.SIGKILL)


def wandb_writer(run_dir: RunDirectory, process: str, first: str, last: str, end: str) -> None:
    """One elected writer of the job: logs steps first..last, then is killed or finishes."""
    from megatron_ft.observe.summary import write_summary
    from megatron_ft.observe.wandb_log import WandbLog, WandbSettings
    from megatron_ft.observe.wandb_megatron import MegatronWriter

    log = EventLog(run_dir, int(process))
    settings = WandbSettings("project", "name", mode="offline", config={"lr": 3e-4})
    wandb_log = WandbLog(run_dir, settings, history=log.read, process=int(process))
    log.add_listener(wandb_log)
    megatron = MegatronWriter(wandb_log)
    assert not megatron, "nobody has been elected yet"
    log.elect()
    wandb_log.start()
    assert megatron
    if first == "1":
        log.emit("run_started", iteration=0, epoch=0, **start_fields())
    # The thread has just begun: this may be in its history as well as in its queue.
    log.emit("replica_dark", iteration=int(first), epoch=0, replica=int(process))
    for iteration in range(int(first), int(last) + 1):
        if iteration == int(last) - 4:
            assert wandb_log.run.id
        log.emit("step", iteration=iteration, epoch=0, **step_fields(lm_loss=1 / iteration))
        megatron.log({"learning-rate": iteration * 1e-3}, iteration)
        if end == "kill" and iteration == int(last) - 10:
            (file,) = Path(wandb_log.run.dir).parent.glob("*.wandb")
            while file.stat().st_size < 8192:  # until wandb has flushed some rows
                time.sleep(0.05)
    say(wandb_log.run.id)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    where = {"iteration": int(last), "epoch": 1}
    log.emit("fault_detected", slot=3, replica=1, stage=1, how="SIGKILL", **where)
    log.emit("repaired", repair_s=0.02, live_replicas=1, live_processes=3, **where)
    log.emit("run_finished", status="degraded", exit_code=0, **where)
    started = time.monotonic()
    wandb_log.close(write_summary(run_dir))
    say(f"closed in {time.monotonic() - started:.1f} s")


def wandb_in_trouble(run_dir: RunDirectory, directory: str) -> None:
    """All calls that Megatron and the runtime make, with a run that cannot be opened."""
    from megatron_ft.observe.wandb_log import WandbLog, WandbSettings
    from megatron_ft.observe.wandb_megatron import MegatronWriter

    log = EventLog(run_dir, 0, elected=True)
    settings = WandbSettings("project", "name", directory=Path(directory))
    wandb_log = WandbLog(run_dir, settings, history=log.read, process=0)
    log.add_listener(wandb_log)
    wandb_log.start()
    writer = MegatronWriter(wandb_log)
    writer.config.update({"slurm_job_name": "none"})
    log.emit("replica_dark", iteration=1, epoch=0, replica=2)
    writer.log({"loss": 1.0}, 1)
    artifact = writer.Artifact("name", type="model")
    writer.run.log_artifact(artifact, aliases=["latest"])
    say(bool(writer))
    wandb_log.close(exit_code=1)


def wandb_megatron(run_dir: RunDirectory) -> None:
    """Megatron's own functions log through the writer that took the place of theirs."""
    import torch
    from megatron.training import global_vars, wandb_utils

    from megatron_ft.observe.wandb_log import WandbLog, WandbSettings
    from megatron_ft.observe.wandb_megatron import MegatronWriter

    checkpoint = run_dir.path / "checkpoints" / "iter_3"
    checkpoint.mkdir(parents=True)
    tracker = run_dir.path / "latest.txt"
    tracker.write_text("3")
    log = EventLog(run_dir, 0, elected=True)
    settings = WandbSettings("project", "name", mode="offline")
    wandb_log = WandbLog(run_dir, settings, history=log.read, process=0)
    global_vars._GLOBAL_WANDB_WRITER = MegatronWriter(wandb_log)
    wandb_log.start()
    writer = global_vars.get_wandb_writer()
    for name in ("first", "second"):
        writer.config.update({"slurm_job_name": name})
    writer.log({"lm loss": torch.tensor(2.5)}, 3)
    wandb_utils.on_save_checkpoint_success(str(checkpoint), str(tracker), str(checkpoint.parent), 3)
    writer.finish()
    writer.log({"after": 1.0}, 4)
    wandb_log.close()


ACTIONS = {
    function.__name__: function
    for function in (
        *(huge, many, merge, summary, durable, wandb_writer, wandb_in_trouble, wandb_megatron),
    )
}

if __name__ == "__main__":
    ACTIONS[sys.argv[1]](RunDirectory(sys.argv[2]), *sys.argv[3:])
