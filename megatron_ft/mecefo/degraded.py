"""Switches layers of a stage into MeCeFO mode and back, step by step; no model is rebuilt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.mecefo.layer import DegradedLayer
from megatron_ft.mecefo.options import MecefoOptions
from megatron_ft.mecefo.ready import GradReady
from megatron_ft.mecefo.refresh import Refresher
from megatron_ft.mecefo.refusals import check_layers
from megatron_ft.patches import mecefo as patches
from megatron_ft.patches.registry import registry


@dataclass(frozen=True, kw_only=True)
class MecefoMemory:
    """Bytes that MeCeFO mode holds on this process beside the model."""

    basis_bytes: int
    """Singular vectors V1 of the FFN weights."""
    factor_bytes: int
    """Factors of the step's weight gradients."""


class Degraded:
    """The layers of one process that can be degraded.

    A step goes: ``on`` or ``off``, ``begin_step``, forward and backward passes, gradient reduction,
    optimizer. Tensor-parallel peers must switch alike.

    Args:
        layers: Megatron's TransformerLayers, of one stage or of two.
        options: Which techniques, and how.
        ddp: The ``DistributedDataParallel`` wrappers that hold the layers.

    Raises:
        ValueError: A layer cannot be degraded.
    """

    def __init__(
        self, layers: Sequence[Any], options: MecefoOptions, *, ddp: Iterable[Any] = ()
    ) -> None:
        check_layers(layers, options)
        missing = [p.name for p in patches.PATCHES if not registry.is_installed(p.name)]
        assert not missing, f"the patches of MeCeFO are not installed: {missing}"
        self.layers = tuple(layers)
        self.options = options
        self._ready = GradReady(ddp)
        self._refresher = Refresher(options.rank, options.svd_interval)
        self._on: dict[int, DegradedLayer] = {}
        self._adopted: dict[int, int] = {}

    def on(
        self,
        indices: Iterable[int],
        *,
        exact_attention: Collection[int] = (),
        keep_ffn: Collection[int] = (),
        step: int = 0,
    ) -> None:
        """Degrade exactly these layers from now on; between steps only.

        Those that are degraded already keep their singular vectors; new ones get fresh ones.

        Args:
            indices: Into ``layers``.
            exact_attention: Those among them whose attention has its exact backward pass.
            keep_ffn: Those among them whose FFN is not recomputed.
            step: The step that begins.
        """
        wanted = set(indices)
        unknown = wanted.union(exact_attention, keep_ffn) - set(range(len(self.layers)))
        if unknown:
            raise ValueError(f"no layers {sorted(unknown)}: there are {len(self.layers)}")
        for index in self._on.keys() - wanted:
            self._off(index)
        for index in sorted(wanted):
            if index not in self._on:
                self._degrade(index, step)
            state = self._on[index]
            state.skip_attention = self.options.skip_attention and index not in exact_attention
            state.recompute_ffn = self.options.recompute_ffn and index not in keep_ffn

    def off(self) -> None:
        """Every layer is stock again, to the bit; between steps only."""
        for index in list(self._on):
            self._off(index)

    def begin_step(self, step: int) -> None:
        """Take singular vectors anew where their time has come; before the first forward pass."""
        for index, layer in self._on.items():
            if layer.wgrads:
                self._refresher.begin_step(
                    step, self._adopted[index], index, len(self.layers), layer.wgrads
                )

    def flush(self) -> None:
        """Complete the weight gradients of the step.

        Needed only where Megatron's DDP does not reduce them: before a bucket's reduction a patch
        does the same for its weights, whatever starts it.
        """
        for layer in self._on.values():
            for wgrad in layer.wgrads:
                wgrad.flush()

    def discard(self) -> None:
        """Forget the microbatches since the last flush: their gradients are not to count."""
        for layer in self._on.values():
            for wgrad in layer.wgrads:
                wgrad.discard()

    def close(self) -> None:
        """Switch off, and end the worker thread."""
        self.off()
        self._refresher.close()

    @property
    def indices(self) -> tuple[int, ...]:
        """Layers that are degraded now."""
        return tuple(sorted(self._on))

    @property
    def skipped_attention(self) -> tuple[int, ...]:
        """Layers whose attention has no backward pass now."""
        return tuple(index for index in self.indices if self._on[index].skip_attention)

    def memory(self) -> MecefoMemory:
        """What is held now."""
        wgrads = [wgrad for layer in self._on.values() for wgrad in layer.wgrads]
        return MecefoMemory(
            basis_bytes=sum(wgrad.basis_bytes for wgrad in wgrads),
            factor_bytes=sum(wgrad.factor_bytes for wgrad in wgrads),
        )

    def _degrade(self, index: int, step: int) -> None:
        layer = self.layers[index]
        state = DegradedLayer(layer, self._ready, low_rank=self.options.low_rank)
        if state.wgrads:
            self._refresher.now(state.wgrads)
        for module in (layer, *state.linears):
            module.ft_degraded = state
        for wgrad in state.wgrads:
            wgrad.weight.ft_low_rank = wgrad
        self._on[index] = state
        self._adopted[index] = step

    def _off(self, index: int) -> None:
        state = self._on[index]
        for wgrad in state.wgrads:
            wgrad.release()
            del wgrad.weight.ft_low_rank
        del self._on[index], self._adopted[index]
        self._refresher.forget(index)
        for module in (state.layer, *state.linears):
            del module.ft_degraded
