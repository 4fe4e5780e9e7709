"""Adam's state of parameters that have seen fewer steps than others.

Adam divides its moments by 1 - beta^k, k the steps it has counted. A rebuilt layer (CheckFree)
counts from its rebuild, and attention that was held (MeCeFO) has not counted those steps; the rest
of the model counts from the beginning of the run. Megatron's distributed checkpoint has one step
count for all parameters (rank 0's), and would refuse or falsify such a state. So it is written as
if Adam had counted all steps, with moments that give the same quotients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1}
"""Adam's moments and which of its betas belongs to each."""

Uncounted = Callable[[Any, torch.Tensor], int]
"""One of Megatron's optimizers and a parameter -> steps of the run before its rebuild, if any."""


def counted(group: Mapping[str, Any], state: Mapping[str, Any], uncounted: int) -> int | None:
    """Steps that the moments of a parameter are over; None before the first.

    Args:
        group: The parameter's group. Fused optimizers count the steps of a whole group in it.
        state: What the optimizer keeps for the parameter; torch's Adam counts its steps in it.
        uncounted: Steps of the run before the parameter was rebuilt, 0 if it was not.
    """
    if "step" in state:
        return int(state["step"])
    if state and "step" in group:
        return int(group["step"]) - uncounted
    return None


def common(group: Mapping[str, Any], state: Mapping[str, Any], uncounted: int) -> dict[str, Any]:
    """A parameter's state as if Adam had counted ``uncounted`` steps more; same quotients.

    Moments that have seen no step yet stay zero.
    """
    steps = counted(group, state, uncounted)
    if steps is None or uncounted == 0:
        return dict(state)
    total = steps + uncounted
    out = dict(state)
    for name, beta in MOMENTS.items():
        if name in state and steps:
            beta_of = group["betas"][beta]
            out[name] = state[name] * ((1 - beta_of**total) / (1 - beta_of**steps))
    if "step" in state:
        out["step"] = like(state["step"], total)
    return out


def like(step: Any, value: int) -> Any:
    """A step count of ``value`` in the form of ``step``."""
    return torch.full_like(step, value) if isinstance(step, torch.Tensor) else type(step)(value)


class Rewritten(NamedTuple):
    """A state that is not the one that an optimizer keeps."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    state: dict[str, Any]


def rewritten(
    optimizers: Iterable[Any], uncounted: Uncounted, *, one_count: bool = True
) -> list[Rewritten]:
    """The states that change if Adam is to have counted all steps.

    Args:
        optimizers: Megatron's single ones, of one stage.
        uncounted: What CheckFree knows of each parameter.
        one_count: All parameters get the count of those that were never held, and those that have
            no state, because they were held in every step, get one of zeros. The FFNs of a stage
            are never held, so it is the same count in all stages. Otherwise only the steps before
            a rebuild are added.
    """
    owned = [
        (single, group, p, single.optimizer.state.get(p, {}), uncounted(single, p))
        for single in optimizers
        if not single.is_stub_optimizer
        for group in single.optimizer.param_groups
        for p in group["params"]
    ]
    steps = {p: counted(group, state, before) for _, group, p, state, before in owned}
    totals = {p: steps[p] + before for _, _, p, _, before in owned if steps[p] is not None}
    if not totals:
        return []
    last = max(totals.values())
    sample = next(state for _, _, p, state, _ in owned if p in totals)
    found = []
    for single, group, p, state, _ in owned:
        own = steps[p]
        if own is None:
            changed = _unstepped(p, sample, last) if one_count else None
        else:
            missing = (last if one_count else totals[p]) - own
            changed = common(group, state, missing) if missing else None
        if changed is not None:
            found.append(Rewritten(single.optimizer, p, changed))
    return found


def _unstepped(parameter: torch.Tensor, sample: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The state of a parameter that has seen no step, in the form of another one's."""
    state: dict[str, Any] = {
        name: torch.zeros_like(parameter, dtype=sample[name].dtype)
        for name in MOMENTS
        if name in sample
    }
    if "step" in sample:
        state["step"] = like(sample["step"], steps)
    return state


@contextlib.contextmanager
def common_steps(
    optimizers: Iterable[Any], uncounted: Uncounted, *, one_count: bool
) -> Iterator[None]:
    """While a checkpoint is written: states as if all steps were counted; see ``rewritten``."""
    changed = rewritten(optimizers, uncounted, one_count=one_count)
    kept = [optimizer.state.get(p) for optimizer, p, _ in changed]
    for optimizer, p, state in changed:
        optimizer.state[p] = state
    try:
        yield
    finally:
        for (optimizer, p, _), before in zip(changed, kept, strict=True):
            if before is None:
                del optimizer.state[p]
            else:
                optimizer.state[p] = before
