"""ReCoVer: real jobs lose real processes, at every point, in every way; training stays the same.

Who x when x how of docs/recover.md, the cases of examples/campaigns/matrix.yaml. Each launch holds
as many deaths as its replicas allow, and is compared step by step with the fault-free run of the
same seed.
"""

from __future__ import annotations

import functools

import pytest
from harness import ROOT, Run, assert_faults_fired, assert_same_training, launch

from megatron_ft.campaign.reading import read_campaign

CAMPAIGN = read_campaign(ROOT / "examples" / "campaigns" / "matrix.yaml")
CASES = {case.name: case for case in CAMPAIGN.cases if not case.is_control}
PIPELINE = {"tp": 1, "pp": 2, "dp": 3}
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
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
    case = CASES[name]
    setting, sizes = case.setting, case.setting.topology
    topology = {"tp": sizes.tensor, "pp": sizes.pipeline, "dp": sizes.data}
    assert (setting.iterations, setting.microbatches) == (8, 4), "as launch() has them"
    wanted = reference(tuple(topology.items()), setting.flags)
    specs = [part for fault in case.faults for part in ("--ft-fault", fault)]
    run = launch(*setting.flags, *case.strategies, *specs, **topology)
    assert run.returncode == 0, run.output[-4000:]
    assert_faults_fired(run, len(case.faults))
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
