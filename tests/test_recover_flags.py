"""Megatron's flags that change arithmetic, reporting or the end of a run, each with deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Run, assert_faults_fired, assert_same_training, launch, relative
from test_recover_matrix import reference

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

PIPELINE = {"tp": 1, "pp": 2, "dp": 3}
TENSOR = {"tp": 2, "pp": 1, "dp": 3}
EIGHT = {"tp": 1, "pp": 1, "dp": 8, "per_replica": 2}

DEATHS = ("kill@3:slot=1:point=backward:n=1", "kill@6:slot=5:point=reduced")
# Where the loss scale overflows: what the first attempt of the step did to it must not stay.
OVERFLOWS = ("kill@1:slot=1:point=reduced", "kill@2:slot=5:point=reduced")


def with_deaths(faults: tuple[str, ...], *flags: str, **launching: Any) -> Run:
    specs = [part for fault in faults for part in ("--ft-fault", fault)]
    run = launch("--ft-recover", *flags, *specs, **launching)
    assert run.returncode == 0, run.output[-4000:]
    assert_faults_fired(run, len(faults))
    return run


ARITHMETIC: dict[str, tuple[dict[str, int], tuple[str, ...], float]] = {
    # name: (topology, flags, bound on the relative difference of losses)
    "per-token-loss": (
        PIPELINE,
        ("--calculate-per-token-loss", "--log-num-zeros-in-grad", "--log-params-norm"),
        1e-6,
    ),
    "per-token-loss-overlapped": (
        PIPELINE,
        ("--calculate-per-token-loss", "--overlap-grad-reduce", "--ddp-bucket-size", "20000"),
        1e-6,
    ),
    # A bucket for each matrix: backward passes fill them in another order than that of the list, in
    # which a replica reduces that has nothing to compute again.
    "overlapped-in-small-buckets": (
        EIGHT,
        ("--overlap-grad-reduce", "--ddp-bucket-size", "2000"),
        1e-6,
    ),
    "no-clipping": (TENSOR, ("--clip-grad", "0", "--log-num-zeros-in-grad"), 1e-6),
    "timers": (
        PIPELINE,
        (
            *("--timing-log-level", "2", "--timing-log-option", "all", "--log-throughput"),
            "--no-barrier-with-level-1-timing",
        ),
        1e-6,
    ),
    "recomputed-activations": (
        PIPELINE,
        (
            *("--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1", "--hidden-dropout", "0.1"),
        ),
        1e-6,
    ),
    # A sum in another order may round a parameter to its other neighbour.
    "bf16": (PIPELINE, ("--bf16",), 1e-3),
    # The first loss scales overflow, so that steps are skipped. What overflows must be one
    # microbatch: a sum of more of them, where a replica has died, would overflow sooner.
    "fp16": (
        PIPELINE,
        (
            *("--fp16", "--accumulate-allreduce-grads-in-fp32"),
            *("--initial-loss-scale", str(2**22), "--hysteresis", "1"),
        ),
        1e-3,
    ),
}
IN_CI = {"per-token-loss", "overlapped-in-small-buckets", "fp16"}


@pytest.mark.parametrize(
    "name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.slow) for n in ARITHMETIC]
)
def test_arithmetic(name: str) -> None:
    topology, flags, bound = ARITHMETIC[name]
    wanted = reference(tuple(topology.items()), flags)
    assert wanted.returncode == 0, wanted.output[-4000:]
    run = with_deaths(OVERFLOWS if name == "fp16" else DEATHS, *flags, **topology)
    assert_same_training(run, wanted, bound)
    # Sums over buckets that do not belong together break an attempt more, where their sizes differ.
    assert len(run.of_kind("repaired")) == 2
    if name == "fp16":  # without a gradient norm a step was skipped
        overflowed = [i for i, step in wanted.steps.items() if step["grad_norm"] is None]
        assert overflowed[:2] == [1, 2], "no scale overflowed where a process died"
        assert len(overflowed) < len(wanted.steps)


VERSATILE = ("--ft-recover-policy", "versatile")
# Seven replicas, sixteen microbatches: five majors of three, one spare, one minor of one. Without
# replica 3: majors 0 1 2 4 5, spare 6 (which mirrors 0), minor 7.
WITH_SPARES = "kill@2:slot=3:point=reduce"


def test_spares_stand_in() -> None:
    faults = (WITH_SPARES, "kill@4:slot=0:point=reduced", "kill@6:slot=7:point=reduce")
    run = with_deaths(faults, *VERSATILE, **EIGHT)
    assert_same_training(run, reference(tuple(EIGHT.items()), ()))
    assert run.steps[3]["quotas"] == [3, 3, 3, 0, 3, 3, 3, 1]
    # Replica 6 held what replica 0 had computed: nothing is computed again.
    assert run.steps[4]["recomputed_microbatches"] == 0
    assert run.steps[4]["quotas"] == [0, 3, 3, 0, 3, 3, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        ("kill@4:slot=6:point=reduced",),  # the spare
        ("kill@4:slot=2:point=reduce",),  # a major that nobody mirrors
        ("kill@4:slot=7:point=forward",),  # the minor
        ("kill@4:slot=0:point=forward:n=1",),  # the mirrored major, before it contributed
        # Two majors at once: more ids than contributors are left, so that the spare takes one.
        ("kill@4:slot=1:point=reduce", "kill@4:slot=2:point=reduce"),
    ],
)
def test_deaths_with_spares(deaths: tuple[str, ...]) -> None:
    run = with_deaths((WITH_SPARES, *deaths), *VERSATILE, **EIGHT)
    assert_same_training(run, reference(tuple(EIGHT.items()), ()))


@pytest.mark.slow
def test_exchangeable_samples() -> None:
    """A spare's own samples may count: as many microbatches, not the same ones."""
    faults = (WITH_SPARES, "kill@4:slot=2:point=reduce")
    run = with_deaths(faults, *VERSATILE, "--ft-recover-replay", "exchangeable", **EIGHT)
    wanted = reference(tuple(EIGHT.items()), ())
    assert {step["microbatches"] for step in run.steps.values()} == {16}
    digests = {i for i in run.steps if differs(run, wanted, i)}
    assert digests == {4}
    assert run.steps[4]["recomputed_microbatches"] == 0
    for iteration, step in run.steps.items():
        assert relative(wanted.losses[iteration], step["lm_loss"]) <= 2e-2


def differs(run: Run, wanted: Run, iteration: int) -> bool:
    return bool(run.steps[iteration]["samples_digest"] != wanted.steps[iteration]["samples_digest"])


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        (("--exit-interval", "5"), 5),
        pytest.param(("--exit-duration-in-mins", "1"), None, marks=pytest.mark.slow),
    ],
)
def test_megatrons_exit_conditions(
    flags: tuple[str, str], last: int | None, tmp_path: Path
) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "100000")
    iters = 8 if last else 20_000
    run = with_deaths(("kill@3:slot=5",), *flags, *save, iters=iters, **PIPELINE)
    assert run.summary["status"] == "degraded"
    end = max(run.steps)
    assert last in (None, end)
    assert sorted(run.steps) == list(range(1, end + 1))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == str(end)


def test_one_wandb_run_whoever_writes(tmp_path: Path) -> None:
    wandb = ("--wandb-project", "recover", "--wandb-exp-name", "small")
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "4")
    run = with_deaths(
        ("kill@3:slot=5:point=logging", "kill@5:slot=4:point=reduce"),
        *wandb,
        *save,
        **PIPELINE,
        run_dir=tmp_path / "run",
        env={"WANDB_MODE": "offline"},
    )
    name = (run.directory / "wandb_id").read_text()
    folders = list((run.directory / "wandb").glob("offline-run-*"))
    assert len(folders) == 3, folders
    assert {file.name for folder in folders for file in folder.glob("*.wandb")} == {
        f"run-{name}.wandb"
    }
    # A job in another run directory that goes on from a checkpoint goes on with its run.
    load = ("--load", str(tmp_path / "checkpoints"), "--exit-interval", "6")
    more = {**PIPELINE, "run_dir": tmp_path / "more", "env": {"WANDB_MODE": "offline"}}
    more = launch("--ft-recover", *wandb, *load, **more)
    assert more.returncode == 0, more.output[-4000:]
    assert (more.directory / "wandb_id").read_text() == name
