"""MeCeFO's simulation in running jobs: degraded layers, the gradient rule, and exact again."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from harness import Run, assert_faults_fired, launch, relative
from test_recover_checkpoint import resumed, saving
from test_recover_matrix import PIPELINE as GRID
from test_recover_matrix import reference as fault_free
from test_stock import OVERLAP

FAULT = "degrade@4:slot=1:for=4"
DEGRADED = range(4, 8)
PIPELINE = {"tp": 1, "pp": 2, "dp": 2, "iters": 12}
ALONE = {"tp": 1, "pp": 1, "dp": 1, "iters": 6}
BOUND = 1e-3
"""Of the relative difference of losses after four degraded steps; 2.4e-4 was seen."""


@functools.cache
def reference() -> Run:
    return launch("--ft-recover", **PIPELINE)


def degraded(directory: Path, *flags: str, extras: str = "mecefo", **topology: int) -> Run:
    run = launch(
        *("--ft-mecefo", "--ft-mecefo-memory", "0", *flags),
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": extras, "RECOVER_CENSUS": str(directory)},
        **topology,
    )
    assert run.returncode == 0, run.output[-4000:]
    return run


def rows(directory: Path, slot: int) -> dict[int, dict[str, Any]]:
    """What a slot wrote down, by iteration."""
    lines = (directory / f"mecefo-{slot}.jsonl").read_text().splitlines()
    return {row["iteration"]: row for row in map(json.loads, lines)}


def deviations(found: dict[int, dict[str, Any]], part: str, steps: Collection[int]) -> list[float]:
    return [found[i][f"{part}_deviation"] for i in steps]


def assert_loss_stays_close(run: Run, wanted: Run, first: int) -> None:
    """Up to the first degraded step, whose loss is that of weights still the same, to the bit."""
    for i, step in run.steps.items():
        assert step["microbatches"] == wanted.steps[i]["microbatches"]
        assert step["samples_digest"] == wanted.steps[i]["samples_digest"]
        difference = relative(wanted.losses[i], run.losses[i])
        assert difference == 0.0 if i <= first else 0.0 < difference < BOUND, (i, difference)


def assert_replicas_are_equal(*of_slots: dict[int, dict[str, Any]]) -> None:
    for i, row in of_slots[0].items():
        for other in of_slots[1:]:
            assert all(other[i][part] == row[part] for part in ("attention", "ffn")), i


def test_a_degraded_replica_and_a_death_within_a_degraded_step(tmp_path: Path) -> None:
    """Replica 1 is degraded in steps 4 to 6; replica 2 dies in step 5, after its reduction.

    The attempt is done again: replica 0 is the only one whose attention counts, with half of the
    microbatches. Slots 0 to 2 are stage 0 of the replicas, 3 to 5 stage 1.
    """
    run = degraded(
        *(tmp_path, "--ft-recover", *OVERLAP, "--ft-fault", "degrade@4:slot=4:for=3"),
        # Both at once: were one of them left, it would adopt the other's stage.
        *("--ft-fault", "kill@5:slot=2:point=reduced"),
        *("--ft-fault", "kill@5:slot=5:point=reduced"),
        **GRID,
    )
    assert_faults_fired(run, 3)
    assert_loss_stays_close(run, fault_free(tuple(GRID.items()), OVERLAP), first=4)
    assert [run.steps[i]["degraded_stages"] for i in range(1, 9)] == [0, 0, 0, 2, 2, 2, 0, 0]
    assert run.steps[5]["recomputed_microbatches"] == 4
    for stage in (0, 3):
        exact, affected = rows(tmp_path, stage), rows(tmp_path, stage + 1)
        assert_replicas_are_equal(exact, affected)
        alone = deviations(exact, "attention", (5, 6))
        assert max(alone) < 1e-6, alone
        # With another exact replica's, or everybody's, or half of it, this could not hold.
        assert min(deviations(exact, "attention", (1, 2, 3, 4, 7, 8))) > 1e-2
        assert min(deviations(exact, "ffn", (5, 6))) > 1e-2


@pytest.mark.slow
def test_a_replica_is_degraded_for_some_steps(tmp_path: Path) -> None:
    """Slots 0 and 1 are stage 0 of both replicas, 2 and 3 stage 1: replica 1 has one node left."""
    run = degraded(tmp_path, "--ft-recover", "--ft-fault", FAULT, **PIPELINE)
    assert_faults_fired(run, 1)
    assert_loss_stays_close(run, reference(), first=4)
    assert {i: s["degraded_stages"] for i, s in run.steps.items()} == {
        i: 2 * (i in DEGRADED) for i in range(1, 13)
    }
    (began,), (ended,) = run.of_kind("stages_degraded"), run.of_kind("stages_restored")
    assert (began["iteration"], began["replica"], began["stages"]) == (4, 1, [0, 1])
    assert (ended["iteration"], ended["replica"], ended["stages"]) == (8, 1, [0, 1])
    others = set(run.steps) - set(DEGRADED)
    for stage in (0, 2):
        exact, affected = rows(tmp_path, stage), rows(tmp_path, stage + 1)
        assert_replicas_are_equal(exact, affected)
        assert {i for i, row in affected.items() if row["attention_norm"] == 0.0} == set(DEGRADED)
        # Attention is the mean over the unaffected replica, FFN over both.
        assert max(deviations(exact, "attention", DEGRADED)) < 1e-6
        assert min(deviations(exact, "attention", others)) > 1e-2
        assert min(deviations(exact, "ffn", DEGRADED)) > 1e-2


@pytest.mark.slow
def test_losses_per_token(tmp_path: Path) -> None:
    """Attention is the mean over the tokens of the unaffected replica, which count unevenly."""
    flags = ("--ft-recover", "--ft-fault", FAULT, "--calculate-per-token-loss")
    run = degraded(tmp_path, *flags, extras="uneven-tokens,mecefo", **PIPELINE)
    assert_faults_fired(run, 1)
    weights = []
    for stage in (0, 2):
        exact, affected = rows(tmp_path, stage), rows(tmp_path, stage + 1)
        assert_replicas_are_equal(exact, affected)
        assert max(deviations(exact, "attention", DEGRADED)) < 1e-6
        weights = [exact[i]["weights"] for i in DEGRADED]
    counted = [(w["0"], w["1"]) for w in weights]
    heads = rows(tmp_path, 2), rows(tmp_path, 3)
    assert counted == [tuple(head[i]["tokens"] for head in heads) for i in DEGRADED]
    assert all(a == 2 * b for a, b in counted), "with microbatches it would not hold"


@pytest.mark.slow
def test_zeros_for_missing_gradients_are_noticed(tmp_path: Path) -> None:
    """The negative control: without the rule attention gradients are half of what they must be."""
    degraded(*(tmp_path, "--ft-recover", "--ft-fault", FAULT), extras="no-rule,mecefo", **PIPELINE)
    for stage in (0, 2):
        during = deviations(rows(tmp_path, stage), "attention", DEGRADED)
        assert during == pytest.approx([0.5] * 4, abs=1e-3)


@pytest.mark.slow
def test_without_failures_nothing_changes() -> None:
    run = launch("--ft-recover", "--ft-mecefo", "--ft-mecefo-quotas", **PIPELINE)
    assert run.losses == reference().losses
    assert run.validation == reference().validation
    assert run.steps[12]["grad_norm"] == reference().steps[12]["grad_norm"]


def held(directory: Path, *flags: str, extras: str) -> tuple[set[bool], set[bool]]:
    """Whether attention and FFN stayed the same, in each degraded step of a job of one process."""
    fault = ("--ft-fault", "degrade@3:stage=0:for=2")
    run = degraded(directory, *fault, "--weight-decay", "0.1", *flags, extras=extras, **ALONE)
    assert_faults_fired(run, 1)
    found = rows(directory, 0)
    assert len(found) == 6
    for part in ("attention", "ffn"):
        assert found[2][part] != found[1][part] and found[5][part] != found[4][part]
    return (
        {found[i]["attention"] == found[i - 1]["attention"] for i in (3, 4)},
        {found[i]["ffn"] == found[i - 1]["ffn"] for i in (3, 4)},
    )


def test_where_nobody_is_exact_attention_is_held(tmp_path: Path) -> None:
    """Weights and moments of the only replica, with weight decay: to the bit."""
    assert held(tmp_path, extras="mecefo") == ({True}, {False})


@pytest.mark.slow
def test_weight_decay_of_what_should_be_held_is_noticed(tmp_path: Path) -> None:
    """The negative control."""
    assert held(tmp_path, extras="no-rule,mecefo")[0] == {False}


@pytest.mark.slow
def test_a_budget_buys_exact_attention(tmp_path: Path) -> None:
    """Two stages may take twice as long: nothing is skipped, so nothing is held."""
    flags = ("--ft-mecefo-budget", "2", "--ft-mecefo-memory", "2")
    assert held(tmp_path, *flags, extras="mecefo")[0] == {False}


# From the first step on, so that Adam has no state of attention at all, or later.
NEVER, LATER = "degrade@1:stage=0:for=2", "degrade@3:stage=0:for=2"
OF_ZEROS = 3e-3
"""A common count of two makes of moments of zero a first update of 0.6 times the size."""
HALF = ("--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale", "1024")
SAVED: dict[str, tuple[str, str, int, float, tuple[str, ...]]] = {
    "later": (LATER, "torch_dist", 4, BOUND, ()),
    "never": (NEVER, "torch_dist", 2, OF_ZEROS, ()),
    "never, and then": (NEVER, "torch_dist", 4, BOUND, ()),
    "bf16": (NEVER, "torch_dist", 2, OF_ZEROS, ("--bf16", *HALF[:1])),
    "fp16": (LATER, "torch_dist", 4, BOUND, ("--fp16", *HALF)),
    "torch": (LATER, "torch", 4, 1e-6, ()),
    "torch, never": (NEVER, "torch", 2, 1e-6, ()),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "later" else pytest.mark.slow) for c in SAVED]
)
def test_a_checkpoint_after_held_steps_is_written_and_loaded(case: str, tmp_path: Path) -> None:
    """By one process, as all other replicas are degraded too."""
    fault, form, step, bound, flags = SAVED[case]
    save = saving(tmp_path, form, every=step)
    first = launch("--ft-mecefo", *flags, *save, "--ft-fault", fault, **ALONE)
    assert first.returncode == 0, first.output[-4000:]
    assert_faults_fired(first, 1)
    # Degraded in its last step, so that the flag is allowed; no loss shows it.
    last = ("--ft-mecefo", "--ft-fault", "degrade@6:stage=0")
    again = resumed(tmp_path, form, step, *last, *flags, **ALONE)
    assert again.returncode == 0, again.output[-4000:]
    assert sorted(again.steps) == list(range(step + 1, 7))
    assert_goes_on_closely(again, first, step, bound)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_attention_is_held_in_a_rebuilt_stage_that_is_saved(form: str, tmp_path: Path) -> None:
    """With CheckFree: Adam of stage 1 counts from step 3 on, that of its attention not step 5."""
    flags = ("--num-layers", "6", "--ft-recover", "--ft-checkfree", "--ft-mecefo")
    faults = ("--ft-fault", "lose-stage@3:stage=1", "--ft-fault", "degrade@5:stage=1")
    sizes = {"tp": 1, "pp": 3, "dp": 1, "iters": 7}
    first = launch(*flags, *faults, *saving(tmp_path, form, every=5), **sizes)
    assert first.returncode == 0, first.output[-4000:]
    assert_faults_fired(first, 2)
    assert [event["stage"] for event in first.of_kind("stage_rebuilt")] == [1]
    again = resumed(tmp_path, form, 5, *flags, **sizes)
    assert again.returncode == 0, again.output[-4000:]
    assert sorted(again.steps) == [6, 7]
    assert_goes_on_closely(again, first, 5, BOUND)


def assert_goes_on_closely(again: Run, first: Run, step: int, bound: float) -> None:
    """Weights are those that were saved, so the first loss is the same. What the next steps make of
    Adam's state is the same where each parameter keeps its own count, and close where all have one.
    """
    for i in again.steps:
        apart = relative(first.losses[i], again.losses[i])
        assert apart <= (1e-6 if i == step + 1 else bound), (i, apart)


@pytest.mark.slow
def test_a_slower_replica_gets_fewer_microbatches(tmp_path: Path) -> None:
    """Replica 1 is degraded and sleeps at each microbatch; one step is measured, then dealt."""
    run = degraded(
        *(tmp_path, "--ft-recover", "--ft-mecefo-quotas"),
        *("--ft-fault", "degrade@3:slot=1:for=4", "--ft-fault", "slow@3:slot=1:s=1:for=4"),
        **{**ALONE, "dp": 2, "iters": 8},
    )
    assert_faults_fired(run, 2)
    quotas = {i: step["quotas"] for i, step in run.steps.items()}
    assert [quotas[i] for i in (1, 2, 3, 7, 8)] == [[4, 4]] * 5
    for i in (4, 5, 6):
        assert sum(quotas[i]) == run.steps[i]["microbatches"] == 8
        assert quotas[i][1] < 4, quotas
    exact, affected = rows(tmp_path, 0), rows(tmp_path, 1)
    assert_replicas_are_equal(exact, affected)
    assert max(deviations(exact, "attention", range(3, 7))) < 1e-6


@pytest.mark.slow
def test_a_newcomer_knows_who_is_degraded(tmp_path: Path) -> None:
    """The exact replica's process dies and a spare takes its slot, while the other is degraded."""
    run = degraded(
        *(tmp_path, "--ft-recover", "--ft-spares", "1", "--ft-spare-warm"),
        *("--ft-fault", "degrade@3:slot=1:for=6", "--ft-fault", "kill@4:slot=0:point=reduced"),
        *("--ft-fault", "slow@4:slot=1:s=0.5:for=3"),
        **{**ALONE, "dp": 2, "iters": 10, "processes": 3},
    )
    assert_faults_fired(run, 3)
    assert [e["slot"] for e in run.of_kind("slot_filled")] == [0]
    assert len(run.of_kind("stages_degraded")) == len(run.of_kind("stages_restored")) == 1
    exact, affected = rows(tmp_path, 0), rows(tmp_path, 1)
    assert_replicas_are_equal(exact, affected)
    together = [i for i in range(5, 9) if run.steps[i]["quotas"] == [4, 4]]
    assert together, run.steps
    assert max(deviations(exact, "attention", together)) < 1e-6
