"""ReCoVer: real jobs lose real processes, at every point, in every way; training stays the same.

Who x when x how of docs/recover.md. Each launch holds as many deaths as its replicas allow, and is
compared step by step with the fault-free run of the same seed.
"""

from __future__ import annotations

import functools

import pytest
from harness import Run, assert_faults_fired, assert_same_training, launch

# One stage-by-replica grid and one tensor-parallel one; slots of replica r:
#   (1,2,3): r and 3 + r           (2,1,3): 2r and 2r + 1
PIPELINE = {"tp": 1, "pp": 2, "dp": 3}
TENSOR = {"tp": 2, "pp": 1, "dp": 3}
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
FENCE = ("--ft-watch-timeout", "2", "--ft-progress-timeout", "5")

CASES: dict[str, tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]] = {
    # name: (topology, faults, further flags)
    "first-and-last-iteration": (
        PIPELINE,
        ("kill@1:slot=0:point=forward", "kill@8:slot=5:point=logging"),
        (),
    ),
    "twice-in-a-row": (
        PIPELINE,
        ("kill@3:slot=4:point=backward:n=1", "kill@4:slot=0:point=reduce:n=1"),
        OVERLAP,
    ),
    "stop-and-exit": (
        PIPELINE,
        ("stop@3:slot=1:point=forward:n=2", "exit@6:slot=5:point=reduced"),
        FENCE,
    ),
    "voted-and-optimizer": (
        PIPELINE,
        ("kill@4:slot=2:point=voted", "exception@6:slot=3:point=optimizer"),
        OVERLAP,
    ),
    "loop-and-held-gil": (
        PIPELINE,
        ("loop@3:slot=0:point=forward", "hold-gil@6:slot=4:point=backward"),
        FENCE,
    ),
    "two-replicas-at-once": (
        PIPELINE,
        ("kill@4:slot=0:point=reduce", "kill@4:slot=4:point=reduce"),
        (),
    ),
    "during-the-repair": (
        PIPELINE,
        ("kill@3:slot=0:point=reduce", "kill@3:slot=4:point=repair"),
        (),
    ),
    "two-of-one-replica-and-a-pool-process": (
        PIPELINE,
        # The first stage computes its second forward without the last one's first backward.
        ("kill@3:slot=2:point=forward:n=1", "kill@3:slot=5:point=backward", "kill@5:slot=1"),
        (),
    ),
    "pool-process": (
        PIPELINE,
        ("kill@2:slot=1:point=reduced", "kill@4:process=4:point=pool", "exit@6:slot=5"),
        (),
    ),
    "evaluation": (
        PIPELINE,
        ("kill@4:slot=4:point=eval:n=1", "kill@8:slot=0:point=eval"),
        ("--eval-interval", "4"),
    ),
    "dropout": (
        PIPELINE,
        ("kill@3:slot=1:point=backward:n=1", "kill@5:slot=5:point=reduced"),
        ("--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    ),
    "versatile": (
        PIPELINE,
        ("kill@3:slot=0:point=reduce", "kill@6:slot=5:point=reduce"),
        ("--ft-recover-policy", "versatile"),
    ),
    "tensor-peer": (
        TENSOR,
        ("kill@2:slot=1:point=forward:n=1", "kill@5:slot=4:point=reduce:n=1"),
        OVERLAP,
    ),
    "tensor-stop-and-exception": (
        TENSOR,
        ("stop@3:slot=0:point=backward", "exception@6:slot=5:point=voted"),
        FENCE,
    ),
    "tensor-loop-and-repair": (
        TENSOR,
        ("loop@3:slot=3:point=reduced", "kill@3:slot=4:point=repair"),
        FENCE,
    ),
    "tensor-at-once": (
        TENSOR,
        ("kill@4:slot=1:point=optimizer", "kill@4:slot=2:point=logging"),
        ("--sequence-parallel",),
    ),
}
IN_CI = {
    "first-and-last-iteration",
    "twice-in-a-row",
    "stop-and-exit",
    "during-the-repair",
    "tensor-peer",
    "evaluation",
}


@functools.cache
def reference(topology: tuple[tuple[str, int], ...], flags: tuple[str, ...]) -> Run:
    """The fault-free run; the flags that change arithmetic are those of the run it is held to."""
    return launch("--ft-recover", *flags, **dict(topology))


@pytest.mark.parametrize(
    "name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_training_is_the_fault_free_one(name: str) -> None:
    topology, faults, flags = CASES[name]
    arithmetic = tuple(f for f in flags if f not in FENCE) if flags == FENCE else flags
    wanted = reference(tuple(topology.items()), arithmetic)
    specs = [part for fault in faults for part in ("--ft-fault", fault)]
    run = launch("--ft-recover", *flags, *specs, **topology)
    assert run.returncode == 0, run.output[-4000:]
    assert_faults_fired(run, len(faults))
    assert_same_training(run, wanted)
    assert run.summary["status"] == "degraded"


def test_a_wrong_divisor_is_noticed() -> None:
    """The negative control: eleven of twelve microbatches is a different training."""
    wanted = reference(tuple(PIPELINE.items()), ())
    run = launch(
        "--ft-recover", "--ft-recover-policy", "adaptive", "--ft-fault", "kill@3:slot=0", **PIPELINE
    )
    assert run.returncode == 0, run.output[-4000:]
    with pytest.raises(AssertionError):
        assert_same_training(run, wanted)
    different = [i for i in (5, 6, 7) if abs(run.losses[i] / wanted.losses[i] - 1) > 1e-6]
    assert different, "a bound of 1e-6 must notice a short batch"
