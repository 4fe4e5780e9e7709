"""What several studies say alike: what is trained, when losses begin, means and increases."""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Setup
from .options import Options
from .statistics import spread


def describe(setup: Setup) -> list[str]:
    """What is trained, in words."""
    return [
        f"A LLaMA of {setup.num_layers} layers, hidden size {setup.hidden}, on the default corpus "
        f"(bytes), {setup.pipeline} stages x {setup.data} replicas, {setup.iterations} iterations "
        f"of {setup.samples} sequences of {setup.sequence} tokens ({setup.tokens / 1e6:.2f}M "
        f"tokens), learning rate {setup.lr:g} "
        + ("constant." if setup.min_lr is None else f"falling to {setup.min_lr:g} (cosine).")
        + ("" if setup.init_std is None else f" Initial weights: deviation {setup.init_std:g}."),
        f"Validation is on {2 * setup.eval_iters * setup.samples} sequences at the end and on half "
        "as many before.",
    ]


def begin(options: Options) -> list[str]:
    """When losses begin, where they do not from the start."""
    if options.failures_from <= 1:
        return []
    return [f"Nothing is lost before iteration {options.failures_from}."]


def mean_text(values: Iterable[float], digits: int = 3) -> str:
    """Mean and deviation as a table has them; a dash where there are no values."""
    listed = list(values)
    return spread(listed).text(digits) if listed else "-"


def gain_text(gains: Iterable[float]) -> str:
    """The mean of relative increases in percent; a dash where there are none."""
    listed = list(gains)
    return f"{100 * spread(listed).mean:+.2f} %" if listed else "-"
