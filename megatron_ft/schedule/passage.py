"""What the executor tells a model chunk about the microbatch that is about to pass through it.

In Megatron a stage embeds or computes the loss once and for all, as the model was built
(``pre_process``, ``post_process``). On a swapped route it depends on the microbatch: the second
stage embeds those that begin there, the first one gets them from there.

Before each forward pass the executor sets the attribute ``passage`` of the chunk's innermost module
(below DDP and Float16Module), and afterwards sets it to None. A model that can follow it says so by
an attribute ``takes_passage`` that is true; then ``passage.enters`` stands for ``pre_process`` and
``passage.leaves`` for ``post_process`` in this forward pass. Other models are run on routes only
on which both never change. The user's forward step gets the model and can ask ``passage_of(model)``
for the microbatch and whether to read tokens (``enters``) or labels (``leaves``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_ft.schedule.routes import Route


@dataclass(frozen=True)
class Passage:
    """One microbatch at one stage."""

    microbatch: int
    """Index in the list of microbatches of this call, not the id."""
    stage: int
    enters: bool
    """The route begins here: tokens are embedded, nothing is received."""
    leaves: bool
    """The route ends here: the loss is computed, nothing is sent."""


def passage(routes: tuple[Route, ...], microbatch: int, stage: int) -> Passage:
    """How a microbatch passes a stage on its route."""
    route = routes[microbatch]
    return Passage(microbatch, stage, enters=route[0] == stage, leaves=route[-1] == stage)


def changes_ends(routes: Iterable[Route], stage: int) -> bool:
    """Whether a route begins or ends at a stage where Megatron's does not, or the other way."""
    return any(
        (route[0] == stage) != (stage == 0) or (route[-1] == stage) != (stage == len(route) - 1)
        for route in routes
    )


def innermost(model: Any) -> Any:
    """A model chunk without its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def passage_of(model: Any) -> Passage | None:
    """The passage under way through a model chunk; None outside of the executor."""
    found: Passage | None = getattr(innermost(model), "passage", None)
    return found
