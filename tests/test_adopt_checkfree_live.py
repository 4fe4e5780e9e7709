"""A stage is rebuilt while a neighbour serves two, and a rebuilt stage is adopted.

A rebuild is an approximation, so the run to compare with has the same one: in each a stage is lost
in all replicas in the same step, and nothing else happens in the reference. With exact layers in
both stages everything else is exact, and so is the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_faults_fired, assert_same_training, launch
from test_adopt_live import EXACT, assert_equal_replicas, digests
from test_recover_checkpoint import assert_holds_the_same, saving, tracker

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

ITERS = 14
SIZES: dict[str, Any] = {"tp": 1, "pp": 3, "dp": 2, "iters": ITERS}
FLAGS = (
    *("--num-layers", "6", "--ft-recover", "--ft-checkfree"),
    # A factor that shows, and is another one in each step of the run.
    *("--ft-checkfree-lr-scale", "1.5", "--ft-checkfree-lr-decay-iters", "20"),
)
LOST = "lose-stage@6:stage=1"


def run_with(*faults: str, directory: Path, flags: tuple[str, ...] = (), extras: str = "") -> Run:
    return launch(
        *(*FLAGS, "--ft-mecefo", *EXACT, *flags),
        *(part for fault in faults for part in ("--ft-fault", fault)),
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": f"weights{extras}", "RECOVER_CENSUS": str(directory)},
        **SIZES,
    )


def adoptions(run: Run) -> list[tuple[int, int]]:
    """Slots that a neighbour took on, and the neighbour's own one."""
    return [(event["slot"], event["by_slot"]) for event in run.of_kind("stage_adopted")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def reference(checkpoints: Path) -> Run:
    run = launch(*FLAGS, *saving(checkpoints, "torch", every=7), "--ft-fault", LOST, **SIZES)
    assert run.returncode == 0, run.output[-6000:]
    assert len(run.of_kind("stage_rebuilt")) == 1
    return run


def assert_rebuilt_alike(run: Run, reference: Run, faults: int) -> None:
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, faults)
    assert [event["stage"] for event in run.of_kind("stage_rebuilt")] == [1]
    assert_same_training(run, reference)


def test_an_adopted_stage_is_lost_and_adopted_again(
    reference: Run, checkpoints: Path, tmp_path: Path
) -> None:
    """The adopter's own stage is a source. The rebuilt one comes back to it, rate and all."""
    save = saving(tmp_path / "got", "torch", every=7)
    run = run_with("kill@3:slot=3:point=backward", LOST, directory=tmp_path, flags=save)
    assert_rebuilt_alike(run, reference, 2)
    assert adoptions(run) == [(3, 1), (3, 1)]
    assert_equal_replicas(digests(tmp_path, ITERS), 3, 2)
    assert tracker(tmp_path / "got") == str(ITERS)
    for step in (7, 14):
        assert_holds_the_same(tmp_path / "got", checkpoints, step)
        records = [rebuilt_in(folder, step) for folder in (tmp_path / "got", checkpoints)]
        assert records[0] == records[1] == {0: (1, 5), 1: (1, 5), 2: (1, 5)}


def rebuilt_in(directory: Path, step: int) -> dict[int, tuple[int, int]]:
    """By the stage whose file says so: the rebuilt stage, and the iteration of its beginning."""
    found = {}
    for file in sorted((directory / f"iter_{step:07d}").glob("mp_rank_*/model_optim_rng.pt")):
        args = torch.load(file, weights_only=False)["args"]
        ((stage, (iteration, _)),) = args.ft_checkfree_rebuilt.items()
        found[int(file.parent.name.rpartition("_")[2])] = (stage, iteration)
    return found


def test_an_adopters_own_stage_is_lost_and_adopted_by_the_other_replica(
    reference: Run, tmp_path: Path
) -> None:
    """It keeps the adopted stage meanwhile; later the rebuilt one is sent by it, to an adopter."""
    kills = ("kill@3:slot=5:point=backward", "kill@9:slot=2:point=forward:n=1")
    run = run_with(*kills, LOST, directory=tmp_path)
    assert_rebuilt_alike(run, reference, 3)
    assert adoptions(run) == [(5, 3), (5, 3), (2, 0)]
    assert_equal_replicas(digests(tmp_path, ITERS), 3, 2)


def test_what_adopters_alone_hold_is_a_source(reference: Run, tmp_path: Path) -> None:
    """The last stage has no process of its own any more when the one before it is lost. All wait;
    a new process gets it from a process that serves nothing, and the lost one is rebuilt from it.
    """
    kills = ("kill@4:slot=5:point=backward", "kill@5:slot=4:point=backward")
    run = run_with(*kills, LOST, directory=tmp_path, flags=("--ft-respawn",))
    assert_rebuilt_alike(run, reference, 3)
    assert adoptions(run)[:2] == [(5, 3), (4, 2)]
    assert run.of_kind("stage_rebuilt")[0]["slot"] == 2
    assert_equal_replicas(digests(tmp_path, ITERS), 3, 2)


def test_without_the_rate_of_an_adopted_stage_replicas_drift_apart(
    reference: Run, tmp_path: Path
) -> None:
    """The negative control."""
    run = run_with(
        "kill@3:slot=3:point=backward", LOST, directory=tmp_path, extras=",no-adopted-rate"
    )
    assert run.returncode == 0, run.output[-6000:]
    assert adoptions(run) == [(3, 1), (3, 1)]
    with pytest.raises(AssertionError, match="stage 1"):
        assert_equal_replicas(digests(tmp_path, ITERS), 3, 2)
    with pytest.raises(AssertionError):
        assert_same_training(run, reference)


def test_with_checkfree_plus_nothing_is_adopted_and_that_is_said() -> None:
    run = launch(
        *("--num-layers", "6", "--ft-recover", "--ft-checkfree-plus", "--ft-mecefo"),
        *("--ft-fault", "kill@3:slot=3:point=backward"),
        **SIZES,
    )
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 1)
    assert adoptions(run) == []
    assert [event["replica"] for event in run.of_kind("replica_dark")] == [1]
    assert run.output.count("with --ft-checkfree-plus no neighbour adopts a stage") == 1
