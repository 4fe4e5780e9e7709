"""Stock Megatron's saving, loading, recomputation and sequence parallelism over ulfm.

A run saves half way; others load that and go on, as they were or with options that trade memory for
time and places. All of them are held to the run that was never interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import Run, launch, relative

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

Flags = tuple[str, ...]

BOUND = 1e-6
"""Relative, on losses. Sequence parallelism cuts sums over a sequence in two (see
``test_stock.BOUND``)."""
CONTROL_BOUND = 1e-4
"""By at least so much a run must differ that did not load its optimizer."""
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
SHARDED = ("--use-distributed-optimizer", "--bf16")
RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
SEQUENCE_PARALLEL = ("--sequence-parallel",)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that saves, and how others go on from there."""

    topology: tuple[int, int, int]
    format: str
    iters: int
    flags: Flags = ()
    close: Flags | None = None
    """Options under which the rest is the same but for the order of sums."""
    equal: Flags | None = None
    """Options under which the rest is the same to the last bit."""
    control: bool = False


CASES = {
    "torch_dist": Case(topology=(1, 2, 2), format="torch_dist", iters=12, flags=DROPOUT),
    "torch": Case(
        topology=(2, 1, 1),
        format="torch",
        iters=12,
        close=(*RECOMPUTE, *SEQUENCE_PARALLEL),
        control=True,
    ),
    "torch_dist-3d": Case(
        topology=(2, 2, 2), format="torch_dist", iters=30, flags=DROPOUT, equal=RECOMPUTE
    ),
    "torch-3d": Case(topology=(2, 2, 2), format="torch", iters=30, close=SEQUENCE_PARALLEL),
    "torch_dist-sharded": Case(
        topology=(1, 2, 2), format="torch_dist", iters=30, flags=(*DROPOUT, *SHARDED)
    ),
    "torch-sharded": Case(topology=(1, 2, 2), format="torch", iters=30, flags=(*DROPOUT, *SHARDED)),
}
IN_CI = {"torch_dist", "torch"}


@pytest.mark.parametrize(
    "name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_a_loaded_run_goes_on_as_if_never_interrupted(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    half = case.iters // 2
    flags = ("--ckpt-format", case.format)
    whole = run(case, *flags, "--save", str(tmp_path), "--save-interval", str(half))
    assert [event["iteration"] for event in whole.of_kind("checkpoint")] == [half, case.iters]

    # Megatron takes a gathered optimizer from where the tracker points, whatever --ckpt-step says.
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(half))
    loading = (*flags, "--load", str(tmp_path))
    assert_same_rest(run(case, *loading), whole, half, exact=True)
    if case.equal is not None:
        assert_same_rest(run(case, *loading, *case.equal), whole, half, exact=True)
    if case.close is not None:
        assert_same_rest(run(case, *loading, *case.close), whole, half, exact=False)
    if case.control:
        other = run(case, *loading, "--no-load-optim")
        with pytest.raises(AssertionError):
            assert_same_rest(other, whole, half, exact=False)
        last = case.iters
        assert relative(whole.losses[last], other.losses[last]) > CONTROL_BOUND


def run(case: Case, *flags: str) -> Run:
    tensor, pipeline, data = case.topology
    done = launch(*case.flags, *flags, tp=tensor, pp=pipeline, dp=data, iters=case.iters)
    assert done.returncode == 0, done.output[-4000:]
    return done


def assert_same_rest(resumed: Run, whole: Run, after: int, *, exact: bool) -> None:
    assert sorted(resumed.steps) == [i for i in sorted(whole.steps) if i > after]
    for iteration, step in resumed.steps.items():
        other = whole.steps[iteration]
        for field in ("learning_rate", "samples_digest", "microbatches"):
            assert step[field] == other[field], (iteration, field)
        if exact:
            assert (step["lm_loss"], step["grad_norm"]) == (other["lm_loss"], other["grad_norm"])
        assert relative(other["lm_loss"], step["lm_loss"]) <= BOUND, iteration
    for got, want in zip(resumed.validation, whole.validation, strict=True):
        assert relative(want, got) <= BOUND
