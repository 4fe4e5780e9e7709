"""New processes that die before they are up: the next one is started all the same."""

from __future__ import annotations

from mpi_job import run_ranks


def test_a_process_that_dies_early_is_followed_by_another() -> None:
    ended = run_ranks(1, "spawn_worker.py", timeout_s=120)
    assert "a process that was started died before it was up" in ended.output, ended.output
    assert "started 2 ready True" in ended.output and "pending 0" in ended.output, ended.output
    assert "ordered to build for 3" in ended.output, ended.output
    assert "booted with the world" in ended.output, ended.output


def test_without_a_look_at_it_comm_spawn_waits_for_ever() -> None:
    """The negative control: MPI itself does not tell."""
    ended = run_ranks(1, "spawn_worker.py", "blind", timeout_s=120)
    assert "started 1 ready False" in ended.output, ended.output
