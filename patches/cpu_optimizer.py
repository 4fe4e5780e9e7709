"""The distributed optimizer over torch's own Adam, as it is where neither Apex nor TE is installed.

Stock Megatron saves its state but cannot load it: it asks the optimizer for a step count that there
is not before the first step, and afterwards gives all parameters one and the same counter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .registry import Patch

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"


def _applies(optimizer: Any) -> bool:
    """Whether torch's own Adam is wrapped, whose state holds a counter for each parameter."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and optimizer.optimizer is not None


def _state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _applies(self) and not self.optimizer.state:
            # Megatron's own way to fill it; it takes a step, which must not be seen.
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            before = [p.detach().clone() for p in params]
            self._init_optimizer_states_with_dummy_values()
            with torch.no_grad():
                for param, value in zip(params, before, strict=True):
                    param.copy_(value)
        return original(self)

    return state_dict


def _load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        if _applies(self):
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone()
        return result

    return load_state_dict


def _set_states(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> Any:
        if _applies(self):
            group, order = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
            if "step" in state:
                tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cpu.distributed_optimizer.state_dict",
        target=f"{_OPTIMIZER}:DistributedOptimizer.state_dict",
        reason="torch's Adam has no step count before its first step, which loading asks for",
        kind="wrap",
        make=_state_dict,
    ),
    Patch(
        name="cpu.distributed_optimizer.load_state_dict",
        target=f"{_OPTIMIZER}:DistributedOptimizer.load_state_dict",
        reason="torch's Adam counts steps for each parameter, and one shared counter runs ahead",
        kind="wrap",
        make=_load_state_dict,
        requires=("state_dict",),
    ),
    Patch(
        name="cpu.distributed_optimizer.set_states",
        target=f"{_OPTIMIZER}:DistributedOptimizer._set_main_param_and_optimizer_states",
        reason="the step count is loaded elsewhere; here it is missing, or that of before",
        kind="wrap",
        make=_set_states,
        requires=("model_param", "tensors"),
    ),
)
