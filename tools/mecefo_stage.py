"""A pipeline stage in this process, normal or degraded, and how its time and memory are taken."""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import mecefo_model
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ft.mecefo.budget import (
    LayerShape,
    afford,
    layer_activations,
    layer_cost,
    topmost,
)
from megatron_ft.mecefo.options import MecefoOptions


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made since it was entered and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def ignore(self, tensor: torch.Tensor) -> None:
        """What was there before is not counted when an operation returns it."""
        self._seen[tensor.untyped_storage()._cdata] = None

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self.live += size
        self.peak = max(self.peak, self.live)
        self._seen[key] = weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        self._seen.pop(key, None)


class Stage:
    """Layers in DDP, as in training, and one step through them."""

    def __init__(self, args: argparse.Namespace, num_layers: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.args = args
        self.config = mecefo_model.config(
            num_layers=num_layers,
            hidden_size=args.hidden,
            ffn_hidden_size=args.ffn,
            num_attention_heads=args.heads,
            num_query_groups=args.heads,
            hidden_dropout=args.dropout,
            attention_dropout=args.dropout,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
        )
        self.block = mecefo_model.block(self.config)
        self.ddp = DistributedDataParallel(
            self.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.block
        )
        self.rotary = mecefo_model.rotary(self.config, args.sequence)
        self.inputs = [self._draw() for _ in range(args.microbatches)]
        self.grads = [self._draw() for _ in range(args.microbatches)]
        self.degraded: Any = None

    def _draw(self) -> torch.Tensor:
        return torch.randn(self.args.sequence, self.args.batch, self.args.hidden)

    def shape(self) -> LayerShape:
        return LayerShape(
            hidden=self.args.hidden,
            ffn=self.args.ffn,
            gated=True,
            num_heads=self.args.heads,
            num_query_groups=self.args.heads,
            head_width=self.args.hidden // self.args.heads,
            sequence=self.args.sequence,
        )

    def degrade(self, options: MecefoOptions) -> None:
        """All layers, as the options' budgets say."""
        from megatron_ft.mecefo.degraded import Degraded

        layers = range(len(self.block.layers))
        shape = self.shape()
        can = afford(
            options,
            len(layers),
            layer_cost(shape, options),
            layer_activations(shape, options, dropout=self.args.dropout > 0),
        )
        self.degraded = Degraded(self.block.layers, options, ddp=[self.ddp])
        self.degraded.on(
            layers,
            exact_attention=topmost(can.num_exact, [layers]),
            keep_ffn=topmost(can.num_kept, [layers]),
        )

    def microbatch(self, number: int) -> None:
        x = self.inputs[number].detach().requires_grad_()
        y = self.block(hidden_states=x, attention_mask=None, rotary_pos_emb=self.rotary)
        torch.autograd.backward(y, self.grads[number])

    def step(self) -> None:
        for number in range(self.args.microbatches):
            self.microbatch(number)
        if self.degraded is not None:
            self.degraded.flush()

    def peak_bytes(self) -> int:
        """Of a microbatch, its forward and backward pass."""
        self.microbatch(0)
        with LiveBytes() as live:
            for tensor in (*self.block.parameters(), self.inputs[0], self.grads[0], self.rotary):
                live.ignore(tensor)
            for parameter in self.block.parameters():
                live.ignore(parameter.main_grad)
            for state in self.degraded._on.values() if self.degraded is not None else ():
                for wgrad in state.wgrads:
                    live.ignore(wgrad.basis)
                    live.ignore(wgrad._factor)
            self.microbatch(1)
        if self.degraded is not None:
            self.degraded.discard()
        return live.peak


def cpu_seconds(function: Callable[[], None]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def rounds(functions: dict[str, Callable[[], None]], count: int) -> dict[str, list[float]]:
    """CPU seconds of each, alternately, after one round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(count + 1):
        for name, function in functions.items():
            seconds = cpu_seconds(function)
            if number:
                found[name].append(seconds)
    return found


def ratio(found: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(found[name], found[base], strict=True))
