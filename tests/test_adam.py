"""Adam's step counts in checkpoints, where parameters were held or their stage was rebuilt."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mecefo_layers import groups as groups
from test_mecefo_parts import fill, is_held, trainable

from megatron_ft import adam
from megatron_ft.checkfree import lr_scale, parts
from megatron_ft.checkfree.rebuild import _common_states

BETAS = (0.9, 0.95)
STEPS = 7


def nothing_rebuilt(single: Any, parameter: torch.Tensor) -> int:
    return 0


def stepped(counts: Mapping[str, int]) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """One of Megatron's optimizers, with torch's AdamW, whose parameters have seen so many steps,
    the last of them all of the run."""
    torch.manual_seed(0)
    named = {name: torch.nn.Parameter(torch.randn(3)) for name in counts}
    optimizer = torch.optim.AdamW(list(named.values()), betas=BETAS)
    for step in range(STEPS):
        for name, p in named.items():
            p.grad = torch.randn(3) if step >= STEPS - counts[name] else None
        optimizer.step()
    return SimpleNamespace(optimizer=optimizer, is_stub_optimizer=False), named


def hats(state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Moments with their bias corrected."""
    return [state[key] / (1 - BETAS[i] ** int(state["step"])) for key, i in adam.MOMENTS.items()]


def copy_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    return {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}


def assert_same_states(optimizer: torch.optim.Optimizer, before: dict[Any, dict[str, Any]]) -> None:
    assert list(optimizer.state) == list(before)
    for p, state in before.items():
        assert optimizer.state[p].keys() == state.keys()
        assert all(torch.equal(optimizer.state[p][key], value) for key, value in state.items())


def test_held_parameters_are_written_with_the_count_of_the_others() -> None:
    single, named = stepped({"ffn": STEPS, "attention": 4, "never": 0})
    optimizer = single.optimizer
    before = copy_of(optimizer)
    assert named["never"] not in before
    with adam.common_steps([single], nothing_rebuilt, one_count=True):
        states = {name: optimizer.state[p] for name, p in named.items()}
        assert {name: int(s["step"]) for name, s in states.items()} == dict.fromkeys(named, STEPS)
        for wanted, got in zip(
            hats(before[named["attention"]]), hats(states["attention"]), strict=True
        ):
            assert torch.allclose(wanted, got, rtol=1e-5)
        # The control: the moments themselves are other ones.
        assert not torch.allclose(
            states["attention"]["exp_avg"], before[named["attention"]]["exp_avg"], rtol=1e-2
        )
        for key in adam.MOMENTS:
            assert torch.equal(states["never"][key], torch.zeros(3))
        assert states["never"].keys() == states["ffn"].keys()
        assert all(torch.equal(states["ffn"][k], v) for k, v in before[named["ffn"]].items())
    assert_same_states(optimizer, before)


def test_formats_with_a_count_for_each_parameter_keep_them() -> None:
    single, _ = stepped({"ffn": STEPS, "attention": 4, "never": 0})
    before = copy_of(single.optimizer)
    with adam.common_steps([single], nothing_rebuilt, one_count=False):
        assert_same_states(single.optimizer, before)


def test_states_come_back_after_an_exception_too() -> None:
    single, _ = stepped({"ffn": STEPS, "attention": 4, "never": 0})
    before = copy_of(single.optimizer)
    with (
        pytest.raises(OSError, match="full"),
        adam.common_steps([single], nothing_rebuilt, one_count=True),
    ):
        raise OSError("full")
    assert_same_states(single.optimizer, before)


@pytest.mark.parametrize("one_count", [True, False])
def test_attention_is_held_in_a_stage_that_was_rebuilt(one_count: bool) -> None:
    """After three of seven steps; a twin was recovered with its state and counts all of them."""
    single, named = stepped({"twin": STEPS, "ffn": 4, "attention": 1})
    layers = [named["ffn"], named["attention"]]
    single.ft_layer_rate = lr_scale.LayerRate(layers, lambda: 1.0, lambda: 3)
    before = copy_of(single.optimizer)
    with adam.common_steps([single], lr_scale.uncounted_of, one_count=one_count):
        states = {name: single.optimizer.state[p] for name, p in named.items()}
        counts = {name: int(state["step"]) for name, state in states.items()}
        assert counts == {"twin": STEPS, "ffn": STEPS, "attention": STEPS if one_count else 4}
        for name, p in named.items():
            for wanted, got in zip(hats(before[p]), hats(states[name]), strict=True):
                assert torch.allclose(wanted, got, rtol=1e-5)
    assert_same_states(single.optimizer, before)


@pytest.mark.parametrize("one_count", [True, False])
def test_a_rebuilt_stage_before_its_first_step_counts_all(one_count: bool) -> None:
    """None of its parameters says how many steps there have been."""
    single, (p,) = SimpleNamespace(is_stub_optimizer=False), [torch.nn.Parameter(torch.ones(2))]
    single.optimizer = torch.optim.AdamW([p], betas=BETAS)
    zeros = {key: torch.zeros(2) for key in adam.MOMENTS}
    single.optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
    single.ft_layer_rate = lr_scale.LayerRate([p], lambda: 1.0, lambda: 3)
    with adam.common_steps([single], lr_scale.uncounted_of, one_count=one_count):
        assert int(single.optimizer.state[p]["step"]) == 3
    assert int(single.optimizer.state[p]["step"]) == 0


def test_a_stage_is_rebuilt_from_one_with_held_attention() -> None:
    """What is averaged, and the count that goes with it, are those of all steps."""
    single, named = stepped({"attention": 4, "never": 0, "ffn": STEPS})
    session: Any = SimpleNamespace(optimizer=single)
    before = copy_of(single.optimizer)
    states = _common_states(session, named)
    assert {int(state["step"]) for state in states.values()} == {STEPS}
    for name in ("attention", "ffn"):
        for wanted, got in zip(hats(before[named[name]]), hats(states[name]), strict=True):
            assert torch.allclose(wanted, got, rtol=1e-5)
    assert_same_states(single.optimizer, before)


def test_fused_optimizers_count_held_steps_and_lack_states() -> None:
    """They count by group; what has never seen a step is written as zeros nevertheless."""
    single, named = stepped({"ffn": STEPS, "attention": 4, "never": 0})
    for state in single.optimizer.state.values():
        del state["step"]
    single.optimizer.param_groups[0]["step"] = STEPS
    before = copy_of(single.optimizer)
    with adam.common_steps([single], nothing_rebuilt, one_count=True):
        state = single.optimizer.state[named["never"]]
        assert state.keys() == adam.MOMENTS.keys()
        rest = {p: s for p, s in single.optimizer.state.items() if p is not named["never"]}
        assert_same_states(SimpleNamespace(state=rest), before)  # type: ignore[arg-type]
    assert_same_states(single.optimizer, before)


def test_before_the_first_step_nothing_is_written() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    single = SimpleNamespace(optimizer=optimizer, is_stub_optimizer=False)
    stub = SimpleNamespace(optimizer=None, is_stub_optimizer=True)
    assert adam.rewritten([single, stub], nothing_rebuilt) == []


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("free", [0, 2], ids=["never", "later"])
def test_megatrons_optimizer_writes_what_was_held(free: int, bf16: bool) -> None:
    """After ``free`` ordinary steps, two in which attention is held."""
    from megatron_ft.mecefo.hold import hold

    ddp, optimizer = trainable(bf16, steps=free)
    named = dict(ddp.module.named_parameters())
    for seed in (3, 4):
        fill(ddp, seed)
        with hold(optimizer, [p for name, p in named.items() if is_held(name)]):
            optimizer.step()
    (single,) = parts.optimizers(optimizer)
    before = copy_of(single.optimizer)

    def saved() -> Any:
        return optimizer.sharded_state_dict({"model": ddp.module.sharded_state_dict()})

    def moments(state: Any) -> int:
        inner = state["optimizer"] if bf16 else state
        return sum("exp_avg" in of for of in inner["state"].values() if isinstance(of, dict))

    if free:
        with pytest.raises(ValueError, match="step differs per parameter"):
            saved()
    else:
        assert moments(saved()) < len(named)
    with adam.common_steps([single], lr_scale.uncounted_of, one_count=True):
        state = saved()
    assert moments(state) == len(named)
    assert int((state["optimizer"] if bf16 else state)["state"]["common_step"]) == free + 2
    assert_same_states(single.optimizer, before)
