"""Slots that fell vacant are filled again, and training is the fault-free one all the way."""

from __future__ import annotations

import pytest
from harness import Run, assert_faults_fired, assert_same_training, launch

TOPOLOGY = {"tp": 1, "pp": 2, "dp": 2, "iters": 40}
# A newcomer imports and builds for some seconds; steps that sleep leave it the processor meanwhile.
LINGER = "slow@4:slot={slot}:s=0.08:for=36"


@pytest.fixture(scope="module")
def reference() -> Run:
    return launch("--ft-recover", **TOPOLOGY)


def assert_all_back(run: Run, reference: Run, slots: set[int]) -> None:
    assert run.returncode == 0, run.output[-4000:]
    assert run.summary["status"] == "ok", "all slots are filled at the end"
    assert {event["slot"] for event in run.of_kind("slot_filled")} == slots
    assert all(event["transfer_bytes"] > 0 for event in run.of_kind("slot_filled"))
    assert_same_training(run, reference)


def test_a_spare_takes_the_slot_of_a_dead_process(reference: Run) -> None:
    run = launch(
        *("--ft-recover", "--ft-spares", "1", "--ft-spare-warm", "--ft-fault", "kill@20:slot=0"),
        *("--ft-fault", LINGER.format(slot=1)),
        processes=5,
        **TOPOLOGY,
    )
    assert_faults_fired(run, 2)
    assert_all_back(run, reference, {0, 2})
    merged = [e for e in run.of_kind("repaired") if e["live_replicas"] == 2]
    assert merged, "the replica came back while training went on"


def test_a_new_process_is_started_for_a_dead_one(reference: Run) -> None:
    run = launch(
        *("--ft-recover", "--ft-respawn", "--ft-fault", "kill@3:slot=3"),
        *("--ft-fault", LINGER.format(slot=0)),
        **TOPOLOGY,
    )
    assert_faults_fired(run, 2)
    assert_all_back(run, reference, {1, 3})


@pytest.mark.slow
def test_without_a_replacement_the_replica_stays_dark(reference: Run) -> None:
    """The negative control: nothing comes back by itself."""
    run = launch("--ft-recover", "--ft-fault", "kill@3:slot=3", **TOPOLOGY)
    with pytest.raises(AssertionError, match="all slots are filled"):
        assert_all_back(run, reference, {1, 3})
    assert_same_training(run, reference)
