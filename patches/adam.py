"""Adam's step counts in checkpoints: CheckFree's layers and MeCeFO's attention have their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .registry import Patch


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_state_dict(
        args: Any, model: Any, optimizer: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        from megatron_ft import adam
        from megatron_ft.checkfree import lr_scale, parts

        singles = parts.optimizers(optimizer) if optimizer is not None else []
        # Files of the torch format have a count for each parameter.
        one_count = args.ckpt_format == "torch_dist"
        with adam.common_steps(singles, lr_scale.uncounted_of, one_count=one_count):
            return original(args, model, optimizer, *rest, **kwargs)

    return generate_state_dict


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="adam.save",
        target="megatron.training.checkpointing:generate_state_dict",
        reason="distributed checkpoints know one step count of Adam; a stage that was rebuilt and "
        "attention that was held have counted fewer steps than the rest",
        kind="wrap",
        make=_generate,
        requires=("args", "model", "optimizer"),
    ),
)
