"""Agreements while another thread is inside MPI: what comes of them, and what is done about it."""

from __future__ import annotations

from harness import Run, assert_faults_fired, assert_same_training, launch
from mpi_job import Ended, run_ranks


def agreements(*how: str) -> Ended:
    return run_ranks(3, "agreements_worker.py", *how, timeout_s=90)


def test_who_agrees_is_alone_in_mpi() -> None:
    ended = agreements()
    assert ended.output.count("0 garbled") == 2, ended.output


def test_with_another_thread_beside_it_words_are_garbled() -> None:
    """The negative control. When Open MPI no longer needs it, this fails: take it out.

    Usually within two seconds; where other work keeps the threads from running at the same time,
    the 40 seconds of one launch were once not enough.
    """
    for _ in range(4):
        ended = agreements("plain")
        if "1 garbled" in ended.output:
            return
    raise AssertionError(ended.output)


def with_a_garbled_vote() -> Run:
    return launch(
        "--ft-recover",
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": "garbled"},
        pp=1,
        dp=2,
        iters=12,
    )


def test_who_does_not_know_what_was_decided_is_repaired() -> None:
    """The other replica has committed the step and is in the next one when slot 1 objects."""
    reference = launch(pp=1, dp=2, iters=12)
    run = with_a_garbled_vote()
    assert run.returncode == 0, run.output[-5000:]
    assert "came garbled: this process objects" in run.output
    assert_faults_fired(run, 0)
    assert run.of_kind("fault_detected") == [], "nobody has died"
    (filled,) = run.of_kind("slot_filled")
    assert filled["slot"] == 1 and filled["transfer_bytes"] > 0
    assert run.summary["live_replicas"] == 2
    assert_same_training(run, reference)
