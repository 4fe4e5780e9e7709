"""What MeCeFO costs: a neighbour with two stages against one normal stage.

    python tools/bench_mecefo.py                 # time and memory of the neighbour
    python tools/bench_mecefo.py --what choice   # rank and interval: time and gradient error

CPU time of forward and backward of a step, on one thread. The ways alternate within a round, so
that a machine that slows down slows all; a ratio is the median over the rounds. Memory is what
tensors hold at the most during a microbatch, without parameters and gradients.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mecefo_model
import torch
from bench_collectives import machine
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ft.mecefo.budget import (
    LayerShape,
    layer_activations,
    layer_cost,
    num_exact_layers,
    num_kept_ffns,
    topmost,
)
from megatron_ft.mecefo.options import DEFAULT_RANK, DEFAULT_SVD_INTERVAL, MecefoOptions

TIME_GOAL = 1.30
MEMORY_GOAL = 1.1
WAYS = ("one stage", "naive", "mecefo")


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
        kept = layer_activations(self.shape(), options, dropout=self.args.dropout > 0)
        num_exact = num_exact_layers(
            options.budget, len(layers), layer_cost(self.shape(), options)
        )
        self.degraded = Degraded(self.block.layers, options, ddp=[self.ddp])
        self.degraded.on(
            layers,
            exact_attention=topmost(num_exact, [layers]),
            keep_ffn=topmost(num_kept_ffns(options.memory, len(layers), kept), [layers]),
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


# -- the neighbour ---------------------------------------------------------------------------------


def neighbour(args: argparse.Namespace) -> dict[str, Any]:
    """One normal stage, two of them, and two degraded ones, whole and by technique."""
    options = {
        "mecefo": MecefoOptions(rank=args.rank),
        "all FFNs recomputed": MecefoOptions(rank=args.rank, memory=0),
        "no FFN recomputed": MecefoOptions(rank=args.rank, recompute_ffn=False),
        "only skip-MHA": MecefoOptions(rank=args.rank, recompute_ffn=False, low_rank=False),
        "only recomputation": MecefoOptions(
            rank=args.rank, skip_attention=False, low_rank=False, memory=0
        ),
        "only low rank": MecefoOptions(rank=args.rank, skip_attention=False, recompute_ffn=False),
    }
    one, two = Stage(args, args.layers), Stage(args, 2 * args.layers)
    degraded = {name: Stage(args, 2 * args.layers) for name in options}
    for name, stage in degraded.items():
        stage.degrade(options[name])
    found = rounds(
        {
            "one stage": one.step,
            "naive": two.step,
            **{name: stage.step for name, stage in degraded.items()},
        },
        args.rounds,
    )
    stages = {"one stage": one, "naive": two, **degraded}
    peaks = {name: stage.peak_bytes() for name, stage in stages.items()}
    rows = [
        {
            "way": name,
            "seconds": statistics.median(found[name]),
            "time": ratio(found, name, "one stage"),
            "peak_bytes": peaks[name],
            "memory": peaks[name] / peaks["one stage"],
        }
        for name in stages
    ]
    wgrads = [w for state in degraded["mecefo"].degraded._on.values() for w in state.wgrads]
    svd = statistics.median(svd_seconds(wgrads, args.rank) for _ in range(3))
    held = degraded["mecefo"].degraded.memory()
    for stage in degraded.values():
        stage.degraded.close()
    step = statistics.median(found["one stage"])
    return {
        "rows": rows,
        "svd_seconds": svd,
        "svd_share": svd / args.interval / step,
        "basis_bytes": held.basis_bytes,
        "factor_bytes": held.factor_bytes,
    }


def svd_seconds(wgrads: list[Any], rank: int) -> float:
    from megatron_ft.mecefo.basis import right_singular_vectors

    def refresh() -> None:
        for wgrad in wgrads:
            right_singular_vectors(wgrad.weight, rank)

    return cpu_seconds(refresh)


def show_neighbour(console: Console, args: argparse.Namespace, found: dict[str, Any]) -> None:
    table = Table(title="two stages on one process, in units of one normal stage")
    for column in ("", "CPU time", "goal", "peak memory", "goal"):
        table.add_column(column, justify="left" if not column else "right")
    for row in found["rows"]:
        goals = row["way"] == "mecefo"
        table.add_row(
            row["way"],
            f"{row['time']:.3f}",
            f"<= {TIME_GOAL:.2f}" if goals else "",
            f"{row['memory']:.3f}",
            f"<= {MEMORY_GOAL:.2f}" if goals else "",
        )
    console.print(table)
    console.print(
        f"singular vectors, all layers: {found['svd_seconds']:.3f} s of CPU time beside training, "
        f"every {args.interval} steps: {found['svd_share']:.4f} of a step; "
        f"{found['basis_bytes']:,} bytes of V1, {found['factor_bytes']:,} of factors"
    )


# -- rank and interval -----------------------------------------------------------------------------


def choice(args: argparse.Namespace) -> dict[str, Any]:
    raise NotImplementedError


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("neighbour", "choice"), default="neighbour")
    parser.add_argument("--layers", type=int, default=4, help="of one stage")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1376)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rank", type=int, default=DEFAULT_RANK)
    parser.add_argument("--interval", type=int, default=DEFAULT_SVD_INTERVAL)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(mecefo_model.SEED)
    console = Console(width=120)
    with mecefo_model.megatron():
        found = neighbour(args)
        show_neighbour(console, args, found)


if __name__ == "__main__":
    main()
