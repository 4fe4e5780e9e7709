"""A neighbour runs two stages with flags of Megatron that change arithmetic; the fault-free run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import assert_faults_fired, assert_same_training, launch
from test_adopt_live import EXACT, assert_equal_replicas, digests, run_with
from test_recover_flags import ARITHMETIC

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"tp": 1, "pp": 2, "dp": 2, "iters": 8}
KILLS = {
    # The stage with the loss, which alone knows how many tokens there are; then the other one.
    "per-token-loss": ("kill@3:slot=3:point=reduced", "kill@5:slot=0:point=backward"),
    # Where the loss scale overflows, and what the first attempt did to it must not stay.
    "fp16": ("kill@1:slot=3:point=reduced", "kill@2:slot=0:point=reduced"),
}


@pytest.mark.parametrize("name", KILLS)
def test_adopted_with(name: str, tmp_path: Path) -> None:
    _, flags, bound = ARITHMETIC[name]
    flags = tuple(flag for flag in flags if flag != "--log-params-norm")  # refused
    wanted = launch("--ft-recover", *flags, **SIZES)
    assert wanted.returncode == 0, wanted.output[-4000:]
    run = run_with(*KILLS[name], directory=tmp_path, flags=(*EXACT, *flags), **SIZES)
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 2)
    assert [(e["slot"], e["by_slot"]) for e in run.of_kind("stage_adopted")] == [(3, 1), (0, 2)]
    assert_same_training(run, wanted, bound)
    assert_equal_replicas(digests(tmp_path, SIZES["iters"]), 2, 2)
    norms = [{i: step["grad_norm"] for i, step in r.steps.items()} for r in (run, wanted)]
    skipped = [[i for i, norm in of.items() if norm is None] for of in norms]
    assert skipped[0] == skipped[1], "other steps were skipped"
    if name == "fp16":
        assert skipped[1][:2] == [1, 2], "no scale overflowed where a process died"
        assert len(skipped[1]) < SIZES["iters"]
