"""Adam's state of parameters that began anew while others went on.

Adam divides its moments by 1 - beta^k, k the steps it has counted. A rebuilt layer counts from its
rebuild, the rest of the model from the beginning of the run. Megatron's distributed checkpoint has
one step count for all parameters (rank 0's), and would refuse or falsify such a state. So it is
written as if Adam had counted all steps, with moments that give the same quotients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1}
"""Adam's moments and which of its betas belongs to each."""


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
