"""The parameters of a stage: its layers, which are rebuilt, and its ends, which have twins.

Ends are what is not in a layer: embedding, final norm, output layer. Layers are numbered within
their stage, so that the same name means the same place in every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_ft.schedule.passage import innermost

LAYERS = "decoder.layers."


def layers(model: Sequence[Any]) -> dict[str, torch.nn.Parameter]:
    """The parameters of a stage's transformer layers, by their names in the stage.

    Args:
        model: Megatron's list with the one chunk of this process.
    """
    return {name: p for name, p in _named(model) if name.startswith(LAYERS)}


def ends(model: Sequence[Any]) -> dict[str, torch.nn.Parameter]:
    """The parameters of a stage that are in no layer: originals and twins."""
    return {name: p for name, p in _named(model) if not name.startswith(LAYERS)}


def _named(model: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    (chunk,) = model
    yield from innermost(chunk).named_parameters()


def master(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What the optimizer updates: the fp32 copy of a half-precision parameter, or itself."""
    copy: torch.Tensor = getattr(parameter, "main_param", parameter)
    return copy


def optimizers(optimizer: Any) -> list[Any]:
    """Megatron's single optimizers in what it trains with."""
    return list(getattr(optimizer, "chained_optimizers", None) or [optimizer])


def owners(optimizer: Any) -> dict[int, tuple[Any, dict[str, Any]]]:
    """Of each parameter that is updated (by ``id``): Megatron's optimizer and torch's group."""
    return {
        id(p): (single, group)
        for single in optimizers(optimizer)
        if single.optimizer is not None
        for group in single.optimizer.param_groups
        for p in group["params"]
    }


@torch.no_grad()
def destroy(model: Sequence[Any], optimizer: Any) -> None:
    """Make every weight and every moment of a stage no number, as if its memory were gone."""
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
            master(parameter).data.fill_(float("nan"))
    for single in optimizers(optimizer):
        if single.is_stub_optimizer:
            continue
        for state in single.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.fill_(float("nan"))
