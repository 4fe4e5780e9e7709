"""Megatron's call of its schedule, as an attempt of a step needs it: model, data, forward step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_ft.schedule.passage import passage_of

if TYPE_CHECKING:
    from megatron_ft.adopt.pair import Pair


class ForwardStep:
    """The user's forward step over given ids, its loss divided by G whatever their number.

    Megatron's schedule divides each loss by the number of microbatches that it runs; scaling by
    n/G beforehand leaves 1/G, ReCoVer's invariant.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        ids: Sequence[int],
        scale: float,
        before: Callable[[int, int | None], None],
    ) -> None:
        self.inner = inner
        self.ids = ids
        self.scale = scale
        self.before = before
        self.done = 0
        self.reports: list[Mapping[str, torch.Tensor]] = []
        self.reported: list[int] = []
        """The ids whose loss was computed here."""

    def __call__(self, data_iterator: Any, model: Any, *args: Any) -> tuple[Any, Any]:
        # Megatron's schedules take them in order; an executor says which one it is.
        passage = passage_of(model)
        microbatch = self.ids[self.done if passage is None else passage.microbatch]
        self.before(microbatch, None if passage is None else passage.stage)
        self.done += 1
        output, loss_func = self.inner(data_iterator, model, *args)

        def reported(*loss_args: Any, **loss_kwargs: Any) -> Any:
            loss, *rest = loss_func(*loss_args, **loss_kwargs)
            self.reports.append(rest[-1])
            self.reported.append(microbatch)
            return (loss if self.scale == 1.0 else loss * self.scale, *rest)

        return output, reported


def chunks_of(model: Any) -> list[Any]:
    """Megatron's model chunks, however it passes them."""
    return model if isinstance(model, list) else [model]


def iterators_of(call: dict[str, Any], pair: Pair | None) -> list[Any]:
    """The ledger's iterators of this process's slots.

    Args:
        pair: Both stages, where the process runs two.
    """
    own = _loader_of(call["data_iterator"])
    other = None if pair is None else pair.iterator(own, call["forward_only"])
    return [iterator for iterator in (own, other) if iterator is not None]


def _loader_of(data_iterator: Any) -> Any:
    """The ledger's iterator inside what Megatron passes around; None where nothing is read."""
    if isinstance(data_iterator, list):
        assert len(data_iterator) == 1, "one model chunk only"
        data_iterator = data_iterator[0]
    return getattr(data_iterator, "iterable", data_iterator)
