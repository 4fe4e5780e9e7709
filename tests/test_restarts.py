"""The launcher starts a lost job again from its newest valid checkpoint, and knows when to stop."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, Run, launch, relative, run_alone
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.recover.resume import choose, fault_of
from megatron_ft.restarts import MAX_IN_VAIN, Ended, Restarts

TOPOLOGY = {"tp": 1, "pp": 1, "dp": 2, "iters": 12}


@pytest.fixture(scope="module")
def reference() -> Run:
    return launch("--ft-recover", **TOPOLOGY)


def assert_goes_on(run: Run, reference: Run, first: int = 1) -> None:
    """The steps from ``first`` on, each in its last version, are those of the reference."""
    assert run.returncode == 0, run.output[-4000:]
    assert run.summary["missing_steps"] == []
    assert sorted(run.steps) == [i for i in sorted(reference.steps) if i >= first]
    for iteration, step in run.steps.items():
        other = reference.steps[iteration]
        assert step["samples_digest"] == other["samples_digest"]
        assert relative(other["lm_loss"], step["lm_loss"]) <= 1e-6, (step, other)


def test_a_job_that_loses_everything_is_started_again(reference: Run, tmp_path: Path) -> None:
    save = tmp_path / "save"
    run = launch(
        *("--ft-recover", "--save", str(save), "--save-interval", "4", "--ckpt-format", "torch"),
        *("--ft-fault", "kill@7:slot=0", "--ft-fault", "kill@7:slot=1"),
        # The second start has one process die and no way on: the planner's rule 5 ends it.
        *("--ft-fault", "kill@10:slot=0:point=reduce", "--ft-fault", "kill@11:slot=1"),
        launcher=("--max-restarts", "3"),
        **TOPOLOGY,
    )
    assert_goes_on(run, reference)
    first, second = run.of_kind("run_restarted")
    assert (first["restart"], first["from_iteration"], first["steps_lost"]) == (1, 4, 2)
    assert (second["restart"], second["from_iteration"], second["steps_lost"]) == (2, 8, 2)
    assert first["exit_code"] != 0 and first["down_s"] > 0
    assert run.summary["restarts"] == 2 and run.summary["faults_unfired"] == []
    assert "restart 2 of 3" in run.output

    # The newest checkpoint is cut short, the one before it cannot be loaded: both are passed over.
    cut = save / "iter_0000012" / "mp_rank_00" / "model_optim_rng.pt"
    cut.write_bytes(cut.read_bytes()[:1000])
    bad = save / "iter_0000008" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({"this is": "no checkpoint"}, bad)
    (save / "latest_checkpointed_iteration.txt").write_text("")  # torn, too
    again = launch(
        *("--ft-recover", "--save", str(save), "--save-interval", "50", "--ckpt-format", "torch"),
        *("--ft-fault", "kill@1:slot=0", "--ft-fault", "kill@1:slot=1"),
        launcher=("--max-restarts", "3"),
        **TOPOLOGY,
    )
    assert_goes_on(again, reference, first=5)
    assert "cut short" in again.output and "could not load it" in again.output
    assert [e["from_iteration"] for e in again.of_kind("run_restarted")] == [4]


def test_two_jobs_in_one_run_directory(tmp_path: Path) -> None:
    """What the second one does is not taken for what the first one did."""
    one = {"tp": 1, "pp": 1, "dp": 1, "run_dir": tmp_path / "run"}
    save = ("--save", str(tmp_path / "save"), "--ckpt-format", "torch", "--save-interval", "4")
    first = launch(*save, "--exit-interval", "4", **one)
    assert first.returncode == 0 and first.summary["starts"] == 1
    second = launch(*save, "--load", str(tmp_path / "save"), **one)
    assert second.returncode == 0, second.output[-4000:]
    assert second.summary["starts"] == 2 and sorted(second.steps) == list(range(1, 9))
    assert len(second.of_kind("run_started")) == 2
    # Of a start that ended before it trained nothing is here: names are not to be counted.
    events = tmp_path / "run" / "events.jsonl"
    events.write_text(events.read_text().replace('"id": "1:', '"id": "2:'))
    more = ("--load", str(tmp_path / "save"), "--override-opt_param-scheduler")
    third = launch(*save, *more, iters=12, **one)
    assert third.returncode == 0, third.output[-4000:]
    assert third.summary["starts"] == 3 and sorted(third.steps) == list(range(1, 13))


def test_without_restarts_the_job_is_lost() -> None:
    """The negative control."""
    run = launch(
        "--ft-recover", "--ft-fault", "kill@3:slot=0", "--ft-fault", "kill@3:slot=1", **TOPOLOGY
    )
    assert run.returncode not in (0, 64)
    assert max(run.steps) == 2


def test_a_job_that_gets_nowhere_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os; os.kill(os.getpid(), 9)\n")
    run = run_alone(
        [
            *(sys.executable, "-m", "megatron_ft.launcher", "-n", "1", "--max-restarts", "10"),
            str(script),
        ],
        tmp_path,
    )
    assert run.returncode == 76
    assert run.output.count("; restart ") == MAX_IN_VAIN
    assert "3 restarts in a row completed no new checkpoint" in run.output


def test_megatron_ft_run_wants_a_count() -> None:
    run = run_alone(
        [sys.executable, "-m", "megatron_ft.launcher", "-n", "1", "--max-restarts", "x", "y.py"],
        ROOT,
    )
    assert run.returncode == 64 and "give a number" in run.output


# -- decisions -------------------------------------------------------------------------------------


def test_what_is_not_started_again() -> None:
    for end in (Ended(0), Ended(64), Ended(143, signal.SIGTERM)):
        assert not Restarts(5).again(end)
        assert Restarts(5).message == ""
    used_up = Restarts(1)
    assert used_up.again(Ended(75)) and not used_up.again(Ended(75))
    assert "used up" in used_up.message and not used_up.gave_up


@given(st.lists(st.tuples(st.none() | st.integers(0, 5), st.none() | st.integers(0, 5))))
def test_restarts_end(ends: list[tuple[int | None, int | None]]) -> None:
    restarts = Restarts(1000)
    best, in_vain, said, suspect = -1, 0, set(), None
    for number, (checkpoint, loading) in enumerate(ends):
        going_on = restarts.again(Ended(9, None, checkpoint, loading))
        if checkpoint is not None and checkpoint > best:
            best, in_vain = checkpoint, 0
        elif number:
            in_vain += 1
        if checkpoint is not None:
            said = {iteration for iteration in said if iteration > checkpoint}
        if loading is not None and loading == suspect:  # the second time in a row
            said.add(loading)
            best = min(best, loading - 1)  # what comes again after an older one is progress
        suspect = loading
        assert going_on == (in_vain < MAX_IN_VAIN)
        if not going_on:
            assert restarts.gave_up and restarts.message
            break
        assert restarts.environment["MEGATRON_FT_START"] == str(number + 1)
        skipped = restarts.environment.get("MEGATRON_FT_SKIP_CHECKPOINTS", "")
        assert {int(text) for text in skipped.split(",") if text} == said
        assert 1 <= restarts.pause_s <= 60


# -- checkpoints -----------------------------------------------------------------------------------


def torch_checkpoint(save: Path, iteration: int, shards: int = 2) -> Path:
    folder = save / f"iter_{iteration:07d}"
    for shard in range(shards):
        path = folder / f"mp_rank_{shard:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"iteration": iteration}, path)
    return folder


def test_the_newest_whole_checkpoint_is_chosen(tmp_path: Path) -> None:
    assert choose(tmp_path / "nowhere", (), 2) is None
    for iteration in (5, 10, 15, 20):
        torch_checkpoint(tmp_path, iteration)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert choose(tmp_path, (), 2) == 20, "no tracker: what is whole counts"
    tracker.write_text("15")
    assert choose(tmp_path, (), 2) == 15, "20 was being written"
    assert choose(tmp_path, {15}, 2) == 10
    path = tmp_path / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-30])
    assert choose(tmp_path, {15}, 2) == 5
    shutil.rmtree(tmp_path / "iter_0000005" / "mp_rank_00")
    assert choose(tmp_path, {15}, 2) is None
    tracker.write_text("")
    assert choose(tmp_path, {15}, 2) == 20, "a torn tracker says nothing"


def test_damage_to_a_distributed_checkpoint_is_seen(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    folder = tmp_path / "iter_0000003"
    save({"w": torch.arange(1000.0)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text("{}")
    assert fault_of(folder, 1) is None
    (shard,) = folder.glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    assert "cut short" in str(fault_of(folder, 1))
    shard.unlink()
    assert "missing" in str(fault_of(folder, 1))
    shard.write_bytes(whole)
    assert fault_of(folder, 1) is None
    metadata = folder / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:20])
    assert "cannot be read" in str(fault_of(folder, 1))
