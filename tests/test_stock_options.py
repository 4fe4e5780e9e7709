"""Stock Megatron's saving, loading, recomputation and sequence parallelism over ulfm."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from harness import Run, launch, relative

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

Flags = tuple[str, ...]
Topology = tuple[int, int, int]

BOUND = 1e-6
"""Relative, on losses: sums over a sequence are cut in two by sequence parallelism (see
``test_stock.BOUND``)."""
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)


def run(topology: Topology, *flags: str, iters: int) -> Run:
    tensor, pipeline, data = topology
    done = launch(*flags, tp=tensor, pp=pipeline, dp=data, iters=iters)
    assert done.returncode == 0, done.output[-4000:]
    return done


# -- checkpoints -----------------------------------------------------------------------------------

CHECKPOINTS = [
    # format, topology, iterations, further flags
    pytest.param("torch_dist", (1, 2, 2), 12, (), id="torch_dist"),
    pytest.param("torch", (1, 1, 2), 12, (), id="torch"),
    pytest.param("torch_dist", (2, 2, 2), 30, (), id="torch_dist-3d", marks=pytest.mark.slow),
    pytest.param("torch", (2, 2, 2), 30, (), id="torch-3d", marks=pytest.mark.slow),
    *(
        pytest.param(
            *(name, (1, 2, 2), 30, ("--use-distributed-optimizer", "--bf16")),
            id=f"{name}-sharded",
            marks=pytest.mark.slow,
        )
        for name in ("torch_dist", "torch")
    ),
]


@pytest.mark.parametrize(("name", "topology", "iters", "more"), CHECKPOINTS)
def test_a_loaded_run_goes_on_as_if_never_interrupted(
    name: str, topology: Topology, iters: int, more: Flags, tmp_path: Path
) -> None:
    """To the last bit, with dropout: the state of every generator is saved too."""
    half = iters // 2
    flags = (*DROPOUT, *more, "--ckpt-format", name)
    saving = ("--save", str(tmp_path), "--save-interval", str(half))
    whole = run(topology, *flags, *saving, iters=iters)
    assert [event["iteration"] for event in whole.of_kind("checkpoint")] == [half, iters]

    loading = ("--load", str(tmp_path), "--ckpt-step", str(half))
    resumed = run(topology, *flags, *loading, iters=iters)
    assert sorted(resumed.steps) == list(range(half + 1, iters + 1))
    fields = ("lm_loss", "grad_norm", "learning_rate", "samples_digest", "microbatches")
    for iteration, step in resumed.steps.items():
        other = whole.steps[iteration]
        assert [step[f] for f in fields] == [other[f] for f in fields], iteration
    assert resumed.validation == whole.validation

    if name == "torch":  # the negative control, where it costs least
        other = run(topology, *flags, *loading, "--no-load-rng", iters=iters)
        assert all(loss != whole.losses[i] for i, loss in other.losses.items())


# -- what trades memory for time or places ---------------------------------------------------------


@functools.cache
def plain(topology: Topology, more: Flags, iters: int) -> Run:
    return run(topology, *more, iters=iters)


OPTIONS = [
    # topology, the options, flags of both runs, iterations, whether every bit is the same
    pytest.param(
        *((2, 1, 1), (*RECOMPUTE, "--sequence-parallel"), (), 12, False),
        id="recompute-and-sequence-parallel",
    ),
    *(
        pytest.param(*case, marks=pytest.mark.slow, id=name)
        for name, case in {
            "recompute": ((2, 2, 2), RECOMPUTE, DROPOUT, 30, True),
            "sequence-parallel": ((2, 2, 2), ("--sequence-parallel",), (), 30, False),
            "recompute-alone": ((1, 4, 1), RECOMPUTE, (), 30, True),
        }.items()
    ),
]


@pytest.mark.parametrize(("topology", "options", "more", "iters", "exact"), OPTIONS)
def test_the_same_training_in_another_way(
    topology: Topology, options: Flags, more: Flags, iters: int, exact: bool
) -> None:
    reference = plain(topology, more, iters)
    other = run(topology, *more, *options, iters=iters)
    assert len(other.losses) == iters
    for iteration, loss in other.losses.items():
        if exact:
            assert loss == reference.losses[iteration], iteration
        assert relative(reference.losses[iteration], loss) <= BOUND, iteration
    for got, want in zip(other.validation, reference.validation, strict=True):
        assert relative(want, got) <= BOUND
