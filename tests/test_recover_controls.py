"""Negative controls: each proof of the recovery goes red when what it proves is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_recover_checkpoint as checkpoint
import test_recover_flags as flags
import test_recover_watch as watch
from harness import Run, assert_same_training, launch
from test_recover_matrix import reference
from torch.distributed.checkpoint.api import CheckpointException

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

PIPELINE = {"tp": 1, "pp": 2, "dp": 3}


def broken(extra: str, *arguments: str, **launching: int) -> Run:
    """The run with one thing taken out of the package."""
    run = launch(
        "--ft-recover",
        *arguments,
        **launching,  # type: ignore[arg-type]
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": extra},
    )
    return run


def assert_noticed(run: Run, wanted: Run, bound: float = 1e-6) -> None:
    assert run.returncode == 0, run.output[-4000:]
    with pytest.raises(AssertionError):
        assert_same_training(run, wanted, bound)


def test_reduced_buckets_that_are_not_restored() -> None:
    run = broken("no-restore", "--ft-fault", "kill@3:slot=1:point=reduced", **PIPELINE)
    assert_noticed(run, reference(tuple(PIPELINE.items()), ()))


@pytest.mark.slow
def test_a_spare_that_keeps_its_gradients() -> None:
    """Nobody mirrors replicas 1 and 2, which die together: six ids are lost, more than there are
    contributors left, so that the spare computes one of them, on top of nothing."""
    deaths = [f"kill@3:slot={slot}:point=reduce" for slot in (1, 2)]
    specs = [part for fault in (*deaths, flags.WITH_SPARES) for part in ("--ft-fault", fault)]
    faults = ("--ft-recover-policy", "versatile", *specs)
    run = broken("no-forget", *faults, **flags.EIGHT)
    assert_noticed(run, reference(tuple(flags.EIGHT.items()), ()))


@pytest.mark.slow
def test_a_loss_scale_that_moves_twice() -> None:
    topology, arguments, bound = flags.ARITHMETIC["fp16"]
    deaths = [part for fault in flags.OVERFLOWS for part in ("--ft-fault", fault)]
    run = broken("no-scaler", *arguments, *deaths, **topology)
    assert_noticed(run, reference(tuple(topology.items()), arguments), bound)


@pytest.mark.slow
def test_waiting_that_is_not_told() -> None:
    """Those who wait for one in an endless loop are taken for endless loops themselves."""
    run = broken("no-waits", *watch.SHORT, "--ft-fault", "loop@3:slot=0", **watch.REPLICAS)
    assert {e["slot"] for e in run.of_kind("fault_detected")} != {0} or run.returncode != 0


@pytest.mark.slow
def test_a_checkpoint_written_without_regard_to_vacancies(tmp_path: Path) -> None:
    wanted, complete = checkpoint.fault_free(checkpoint.PIPELINE, "torch")
    save = checkpoint.saving(tmp_path, "torch", every=4)
    run = broken("no-compact", *save, "--ft-fault", "kill@3:slot=0", **checkpoint.PIPELINE)
    with pytest.raises(AssertionError):
        checkpoint.assert_goes_on(run, wanted, after=0)
        checkpoint.assert_holds_the_same(tmp_path, complete, 4)


@pytest.mark.slow
def test_metadata_of_what_a_broken_save_wrote(tmp_path: Path) -> None:
    wanted, complete = checkpoint.fault_free(checkpoint.REPLICAS, "torch_dist")
    save = checkpoint.saving(tmp_path, "torch_dist", every=4)
    death = ("--ft-fault", "kill@4:slot=3:point=save:n=2")
    run = broken("no-forgetting-of-writes", *save, *death, **checkpoint.REPLICAS)
    with pytest.raises((AssertionError, CheckpointException)):
        checkpoint.assert_goes_on(run, wanted, after=0)
        checkpoint.assert_holds_the_same(tmp_path, complete, 4)
