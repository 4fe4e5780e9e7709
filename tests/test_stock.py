"""Stock training over ulfm is stock training: the same losses as Megatron's own on gloo.

Where no sum has more than two terms there is one order to add in, and everything must be equal to
the last bit. Elsewhere MPI and gloo add in another order: see ``BOUND``.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import MODEL, ROOT, Run, data_prefix, launch, relative, run_alone

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

Flags = tuple[str, ...]
Topology = tuple[int, int, int]

BOUND = 1e-6
"""Relative, on losses in fp32. Another order of summation changes the last bits of a gradient; over
tens of steps the losses drift apart by 1e-7 or so. A microbatch that is lost or counted twice, or a
wrong divisor, shifts the next losses by 1e-4 and more (``test_the_comparison_notices``)."""
NORM_BOUND = 1e-4
"""Relative, on gradient norms, which move more than losses do when weights move by their last bits.
A wrong divisor would be a factor."""

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
SHARDED = ("--use-distributed-optimizer",)
NO_CLIPPING = ("--clip-grad", "0")
BF16 = ("--bf16", *NO_CLIPPING)
"""A last bit of an fp32 master weight can turn the rounding of its bf16 copy (2^-9), and training
goes another way from there. So bf16 is compared where sums have two terms: the gradient norm, whose
sum has more, is left out with the clipping."""
OPTIONS: dict[str, Flags] = {
    "plain": (),
    "overlap": OVERLAP,
    "dropout-overlap": (*DROPOUT, *OVERLAP),
    "dropout-sharded-overlap": (*DROPOUT, *SHARDED, *OVERLAP, "--overlap-param-gather"),
    "bf16": BF16,
    "all": (*BF16, *DROPOUT, *SHARDED, *OVERLAP, "--overlap-param-gather"),
}
TOPOLOGIES: tuple[Topology, ...] = ((1, 2, 2), (2, 2, 2), (1, 4, 1), (1, 1, 4), (2, 1, 2))
IN_CI = {((1, 2, 2), "overlap"), ((2, 2, 2), "all")}
FULL_ITERS, CI_ITERS = 30, 12


def is_exact(topology: Topology, options: Flags) -> bool:
    """Whether no sum that training depends on has more than two terms."""
    tensor, _, data = topology
    clips = NO_CLIPPING[0] not in options
    return max(tensor, data, terms_of_norm(topology, options) if clips else 1) <= 2


def terms_of_norm(topology: Topology, options: Flags) -> int:
    """Terms of the gradient norm: the shards of the model, or with the distributed optimizer, whose
    shards are spread over all ranks, as many as ranks."""
    tensor, pipeline, data = topology
    return tensor * pipeline * (data if SHARDED[0] in options else 1)


EVERY = [
    (topology, name)
    for topology in TOPOLOGIES
    for name, options in OPTIONS.items()
    if "--bf16" not in options or is_exact(topology, options)
]


@functools.cache
def trained(topology: Topology, options: Flags, backend: str, iters: int) -> Run:
    tensor, pipeline, data = topology
    chosen = ("--distributed-backend", "gloo") if backend == "gloo" else ()
    run = launch(*options, *chosen, tp=tensor, pp=pipeline, dp=data, iters=iters)
    assert run.returncode == 0, run.output[-4000:]
    return run


def results(run: Run) -> list[Any]:
    """Everything of a run that must be the same in the same training, in full precision."""
    fields = ("lm_loss", "learning_rate", "microbatches", "samples_digest", "quotas")
    steps = [[step[field] for field in fields] for _, step in sorted(run.steps.items())]
    return [*steps, run.validation]


def norms(run: Run) -> list[float]:
    return [step["grad_norm"] for _, step in sorted(run.steps.items())]


def assert_equal_training(
    run: Run, reference: Run, *, exact: bool, exact_norm: bool = False
) -> None:
    assert run.steps.keys() == reference.steps.keys()
    if exact:
        assert results(run) == results(reference)
    if exact_norm:
        assert norms(run) == norms(reference)
    for got, want in zip(norms(run), norms(reference), strict=True):
        assert relative(want, got) <= NORM_BOUND
    for iteration, loss in run.losses.items():
        assert relative(reference.losses[iteration], loss) <= BOUND, iteration
        assert (
            run.steps[iteration]["samples_digest"] == (reference.steps[iteration]["samples_digest"])
        )
    for got, want in zip(run.validation, reference.validation, strict=True):
        assert relative(want, got) <= BOUND


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        pytest.param(
            *case, marks=() if case in IN_CI else pytest.mark.slow, id=f"{case[0]}-{case[1]}"
        )
        for case in EVERY
    ],
)
def test_ulfm_trains_as_gloo(topology: Topology, name: str) -> None:
    options = OPTIONS[name]
    iters = CI_ITERS if (topology, name) in IN_CI else FULL_ITERS
    run = trained(topology, options, "ulfm", iters)
    reference = trained(topology, options, "gloo", iters)
    assert len(run.losses) == iters
    exact = is_exact(topology, options)
    exact_norm = exact and terms_of_norm(topology, options) <= 2
    assert_equal_training(run, reference, exact=exact, exact_norm=exact_norm)


def test_the_comparison_notices() -> None:
    """The negative control: one microbatch less per replica, and nothing else."""
    reference = trained((1, 2, 2), OVERLAP, "ulfm", CI_ITERS)
    iters, stop = CI_ITERS, ("--exit-interval", "3")  # the learning rate stays what it is
    short = launch(*OVERLAP, *stop, tp=1, pp=2, dp=2, iters=iters, per_replica=3)
    assert short.returncode == 0, short.output[-4000:]
    differences = {i: relative(reference.losses[i], loss) for i, loss in short.losses.items()}
    assert list(differences) == [1, 2, 3]
    assert min(differences.values()) > 100 * BOUND, differences
    with pytest.raises(AssertionError):
        assert_equal_training(short, reference, exact=False)


# -- against Megatron without this package ---------------------------------------------------------

STOCK = ROOT / "tests" / "workers" / "stock_pretrain.py"
LLAMA_IN_MEGATRONS_FLAGS = (
    *("--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--dataloader-type", "single"),
    *("--no-create-attention-mask-in-dataloader", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"),
    *("--no-rope-fusion", "--use-cpu-initialization", "--attention-backend", "unfused"),
    *("--distributed-backend", "gloo"),
)
LINE = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)$", re.MULTILINE)
VALIDATION = re.compile(r"(loss at iteration .*)$", re.MULTILINE)


def stock(*flags: str, topology: Topology, iters: int) -> Run:
    tensor, pipeline, data = topology
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"),
        *(str(tensor * pipeline * data), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "localhost:0"),
        *(str(STOCK), "--tensor-model-parallel-size", str(tensor)),
        *("--pipeline-model-parallel-size", str(pipeline)),
        *("--global-batch-size", str(4 * data), "--train-iters", str(iters)),
        *("--data-path", data_prefix(), *MODEL, *LLAMA_IN_MEGATRONS_FLAGS, *flags),
    ]
    run = run_alone(command, Path())
    assert run.returncode == 0, run.output[-4000:]
    return run


def printed(run: Run) -> dict[str, dict[str, str]]:
    """Megatron's own log, line by line, without what the clock says."""
    lines = {}
    for number, text in LINE.findall(run.output):
        pairs = (part.rpartition(":") for part in text.split("|") if ":" in part)
        lines[number] = {
            key.strip(): value.strip() for key, _, value in pairs if "elapsed" not in key
        }
    lines |= {text: {} for text in VALIDATION.findall(run.output)}
    return lines


def assert_every_printed_digit(flags: Flags, backends: Sequence[str], *ours: str) -> None:
    topology = (1, 2, 2)
    reference = printed(stock(*flags, topology=topology, iters=CI_ITERS))
    steps = [line for line in reference.values() if line]
    assert len(steps) == CI_ITERS
    assert {"lm loss", "grad norm", "consumed samples", "learning rate"} <= steps[0].keys()
    assert len(reference) == CI_ITERS + 2
    for backend in backends:
        assert printed(trained(topology, (*flags, *ours), backend, CI_ITERS)) == reference


def test_losses_are_those_of_megatron_without_this_package() -> None:
    """Its sampler and store, and a training script of its own: each printed digit is the same."""
    assert_every_printed_digit(OVERLAP, ("ulfm", "gloo"))


@pytest.mark.slow
def test_dropout_is_that_of_megatron_without_this_package() -> None:
    """With Megatron's sampler in ours too: without a GPU there is one generator, torch's data
    loader draws a seed from it when it starts, and the ledger's does not."""
    flags = (*DROPOUT, *OVERLAP)
    assert_every_printed_digit(flags, ("ulfm",), "--dataloader-type", "single")
