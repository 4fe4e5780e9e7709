"""Names of communicators that come again, and what keeps them from it."""

from __future__ import annotations

from mpi_job import Ended, run_ranks


def the_first_dies(*how: str) -> Ended:
    return run_ranks(4, "numbers_worker.py", *how, timeout_s=60)


def test_agreements_are_of_their_own_communicator() -> None:
    ended = the_first_dies()
    assert ended.output.count("0 wrong decisions") == 3, ended.output
    assert "removing old agreement" not in ended.output, ended.output


def test_without_catching_up_they_are_not() -> None:
    """The negative control. When Open MPI no longer needs it, this fails: take it out."""
    ended = the_first_dies("plain")
    assert "removing old agreement" in ended.output, ended.output
    assert "waits for ever" in ended.output, ended.output
