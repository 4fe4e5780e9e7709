"""A neighbour runs the stage of a dead process too, and training is the fault-free one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Run, assert_faults_fired, assert_same_training, launch, relative
from test_mecefo_live import PIPELINE as PP2
from test_mecefo_live import reference as fault_free
from test_recover_checkpoint import assert_holds_the_same, saving, tracker
from weights import assert_equal_replicas, digests

EXACT = (*("--ft-mecefo-no-skip-attention", "--ft-mecefo-no-recompute", "--ft-mecefo-no-low-rank"),)
"""Both stages keep their exact backward passes, so that training is the fault-free one."""


def run_with(
    *faults: str,
    directory: Path,
    flags: tuple[str, ...] = (),
    hooks: str = "weights",
    **sizes: Any,
) -> Run:
    return launch(
        *("--ft-recover", "--ft-mecefo", *(flags or EXACT)),
        *(part for fault in faults for part in ("--ft-fault", fault)),
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": hooks, "RECOVER_CENSUS": str(directory)},
        **sizes,
    )


@pytest.fixture(scope="module")
def reference() -> Run:
    return fault_free()


def test_the_neighbour_runs_both_stages(reference: Run, tmp_path: Path) -> None:
    run = run_with("kill@3:slot=3:point=backward", directory=tmp_path, **PP2)
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 1)
    (adopted,) = run.of_kind("stage_adopted")
    assert (adopted["slot"], adopted["by_slot"], adopted["stage"]) == (3, 1, 1)
    assert not run.of_kind("replica_dark")
    assert_same_training(run, reference)
    assert_equal_replicas(digests(tmp_path, PP2["iters"]), 2, 2)


@pytest.mark.slow
def test_the_layers_of_both_stages_are_degraded(reference: Run, tmp_path: Path) -> None:
    """MeCeFO as it is meant: no longer the fault-free run, but close, and replicas stay equal."""
    run = run_with(
        "kill@3:slot=3:point=backward", directory=tmp_path, flags=("--ft-mecefo-rank", "8"), **PP2
    )
    assert run.returncode == 0, run.output[-6000:]
    assert len(run.of_kind("stage_adopted")) == 1
    apart = {i: relative(reference.losses[i], run.losses[i]) for i in run.steps}
    assert all(apart[i] <= 1e-6 for i in (1, 2, 3)), "step 3 is computed from the same weights"
    assert all(1e-6 < apart[i] <= 5e-3 for i in run.steps if i > 3), apart
    for iteration, step in run.steps.items():
        assert step["samples_digest"] == reference.steps[iteration]["samples_digest"]
    assert_equal_replicas(digests(tmp_path, PP2["iters"]), 2, 2)


@pytest.mark.slow
def test_after_a_death_between_two_steps_the_replica_comes_back(
    reference: Run, tmp_path: Path
) -> None:
    """Where nothing can be adopted at once the replica goes dark, until the next step begins."""
    run = run_with("kill@3:slot=3:point=optimizer", directory=tmp_path, **PP2)
    assert run.returncode == 0, run.output[-6000:]
    assert [event["replica"] for event in run.of_kind("replica_dark")] == [1]
    assert [event["slot"] for event in run.of_kind("stage_adopted")] == [3]
    assert_same_training(run, reference)
    assert_equal_replicas(digests(tmp_path, PP2["iters"]), 2, 2)


@pytest.mark.slow
def test_a_full_disk_beside_an_adopted_stage_is_said(tmp_path: Path) -> None:
    """The exact replicas save over communicators of their own, where they wait for each other.

    One of two files of the replica cannot be written; its other process waits in a barrier.
    """
    run = run_with(
        "kill@1:slot=3:point=backward",
        directory=tmp_path,
        flags=(*EXACT, *saving(tmp_path / "saved", "torch", every=2)),
        hooks="full-disk",
        **{**PP2, "iters": 6},
    )
    assert run.returncode == 75, run.output[-4000:]
    assert len(run.of_kind("stage_adopted")) == 1
    assert [e["failed_process"] for e in run.of_kind("fault_detected")] == [3], "nobody dies of it"
    assert "the checkpoint of iteration 4 could not be written" in run.summary["message"]
    assert "broken off" not in run.output, "nobody waits for --ft-collective-timeout"
    assert tracker(tmp_path / "saved") == "2"


@pytest.mark.slow
def test_with_its_adopter_dead_too_the_replica_goes_dark(reference: Run, tmp_path: Path) -> None:
    """The adopter of a slot dies too: its replica goes dark, as without adoption."""
    run = run_with(
        *("kill@3:slot=3:point=backward", "kill@6:slot=1:point=forward:n=2"),
        directory=tmp_path,
        **PP2,
    )
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 2)
    assert len(run.of_kind("stage_adopted")) == 1
    assert [event["replica"] for event in run.of_kind("replica_dark")] == [1]
    assert_same_training(run, reference)


LONG: dict[str, Any] = PP2 | {"iters": 40}


@pytest.fixture(scope="module")
def long_reference() -> Run:
    return launch("--ft-recover", **LONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "by_slot", "flags", "processes"),
    [(1, 3, ("--ft-spares", "1"), 5), (3, 1, ("--ft-respawn",), None)],
    ids=["first stage, a spare", "last stage, a new process"],
)
def test_the_adopted_slot_is_given_back(
    long_reference: Run,
    tmp_path: Path,
    slot: int,
    by_slot: int,
    flags: tuple[str, ...],
    processes: int | None,
) -> None:
    """A neighbour serves the slot until another process has built its stage."""
    run = run_with(
        *(f"kill@5:slot={slot}:point=forward:n=1", "slow@4:slot=0:s=0.2:for=36"),
        directory=tmp_path,
        flags=(*EXACT, *flags),
        processes=processes,
        **LONG,
    )
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 2)
    assert run.summary["status"] == "ok", "all slots have their own process at the end"
    (adopted,), (filled,) = run.of_kind("stage_adopted"), run.of_kind("slot_filled")
    assert (adopted["slot"], adopted["by_slot"]) == (slot, by_slot)
    assert (filled["slot"], filled["by_process"]) == (slot, 4)
    assert filled["epoch"] > adopted["epoch"]
    (degraded,), (restored,) = run.of_kind("stages_degraded"), run.of_kind("stages_restored")
    assert degraded["iteration"] == 6 and restored["iteration"] > 6
    assert degraded["stages"] == restored["stages"] == [0, 1]
    assert not run.of_kind("replica_dark")
    assert_same_training(run, long_reference)
    assert_equal_replicas(digests(tmp_path, 40), 2, 2)


PP4: dict[str, Any] = {"tp": 1, "pp": 4, "dp": 2, "iters": 8}


@pytest.fixture(scope="module")
def deep_reference() -> Run:
    return launch("--ft-recover", **PP4)


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "by_slot"), [(1, 3), (5, 3), (7, 5)])
def test_first_middle_and_last_stage(
    deep_reference: Run, tmp_path: Path, slot: int, by_slot: int
) -> None:
    run = run_with(f"kill@3:slot={slot}:point=backward:n=1", directory=tmp_path, **PP4)
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 1)
    (adopted,) = run.of_kind("stage_adopted")
    assert (adopted["slot"], adopted["by_slot"]) == (slot, by_slot)
    assert_same_training(run, deep_reference)
    assert_equal_replicas(digests(tmp_path, 8), 4, 2)


@pytest.mark.slow
def test_one_death_after_another(deep_reference: Run, tmp_path: Path) -> None:
    """Two stages of one replica are adopted, then one of the other replica."""
    kills = ("kill@2:slot=7:point=backward", "kill@4:slot=1", "kill@6:slot=2:point=reduced")
    run = run_with(*kills, directory=tmp_path, **PP4)
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 3)
    adopted = [(e["slot"], e["by_slot"]) for e in run.of_kind("stage_adopted")]
    assert adopted == [(7, 5), (1, 3), (2, 0)]
    assert_same_training(run, deep_reference)
    assert_equal_replicas(digests(tmp_path, 8), 4, 2)


@pytest.mark.slow
def test_two_deaths_at_once_and_a_copy_from_an_adopter(deep_reference: Run, tmp_path: Path) -> None:
    """Stage 2 of replica 1 is lost when that of replica 0 is run by a neighbour, which sends it."""
    kills = ("kill@2:slot=3:point=forward:n=1", "kill@2:slot=4:point=backward")
    run = run_with(*kills, "kill@5:slot=5:point=reduce", directory=tmp_path, **PP4)
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 3)
    adopted = [(e["slot"], e["by_slot"]) for e in run.of_kind("stage_adopted")]
    assert sorted(adopted[:2]) == [(3, 1), (4, 2)] and adopted[2:] == [(5, 7)]
    assert_same_training(run, deep_reference)
    assert_equal_replicas(digests(tmp_path, 8), 4, 2)


@pytest.mark.slow
def test_an_adopter_takes_both_stages_to_another_replica(
    deep_reference: Run, tmp_path: Path
) -> None:
    """Both replicas break between two steps, and together they are one. Its last stage is held by
    an adopter of the other replica alone, which has nobody to get it from."""
    adopted = ("kill@2:slot=6:point=backward", "kill@3:slot=7:point=backward")
    broken = ("kill@5:slot=4:point=optimizer", "kill@5:slot=1:point=optimizer")
    run = run_with(*adopted, *broken, directory=tmp_path, **PP4)
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 4)
    assert [(e["slot"], e["by_slot"]) for e in run.of_kind("stage_adopted")][2:] == [(6, 4)]
    assert_same_training(run, deep_reference)
    assert sorted(digests(tmp_path, 8)) == [0, 2, 4, 6]


@pytest.mark.slow
def test_who_sends_the_state_dies_while_it_is_adopted(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"tp": 1, "pp": 2, "dp": 3, "iters": 8}
    reference = launch("--ft-recover", **sizes)
    kills = ("kill@3:slot=5:point=backward", "kill@3:slot=3:point=join")
    run = run_with(*kills, directory=tmp_path, **sizes)
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 2)
    assert sorted(e["slot"] for e in run.of_kind("stage_adopted")) == [3, 5]
    assert_same_training(run, reference)
    assert_equal_replicas(digests(tmp_path, 8), 2, 3)


@pytest.mark.slow
def test_tensor_parallel_peers_adopt_alike(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 2, "iters": 8}
    flags = ("--sequence-parallel",)
    reference = launch("--ft-recover", *flags, **sizes)
    run = run_with(
        "kill@3:slot=6:point=backward", directory=tmp_path, flags=(*EXACT, *flags), **sizes
    )
    assert run.returncode == 0, run.output[-6000:]
    assert sorted(e["slot"] for e in run.of_kind("stage_adopted")) == [6, 7]
    assert_same_training(run, reference)
    held = digests(tmp_path, 8)
    assert sorted(held) == list(range(8))
    for one, other in ((0, 2), (1, 3), (4, 6), (5, 7)):
        assert held[one] == held[other]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_checkpoint_is_complete_while_a_stage_is_adopted(tmp_path: Path, form: str) -> None:
    """Exact replicas write it: replica 0 is left out although it is live."""
    wanted, got = tmp_path / "wanted", tmp_path / "got"
    launch("--ft-recover", *saving(wanted, form, every=4), **PP2)
    run = run_with(
        "kill@3:slot=2:point=backward",
        directory=tmp_path,
        flags=(*EXACT, *saving(got, form, every=4)),
        **PP2,
    )
    assert run.returncode == 0, run.output[-6000:]
    assert [event["slot"] for event in run.of_kind("stage_adopted")] == [2]
    assert tracker(got) == "12"
    for step in (4, 8, 12):
        assert_holds_the_same(got, wanted, step)


@pytest.mark.slow
def test_no_checkpoint_where_a_process_runs_two_stages_in_every_replica(tmp_path: Path) -> None:
    """The negative control: with nobody exact nothing is written, and that is said."""
    save = tmp_path / "checkpoints"
    run = run_with(
        *("kill@2:slot=2:point=backward", "kill@6:slot=1:point=backward"),
        directory=tmp_path,
        flags=(*EXACT, *saving(save, "torch", every=4)),
        **PP2,
    )
    assert run.returncode == 0, run.output[-6000:]
    assert len(run.of_kind("stage_adopted")) == 2
    assert tracker(save) == "4"
    assert "is left out" in run.output
