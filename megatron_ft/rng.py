"""Random numbers by key, so that a microbatch drops out the same wherever and whenever it runs.

Megatron's generators run on from microbatch to microbatch, so a replay on another replica would
draw other masks. With a strategy on, they are seeded before each microbatch from what names it.
"""

from __future__ import annotations

import hashlib

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def key(*parts: int | str) -> int:
    """A 63-bit seed from what names a draw; equal parts, equal seed, on any machine."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


class KeyedRng:
    """Seeds Megatron's generators for one microbatch of one stage.

    Args:
        seed: Megatron's ``--seed``.
        stage: Pipeline stage.
        tp: Tensor-parallel index; the default generator is the same for all peers, the tracker's
            are their own, as in Megatron.
    """

    def __init__(self, seed: int, stage: int, tp: int) -> None:
        self.seed = seed
        self.stage = stage
        self.tp = tp

    def __call__(self, iteration: int, microbatch: int, stage: int | None = None) -> None:
        """Seed for microbatch id ``microbatch`` of step ``iteration``.

        Args:
            stage: The stage that it passes, where the process runs another beside its own.
        """
        stage = self.stage if stage is None else stage
        tracker = get_cuda_rng_tracker()
        states = tracker.get_states()
        for name in states:
            where = (self.seed, iteration, microbatch, stage, self.tp, name)
            states[name] = self._state(key(*where))
        if states:
            tracker.set_states(states)
        # Not torch.manual_seed: it touches every device's generator.
        generator = _default_generator()
        generator.manual_seed(key(self.seed, iteration, microbatch, stage))

    def _state(self, seed: int) -> torch.Tensor:
        generator = _default_generator()
        generator.manual_seed(seed)
        return generator.get_state()


def _default_generator() -> torch.Generator:
    if torch.cuda.is_available():
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator
