"""The learning rate of a rebuilt stage's layers, times a factor that may go back to 1.

Megatron's scheduler writes ``lr`` of every parameter group anew in each step, and finds a group in
a checkpoint by its ``max_lr`` and the like, which all ranks must have alike. So a factor in the
groups would not last, or not load. Instead the groups are split for the moment of the optimizer
step: the layers' part has ``lr`` times the factor, the rest (embedding, head, their twins, which
are recovered exactly and must stay equal on two stages) has ``lr``. The groups themselves stay as
Megatron made them, so the factor cannot compound and checkpoints do not show it.

What is kept is which stage was rebuilt when: in Megatron's args, which every checkpoint has. There
``RECORD`` is a dict: stage -> (the iteration whose committed state it was rebuilt from, optimizer
steps before that which its Adam does not count; those are known on the stage itself only).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatron_ft.checkfree import parts
from megatron_ft.checkfree.options import RECORD as RECORD
from megatron_ft.checkfree.options import CheckfreeOptions

if TYPE_CHECKING:
    from megatron_ft.session import Session

logger = logging.getLogger("megatron_ft.checkfree")

RATE = "ft_layer_rate"
"""The attribute of each of Megatron's optimizers that holds its ``LayerRate``."""


def scale_at(iteration: int, rebuilt_at: int | None, options: CheckfreeOptions) -> float:
    """The factor of a stage's learning rate in the optimizer step of ``iteration``.

    ``lr_scale`` in the first step after the rebuild; with a decay it falls by the same amount in
    each step and is 1 after ``lr_decay_iters`` of them.
    """
    if rebuilt_at is None:
        return 1.0
    done = iteration - rebuilt_at - 1
    if options.lr_decay_iters == 0:
        return options.lr_scale
    left = max(0.0, 1.0 - max(0, done) / options.lr_decay_iters)
    return 1.0 + (options.lr_scale - 1.0) * left


def record(args: Any) -> dict[int, tuple[int, int]]:
    """The rebuilt stages that a process knows of; a copy."""
    known: Mapping[int, tuple[int, int]] = getattr(args, RECORD, None) or {}
    return {int(stage): (int(at), int(steps)) for stage, (at, steps) in known.items()}


def note(args: Any, stage: int, iteration: int, uncounted: int | None = None) -> None:
    """Write into Megatron's args that a stage was rebuilt from the state after ``iteration``.

    Args:
        uncounted: Optimizer steps that its Adam does not count; None where that is not known, on
            other stages.
    """
    known = record(args)
    if uncounted is None:
        at, before = known.get(stage, (None, 0))
        uncounted = before if at == iteration else 0
    known[stage] = (iteration, uncounted)
    setattr(args, RECORD, known)


def note_rebuilt(session: Session, stage: int, iteration: int) -> None:
    """Remember a rebuilt stage: on every process, so that any may write it into a checkpoint.

    Args:
        stage: The stage that was rebuilt.
        iteration: The committed iteration whose state it was rebuilt from.
    """
    note(session.args, stage, iteration)


def tell(args: Any, stage: int, uncounted: int) -> None:
    """Say in ``args`` what is known of a stage that this process has adopted."""
    known = record(args)
    if stage in known:
        known[stage] = (known[stage][0], uncounted)
        setattr(args, RECORD, known)


def hear(args: Any, told: Any, stage: int) -> int:
    """Take over when stages were rebuilt from who sent the state of ``stage``, an adopted one.

    What this process knows of its own stage stays.

    Args:
        args: This process's.
        told: The sender's.

    Returns:
        The optimizer steps that the Adam of ``stage`` does not count.
    """
    known, heard = record(args), record(told)
    for other, (at, _) in heard.items():
        if other not in known or known[other][0] != at:
            known[other] = (at, 0)
    setattr(args, RECORD, known)
    return heard.get(stage, (0, 0))[1]


def remember(args: Any, checkpoint_args: Any) -> None:
    """Take over what a checkpoint knows of rebuilt stages; its Adam states count all steps.

    With another number of stages, layers are on other ones: then all have the usual rate again.
    """
    known = {stage: (at, 0) for stage, (at, _) in record(checkpoint_args).items()}
    stages = getattr(checkpoint_args, "pipeline_model_parallel_size", None)
    if known and stages != args.pipeline_model_parallel_size:
        logger.warning(
            "the checkpoint is of %s stages, of which %s were rebuilt: their layers are on other "
            "stages now and have the usual learning rate",
            *(stages, sorted(known)),
        )
        known = {}
    setattr(args, RECORD, known)


class LayerRate:
    """How the layers of this process's stage differ from the rest of its parameters.

    Args:
        layers: What the optimizer updates of the layers.
        scale: The factor of their learning rate now.
        uncounted: Optimizer steps that their Adam does not count.
    """

    def __init__(
        self,
        layers: Collection[torch.Tensor],
        scale: Callable[[], float],
        uncounted: Callable[[], int],
    ) -> None:
        self._layers = {id(p) for p in layers}
        self.scale = scale
        self.uncounted = uncounted

    def has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._layers

    @contextlib.contextmanager
    def apart(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Around an optimizer's step: layers and the rest in groups of their own."""
        scale, groups = self.scale(), optimizer.param_groups
        uncounted = self.uncounted() if any("step" in group for group in groups) else 0
        if scale == 1.0 and uncounted == 0:
            yield
            return
        pieces = [self._split(group, scale, uncounted) for group in groups]
        optimizer.param_groups = [piece for split in pieces for piece in split]
        try:
            yield
        finally:
            for group, (rest, layers) in zip(groups, pieces, strict=True):
                # A fused optimizer counts in its groups, and leaves empty ones out.
                if "step" in layers and layers["params"]:
                    group["step"] = layers["step"] + uncounted
                elif "step" in rest:
                    group["step"] = rest["step"]
            optimizer.param_groups = groups

    def _split(
        self, group: dict[str, Any], scale: float, uncounted: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        rest = {**group, "params": [p for p in group["params"] if not self.has(p)]}
        layers = {**group, "params": [p for p in group["params"] if self.has(p)]}
        layers["lr"] = group["lr"] * scale
        if "step" in group:
            layers["step"] = group["step"] - uncounted
        return rest, layers


def uncounted_of(single: Any, parameter: torch.Tensor) -> int:
    """Optimizer steps before the rebuild of a parameter's stage that its Adam does not count.

    Args:
        single: Megatron's optimizer of the parameter; without a rate where CheckFree is off.
        parameter: What it updates.
    """
    rate: LayerRate | None = getattr(single, RATE, None)
    return rate.uncounted() if rate is not None and rate.has(parameter) else 0


def attach(
    optimizer: Any, model: Any, scale: Callable[[], float], uncounted: Callable[[], int]
) -> None:
    """Give each of Megatron's optimizers its ``LayerRate``; the patches of CheckFree ask for it."""
    layers = [parts.master(p) for p in parts.layers(model).values()]
    for single in parts.optimizers(optimizer):
        setattr(single, RATE, LayerRate(layers, scale, uncounted))


def install(session: Session, options: CheckfreeOptions) -> None:
    """Once model and optimizer are built, on every process."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    follow(
        *(session, options, stage, session.optimizer, session.model),
        lambda: record(session.args).get(stage, (0, 0))[1],
    )


def follow(
    session: Session,
    options: CheckfreeOptions,
    stage: int,
    optimizer: Any,
    model: Any,
    uncounted: Callable[[], int],
) -> None:
    """Let the layers of a stage have the rate that they have anywhere, from now on.

    Args:
        stage: This process's own stage, or one that it has adopted; its optimizer and model.
        uncounted: Optimizer steps that its Adam does not count. When the stage was rebuilt every
            process knows; these only who holds it.
    """

    def scale() -> float:
        at, _ = record(session.args).get(stage, (None, 0))
        return scale_at(session.committed, at, options)

    attach(optimizer, model, scale, uncounted)
