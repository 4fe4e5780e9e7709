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
