"""Checkpoints of jobs that lose processes: while slots are vacant, and in the middle of a save.

A checkpoint is complete if it holds what that of the fault-free run holds, and a job that loads it
goes on as that run did.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_faults_fired, launch, relative
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

ITERATIONS = 8
PIPELINE = {"tp": 1, "pp": 2, "dp": 3, "iters": ITERATIONS, "per_replica": 2}
REPLICAS = {"tp": 1, "pp": 1, "dp": 4, "iters": ITERATIONS, "per_replica": 2}
FORMATS = [pytest.param("torch", marks=pytest.mark.slow), "torch_dist"]


@functools.cache
def _fault_free(topology: tuple[tuple[str, int], ...], form: str) -> tuple[Run, Path]:
    directory = Path(tempfile.mkdtemp(prefix="ft-checkpoint-"))
    run = launch("--ft-recover", *saving(directory, form, every=2), **dict(topology))
    assert run.returncode == 0, run.output[-4000:]
    return run, directory


def fault_free(topology: dict[str, int], form: str) -> tuple[Run, Path]:
    """The run without deaths, and where it saved every other step."""
    return _fault_free(tuple(topology.items()), form)


def saving(directory: Path, form: str, every: int) -> tuple[str, ...]:
    return ("--save", str(directory), "--save-interval", str(every), "--ckpt-format", form)


def struck(faults: tuple[str, ...]) -> list[str]:
    return [part for fault in faults for part in ("--ft-fault", fault)]


def tracker(directory: Path) -> str:
    return (directory / "latest_checkpointed_iteration.txt").read_text().strip()


def contents(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its name, of either format."""
    folder = directory / f"iter_{step:07d}"
    if not (folder / ".metadata").exists():
        files = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
        assert files
        loaded = {f.parent.name: torch.load(f, weights_only=False) for f in files}
        return dict(_tensors("", loaded))
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "whole.pt"
        dcp_to_torch_save(folder, file)
        return dict(_tensors("", torch.load(file, weights_only=False)))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():  # others are states of random generators
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(f"{name}/{key}", part)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _tensors(f"{name}/{i}", part)


def assert_holds_the_same(directory: Path, wanted: Path, step: int) -> None:
    got, want = contents(directory, step), contents(wanted, step)
    assert got.keys() == want.keys()
    assert len(got) > 20
    for name, tensor in want.items():
        # Adam makes steps of full size of gradients that are nothing but rounding.
        error = (got[name] - tensor).norm() / tensor.norm().clamp(min=1e-12)
        assert error <= 1e-3, (step, name, error)


def assert_goes_on(run: Run, wanted: Run, after: int) -> None:
    """The run did the steps after ``after``, and all of them as ``wanted`` did."""
    assert run.returncode == 0, run.output[-4000:]
    assert sorted(run.steps) == list(range(after + 1, ITERATIONS + 1))
    for iteration, step in run.steps.items():
        other = wanted.steps[iteration]
        assert step["samples_digest"] == other["samples_digest"]
        assert relative(other["lm_loss"], step["lm_loss"]) <= 1e-6, (iteration, step, other)
    for got, want in zip(run.validation, wanted.validation, strict=True):
        assert relative(want, got) <= 1e-6


def resumed(directory: Path, form: str, step: int, *flags: str, **topology: Any) -> Run:
    asked = ("--load", str(directory), "--ckpt-format", form, "--ckpt-step", str(step))
    return launch(*asked, *flags, **topology)


@pytest.mark.parametrize("form", FORMATS)
def test_saved_while_a_replica_is_dark(form: str, tmp_path: Path) -> None:
    wanted, complete = fault_free(PIPELINE, form)
    save = saving(tmp_path, form, every=2)
    run = launch("--ft-recover", *save, "--ft-fault", "kill@3:slot=0:point=reduce", **PIPELINE)
    assert_goes_on(run, wanted, after=0)
    assert [e["iteration"] for e in run.of_kind("checkpoint")] == [2, 4, 6, 8]
    for step in (2, 4, 6, 8):
        assert_holds_the_same(tmp_path, complete, step)
    # In a job that begins with a replica less than the one that saved, and has its order of slots.
    degraded = resumed(tmp_path, form, 4, "--ft-recover", **PIPELINE, processes=4)
    assert_goes_on(degraded, wanted, after=4)
    assert degraded.steps[5]["quotas"] == [3, 3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_loaded_in_full_strength(form: str, tmp_path: Path) -> None:
    wanted, _ = fault_free(PIPELINE, form)
    save = saving(tmp_path, form, every=4)
    launch("--ft-recover", *save, "--ft-fault", "kill@3:slot=4:point=reduce", **PIPELINE)
    whole = resumed(tmp_path, form, 4, "--ft-recover", **PIPELINE)
    assert_goes_on(whole, wanted, after=4)
    assert whole.summary["status"] == "ok"
    assert whole.steps[5]["quotas"] == [2, 2, 2]


# Who x how far he came: the first live slot writes metadata and tracker, the last nothing of it.
INTERRUPTIONS = {
    "torch_dist": (
        "kill@2:slot=0:point=save:n=0",
        "kill@4:slot=3:point=save:n=2",
        "kill@6:slot=1:point=save:n=4",
    ),
    "torch": (
        "kill@2:slot=0:point=save:n=1",
        "kill@4:slot=3:point=save:n=0",
        "kill@6:slot=1:point=save:n=2",
    ),
}


@pytest.mark.parametrize("form", FORMATS)
def test_an_interrupted_save_is_done_again(form: str, tmp_path: Path) -> None:
    faults = INTERRUPTIONS[form]
    wanted, complete = fault_free(REPLICAS, form)
    run = launch("--ft-recover", *saving(tmp_path, form, every=2), *struck(faults), **REPLICAS)
    assert_goes_on(run, wanted, after=0)
    assert_faults_fired(run, len(faults))
    assert run.steps[8]["quotas"] == [0, 0, 8, 0]
    assert [e["iteration"] for e in run.of_kind("checkpoint")] == [2, 4, 6, 8]
    assert tracker(tmp_path) == "8"
    for step in (2, 4, 6, 8):
        assert_holds_the_same(tmp_path, complete, step)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_end_of_the_job_in_a_save_leaves_the_last_checkpoint(form: str, tmp_path: Path) -> None:
    two = {**REPLICAS, "dp": 2, "per_replica": 4}
    wanted, complete = fault_free(two, form)
    faults = ("kill@4:slot=0:point=save:n=1", "kill@4:slot=1:point=repair")
    run = launch("--ft-recover", *saving(tmp_path, form, every=2), *struck(faults), **two)
    assert run.returncode not in (0, 64, 75)
    assert tracker(tmp_path) == "2"
    # The next start finds the leavings of the broken save where it saves itself.
    load = ("--load", str(tmp_path))
    again = launch("--ft-recover", *load, *saving(tmp_path, form, every=2), **two)
    assert_goes_on(again, wanted, after=2)
    for step in (2, 4, 6):
        assert_holds_the_same(tmp_path, complete, step)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    """Nobody dies of it, a process in the pool neither; the checkpoint before stays."""
    two = {**PIPELINE, "dp": 2, "per_replica": 3, "iters": 6}
    run = launch(
        *("--ft-recover", *saving(tmp_path, "torch_dist", every=2)),
        *("--ft-fault", "kill@1:slot=1"),
        **two,
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": "full-disk"},
    )
    assert run.returncode == 75, run.output[-4000:]
    assert [e["failed_process"] for e in run.of_kind("fault_detected")] == [1]
    assert "the checkpoint of iteration 4 could not be written" in run.summary["message"]
    assert run.summary["status"] == "stopped"
    assert tracker(tmp_path) == "2"


@pytest.mark.slow
def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    run = launch("--ft-recover", *saving(file / "checkpoints", "torch", every=2), **REPLICAS)
    assert run.returncode == 75, run.output[-4000:]
    assert run.of_kind("fault_detected") == []
    assert "Not a directory" in run.summary["message"]
