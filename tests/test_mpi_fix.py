"""Deaths that are noticed while a communicator is made, with the fix of Open MPI and without."""

from __future__ import annotations

import platform

import pytest
from mpi_job import Ended, run_ranks

RANKS, LEFT = 6, 2
MADE_FOR = platform.machine() == "x86_64"


def ranks_die(seed: int, *how: str) -> Ended:
    return run_ranks(RANKS, "unmade_worker.py", str(seed), *how, timeout_s=120)


@pytest.mark.skipif(not MADE_FOR, reason="the fix is for x86-64")
@pytest.mark.parametrize("seed", [0, 100, 200])
def test_survivors_survive(seed: int) -> None:
    ended = ranks_die(seed)
    assert "Segmentation fault" not in ended.output, ended.output
    assert ended.output.count(f"{LEFT} are left") == LEFT, ended.output


@pytest.mark.skipif(not MADE_FOR, reason="the fix is for x86-64")
def test_without_the_fix_they_do_not() -> None:
    """The negative control. When Open MPI no longer needs the fix, this fails: take it out."""
    ended = [ranks_die(seed, "plain").output for seed in (0, 100, 200)]
    assert any("Segmentation fault" in output for output in ended), ended


def one_dies_in_a_large_message(*how: str) -> Ended:
    # As between processes that were started at different times.
    return run_ranks(
        2, "announced_worker.py", *how, timeout_s=15, environment={"OMPI_MCA_btl": "tcp,self"}
    )


@pytest.mark.skipif(not MADE_FOR, reason="the fix is for x86-64")
def test_a_death_in_a_large_message_is_noticed() -> None:
    assert "noticed the death and went on" in one_dies_in_a_large_message().output


@pytest.mark.skipif(not MADE_FOR, reason="the fix is for x86-64")
def test_without_the_fix_who_notices_it_waits_for_ever() -> None:
    """The negative control, like the one above."""
    with pytest.raises(AssertionError, match="no end after"):
        one_dies_in_a_large_message("plain")
