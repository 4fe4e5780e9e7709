"""``pretrain_llama_ft.py`` for the studies: a lost stage becomes something else than the average.

``CONVERGENCE_REBUILD=copy``: a copy of the stage before it; ``random``: as at the start of a
training, drawn anew. They exist to be compared with CheckFree's average (arXiv 2506.15461) and are
no options of the product.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from megatron_ft import runtime
from megatron_ft.runtime import main


def copy() -> None:
    """All weight on the neighbour below; what else a newcomer needs comes as it does otherwise."""
    import dataclasses

    from megatron_ft.checkfree import live

    original = live.plan_sources

    @functools.wraps(original)
    def plan_sources(lost: int, *args: Any, **kwargs: Any) -> Any:
        sources = original(lost, *args, **kwargs)
        if sources is None or len(sources) == 1:
            return sources
        below = min(source.stage for source in sources)
        return tuple(
            dataclasses.replace(source, weight=float(source.stage == below)) for source in sources
        )

    live.plan_sources = plan_sources


def random() -> None:
    """Layers as Megatron initialises them, with draws that depend on seed, iteration and stage."""
    import torch

    from megatron_ft.checkfree import live, parts
    from megatron_ft.rng import key
    from megatron_ft.schedule.passage import innermost

    original = live.rebuild

    @functools.wraps(original)
    def rebuild(session: Any, *args: Any, **kwargs: Any) -> Any:
        moved = original(session, *args, **kwargs)
        config = innermost(session.model[0]).config
        seed = key(session.args.seed, session.committed, *session.world.slots)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            for name, parameter in parts.layers(session.model).items():
                initialise(config, name, parameter.data)
                parts.master(parameter).data.copy_(parameter.data)
        return moved

    live.rebuild = rebuild


def initialise(config: Any, name: str, weight: Any) -> None:
    """Fill a parameter of a layer as at the start of a training.

    Raises:
        RuntimeError: It is none that these studies' model has.
    """
    if "norm" in name and weight.dim() == 1:
        weight.fill_(1.0)
    elif name.endswith(("linear_qkv.weight", "linear_fc1.weight")):
        config.init_method(weight)
    elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        config.output_layer_init_method(weight)
    else:
        raise RuntimeError(f"no rule for {name}")


REBUILDS = {"copy": copy, "random": random}


def _after_start(rebuild: str) -> None:
    """Change the rebuild once this process is connected, before Megatron is imported."""
    original = runtime._live

    @functools.wraps(original)
    def live(*args: Any, **kwargs: Any) -> Any:
        REBUILDS[rebuild]()
        return original(*args, **kwargs)

    runtime._live = live


if __name__ == "__main__":
    _after_start(os.environ["CONVERGENCE_REBUILD"])
    sys.exit(main())
