"""A stage that exists nowhere any more: its process is killed, a new one takes the slot, and the
stage is rebuilt from its neighbours while the job stands still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_faults_fired, launch

ITERS = 40
STRAIGHT = {"tp": 1, "pp": 3, "dp": 1, "iters": ITERS}
PLUS = {"tp": 1, "pp": 4, "dp": 1, "iters": ITERS}


def rebuilding(
    directory: Path, *flags: str, layers: int = 4, hooks: str = "rebuilds", **topology: int
) -> Run:
    return launch(
        *("--num-layers", str(layers), "--ft-respawn", *flags),
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": hooks, "RECOVER_CENSUS": str(directory)},
        **topology,
    )


def dumps(directory: Path, what: str) -> dict[int, dict[str, Any]]:
    """Slot -> what it dumped in the only rebuild of it."""
    return {
        int(path.stem.split("-")[2]): torch.load(path, weights_only=False)
        for path in sorted(directory.glob(f"{what}-*.pt"))
    }


def assert_goes_on(run: Run, losses: int) -> None:
    assert run.returncode == 0, run.output[-5000:]
    assert run.summary["status"] == "ok"
    assert sorted(run.steps) == list(range(1, ITERS + 1)), "the interrupted steps were done again"
    assert run.summary["steps_with_wrong_microbatches"] == 0
    assert len(run.of_kind("stage_rebuilt")) == losses


def layers_of(held: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: w for name, w in held["weights"].items() if "decoder.layers" in name}


def test_a_middle_stage_is_the_average_of_its_neighbours(tmp_path: Path) -> None:
    run = rebuilding(
        *(tmp_path, "--ft-checkfree", "--ft-fault", "kill@9:slot=1:point=backward"),
        layers=6,
        **STRAIGHT,
    )
    assert_faults_fired(run, 1)
    assert_goes_on(run, 1)
    (rebuilt,) = dumps(tmp_path, "rebuilt").values()
    sources = dumps(tmp_path, "source")
    assert sorted(sources) == [0, 2]
    weights = {slot: source["norm"] for slot, source in sources.items()}
    assert all(norm > 0 for norm in weights.values())
    total = sum(weights.values())
    made = layers_of(rebuilt)
    assert made
    for name, weight in made.items():
        expected = (
            sum(weights[slot] * layers_of(sources[slot])[name].double() for slot in sources) / total
        )
        assert torch.allclose(weight.double(), expected, rtol=0, atol=1e-6), name
        plain = sum(layers_of(sources[slot])[name].double() for slot in sources) / 2
        if "norm" not in name:  # the weighting matters, or this test could not fail
            assert not torch.allclose(weight.double(), plain, rtol=0, atol=1e-6), name
    losses = run.losses
    assert min(losses[i] for i in range(20, ITERS + 1)) < losses[8], "it learns on"


def test_the_first_stage_needs_checkfree_plus(tmp_path: Path) -> None:
    """The negative control: a stage with one neighbour stops the job, with what to do."""
    run = rebuilding(
        *(tmp_path, "--ft-checkfree", "--ft-fault", "kill@9:slot=0"), layers=6, **STRAIGHT
    )
    assert run.returncode == 75, run.output[-3000:]
    assert "--ft-checkfree-plus" in run.summary["message"]


def test_each_stage_in_turn(tmp_path: Path) -> None:
    """P = 4: first, second, third and last stage die one after another in one job."""
    kills = [f"kill@{8 + 6 * stage}:slot={stage}" for stage in range(4)]
    run = rebuilding(
        tmp_path,
        "--ft-checkfree-plus",
        *(part for kill in kills for part in ("--ft-fault", kill)),
        **PLUS,
    )
    assert_faults_fired(run, 4)
    assert_goes_on(run, 4)
    assert [e["stage"] for e in run.of_kind("stage_rebuilt")] == [0, 1, 2, 3]
    assert sorted(dumps(tmp_path, "rebuilt")) == [0, 1, 2, 3]
    # The embedding of the first stage comes back byte for byte from its twin.
    first = torch.load(next(tmp_path.glob("rebuilt-*-0.pt")), weights_only=False)
    epoch = next(tmp_path.glob("rebuilt-*-0.pt")).stem.split("-")[1]
    twin = torch.load(tmp_path / f"source-{epoch}-1.pt", weights_only=False)
    embedding = [n for n in first["weights"] if "word_embeddings" in n]
    assert embedding
    for name in embedding:
        assert torch.equal(first["weights"][name], twin["weights"][name])
    losses = run.losses
    for loss in range(4):
        before = losses[7 + 6 * loss]
        assert min(losses[i] for i in range(8 + 6 * loss, ITERS + 1)) < before


@pytest.mark.slow
def test_a_tensor_parallel_peer(tmp_path: Path) -> None:
    """One half of a stage is lost: both are rebuilt, so that what they share stays alike."""
    run = rebuilding(
        *(tmp_path, "--ft-checkfree", "--ft-fault", "kill@9:slot=2"),
        layers=6,
        **{**STRAIGHT, "tp": 2},
    )
    assert_faults_fired(run, 1)
    assert_goes_on(run, 2)
    rebuilt = dumps(tmp_path, "rebuilt")
    assert sorted(rebuilt) == [2, 3]
    shared = [name for name in layers_of(rebuilt[2]) if "layer_norm" in name or "layernorm" in name]
    assert shared
    for name in shared:
        assert torch.equal(rebuilt[2]["weights"][name], rebuilt[3]["weights"][name]), name


@pytest.mark.slow
def test_all_replicas_of_a_stage_at_once(tmp_path: Path) -> None:
    run = rebuilding(
        *(tmp_path, "--ft-recover", "--ft-checkfree"),
        *("--ft-fault", "kill@9:slot=2", "--ft-fault", "kill@9:slot=3"),
        # New processes come one after the other, and the second one must come before the end.
        *("--ft-fault", "slow@10:slot=0:s=0.3:for=25"),
        layers=6,
        **{**STRAIGHT, "dp": 2},
    )
    assert_faults_fired(run, 3)
    assert_goes_on(run, 1)


def test_lost_state_without_a_death(tmp_path: Path) -> None:
    """CheckFree's simulation: weights become no numbers, and are numbers again in the same step."""
    run = rebuilding(
        *(tmp_path, "--ft-checkfree-plus", "--ft-fault", "lose-stage@6:stage=1"),
        *("--ft-fault", "lose-stage@9:stage=0", "--ft-fault", "lose-stage@9:stage=3"),
        # About every sixth step loses a stage, eight times as often as a process may be replaced.
        *("--ft-stage-failure-rate-per-hour", "0.9", "--ft-iteration-seconds", "70"),
        *("--eval-interval", "4", "--eval-iters", "1"),
        **PLUS,
    )
    assert run.returncode == 0, run.output[-4000:]
    fired = {e["fault"] for e in run.of_kind("fault_injected")}
    assert {"lose-stage@6:stage=1", "lose-stage@9:stage=0", "lose-stage@9:stage=3"} <= fired
    assert sorted(run.steps) == list(range(1, ITERS + 1))
    assert all(step["lm_loss"] == step["lm_loss"] for step in run.steps.values()), "a NaN is left"
    assert len(run.of_kind("stage_rebuilt")) >= len(fired)
    # The last stage, which tells of evaluations, has been another one's before.
    told = {event["iteration"] for event in run.of_kind("eval") if event["split"] == "validation"}
    assert told == {*range(4, ITERS + 1, 4), ITERS}
    assert run.summary["faults_unfired"] == [] and not run.of_kind("fault_detected")


@pytest.mark.parametrize("hook", ["dies-at-the-end", "elected-dies-at-the-end"])
@pytest.mark.slow
def test_a_death_when_all_work_is_done_ends_nothing(tmp_path: Path, hook: str) -> None:
    """No stage is needed any more, and the others know how the job has ended."""
    run = rebuilding(
        tmp_path, "--ft-checkfree-plus", hooks=f"rebuilds,{hook}", **{**PLUS, "pp": 2, "iters": 4}
    )
    assert run.returncode == 0, run.output[-4000:]
    assert sorted(run.steps) == [1, 2, 3, 4]
    if hook == "dies-at-the-end":
        assert run.summary["status"] == "degraded" and len(run.of_kind("fault_detected")) == 1


def test_deaths_outside_of_a_step(tmp_path: Path) -> None:
    """With one replica the others notice it in a barrier of Megatron's timers, or an evaluation."""
    kills = [
        "kill@8:slot=1:point=logging",
        "kill@16:slot=2:point=eval",
        "kill@24:slot=0:point=optimizer",
    ]
    run = rebuilding(
        *(tmp_path, "--ft-checkfree-plus", "--eval-interval", "4", "--eval-iters", "2"),
        # One that hangs is missed where the others wait for it: in a barrier.
        *("--ft-watch-timeout", "4"),
        *("--save", str(tmp_path / "saved"), "--save-interval", "8", "--ckpt-format", "torch"),
        *(part for kill in kills for part in ("--ft-fault", kill)),
        hooks="rebuilds,stops-before-a-barrier",
        **PLUS,
    )
    assert_faults_fired(run, 3)
    assert_goes_on(run, 4)
    told = {event["iteration"] for event in run.of_kind("eval") if event["split"] == "validation"}
    assert told == {*range(4, ITERS + 1, 4), ITERS}
    written = [event["iteration"] for event in run.of_kind("checkpoint")]
    assert written == list(range(8, ITERS + 1, 8)), "what comes after a step is not left out"
