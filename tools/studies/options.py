"""What the command line says to a study."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices that all studies know; each reads those that concern it."""

    seeds: Sequence[int] = (0, 1, 2)
    iterations: int = 300
    """Of a run."""
    lr: float | None = None
    """Learning rate of all runs; None: that of ``Setup``."""
    init_std: float | None = None
    """Standard deviation of the initial weights of all runs; None: that of ``Setup``."""
    failures_from: int = 1
    """The first iteration in which a stage may be lost (ablation, swap-share)."""
    iteration_s: float | None = None
    """What an iteration stands for in the failure process; None: the study's own default."""
    pairs: int = 3
    """Runs of each way where times are compared."""
    target_loss: float | None = None
    """Validation loss to be reached; None: the one of the runs without failures at three quarters
    of their iterations."""
    cluster_nodes: int = 32
    """Nodes of the cluster that MeCeFO's scenarios are of."""
    iterations_per_hour: float = 10
    """What an hour of MeCeFO's scenarios is."""
    flags_known: Collection[str] = ()
    """Our flags that this version of the product has."""

    def seconds(self, usual: float) -> float:
        """What an iteration stands for, ``usual`` unless the command line says it."""
        return self.iteration_s or usual
