"""What a step reports: sums over replicas, and how often each microbatch id was contributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Committed:
    """A committed step as the elected writer reports it."""

    microbatch_counts: tuple[int, ...]
    """How often each id was contributed; all ones."""
    attempts: int
    recomputed: int
    """Ids computed in attempts after the first, by all replicas."""
    seconds: float


class Reports:
    """What this replica reports of the ids that it has computed in this step.

    Attempts of one step add up: what was computed before a failure still counts.
    """

    def __init__(self) -> None:
        self.summed: list[dict[str, Any]] = []
        """Of the last attempt over all replicas, sums and counts; empty but on the last stage."""
        self.counts_ids = True
        """Not where another process of the group computes other tokens of the same microbatches."""
        self._keys: Sequence[str] = ("lm loss",)
        self.forget()

    def forget(self) -> None:
        """A step begins, or what this replica has computed in it is given up."""
        self._sums: dict[str, torch.Tensor] = {}
        self._ids: list[int] = []
        self._tokens: torch.Tensor | None = None

    def add(self, ids: Sequence[int], reports: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take in what the loss function reported of microbatches.

        Args:
            ids: Those whose loss was computed here.
            reports: Name -> mean over one microbatch, or its sum and count.
        """
        for report in reports:
            for key, value in report.items():
                value = value.detach().view(-1).double()
                if value.numel() == 1:  # a mean over one microbatch: sum and count
                    value = torch.cat([value, torch.ones_like(value)])
                self._sums[key] = self._sums[key] + value if key in self._sums else value
        self._ids += ids

    def add_tokens(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of all attempts of this step, with those of this one; a copy."""
        known = self._tokens
        self._tokens = num_tokens.clone() if known is None else known + num_tokens
        return self._tokens.clone()

    @property
    def tokens(self) -> int:
        """Tokens of this step whose loss was computed here, in all its attempts."""
        return 0 if self._tokens is None else int(self._tokens)

    def sum(
        self,
        num_ids: int,
        contributes: bool,
        group: dist.ProcessGroup | None,
        pipeline_group: dist.ProcessGroup | None,
    ) -> tuple[int, ...]:
        """Sum over the replicas what was reported, and how often each id was contributed.

        Args:
            num_ids: Ids of a step are below it.
            contributes: Whether what this replica has computed counts.
            group: Where the loss is computed, the group of the replicas; None elsewhere.
            pipeline_group: The group over which to sum before that; None where the loss is
                computed on one stage only.

        Returns:
            How often each id counts, on the last stage; empty elsewhere.
        """
        self.summed = []
        if group is None and pipeline_group is None:
            return ()
        counts = torch.zeros(num_ids, dtype=torch.double, device="cuda")
        for microbatch in self._ids if self.counts_ids else ():
            counts[microbatch] += 1
        # A replica with nothing to compute knows the names from the step before.
        self._keys = sorted(self._sums) or self._keys
        nothing = torch.zeros(2, dtype=torch.double)
        sums = [self._sums.get(key, nothing).to(counts) for key in self._keys]
        vector = torch.cat([counts, *sums])
        if not contributes:
            vector.zero_()
        if pipeline_group is not None:
            # Routes end at several stages; the last one reports for all.
            dist.all_reduce(vector, group=pipeline_group)
            if group is None:
                return ()
        dist.all_reduce(vector, group=group)
        pairs = vector[num_ids:].view(-1, 2).float()
        self.summed = [dict(zip(self._keys, pairs, strict=True))]
        return tuple(int(count) for count in vector[:num_ids].tolist())
