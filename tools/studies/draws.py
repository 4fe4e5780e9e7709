"""The losses of a run as the command line asks for them: in runs that lose some stages only."""

from __future__ import annotations

from collections.abc import Collection

from . import failures
from .cells import Setup
from .options import Options

PER_HOUR = 0.16
"""The paper's highest rate."""


def losses(
    options: Options, setup: Setup, seed: int, *, stages: Collection[int], usual_s: float
) -> tuple[failures.Loss, ...]:
    """The losses of a seed's runs, at 16 % per hour.

    Args:
        stages: Those that are lost; the draws of the others are left out.
        usual_s: What an iteration stands for, in seconds, unless the command line says it.
    """
    drawn = failures.draw(
        PER_HOUR,
        seed=seed,
        iterations=setup.iterations,
        num_stages=setup.pipeline,
        iteration_s=options.seconds(usual_s),
    )
    return failures.of_stages(failures.later(drawn, options.failures_from), stages)
