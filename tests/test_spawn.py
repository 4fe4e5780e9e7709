"""New processes that die before they are up: the next one is started all the same."""

from __future__ import annotations

from pathlib import Path

from mpi_job import run_ranks


def test_a_process_that_dies_early_is_followed_by_another() -> None:
    ended = run_ranks(1, "spawn_worker.py", timeout_s=120)
    assert "a process that was started died before it was up" in ended.output, ended.output
    assert "started 2 ready True" in ended.output and "pending 0" in ended.output, ended.output
    assert "ordered to build for 3" in ended.output, ended.output
    assert "booted with the world" in ended.output, ended.output


def test_one_that_dies_before_anybody_looks_is_told_of_by_its_guard(tmp_path: Path) -> None:
    status = {"MEGATRON_FT_STATUS_FILE": str(tmp_path / "status")}
    ended = run_ranks(1, "spawn_worker.py", "at-once", timeout_s=120, environment=status)
    assert "a process that was started died before it was up" in ended.output, ended.output
    assert "started 2 ready True" in ended.output and "pending 0" in ended.output, ended.output


def test_without_its_guards_word_comm_spawn_waits_for_ever() -> None:
    """The negative control: the process was never seen, so that it is not missed."""
    ended = run_ranks(1, "spawn_worker.py", "at-once", "short", timeout_s=120)
    assert "started 1 ready False" in ended.output, ended.output


def test_without_a_look_at_it_comm_spawn_waits_for_ever() -> None:
    """The negative control: MPI itself does not tell."""
    ended = run_ranks(1, "spawn_worker.py", "blind", timeout_s=120)
    assert "started 1 ready False" in ended.output, ended.output
