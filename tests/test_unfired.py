"""A fault that never strikes is an error of the run, though nothing was lost."""

from __future__ import annotations

from harness import launch


def test_a_fault_that_never_strikes_is_an_error() -> None:
    """Slot 1 is vacant from iteration 2 on, so nothing can die there in iteration 4."""
    faults = ("--ft-fault", "kill@2:slot=1", "--ft-fault", "kill@4:slot=1")
    run = launch("--ft-recover", *faults, pp=1, dp=2, iters=5)
    assert run.returncode == 65, run.output[-4000:]
    assert "training has ended well, but faults never struck: kill@4:slot=1" in run.output
    assert run.summary["faults_fired"] == 1
    assert run.summary["faults_unfired"] == ["kill@4:slot=1"], run.summary
    assert run.summary["status"] == "degraded" and sorted(run.losses) == [1, 2, 3, 4, 5]
