"""One of two tensor-parallel ranks: ``mecefo_tp_worker.py FOLDER``, for test_mecefo_layer.

Both ranks hold all weights of a dense layer; Megatron's sharded one gets its rank's parts. Written
to FOLDER are relative differences, by case, of what this rank has from what the formulas give.
"""

# ruff: noqa: E402  the folders beside this one are not packages

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import mecefo_model
import mecefo_reference as reference
import torch
import torch.distributed as dist

from megatron_ft.mecefo.options import MecefoOptions

FOLDER = Path(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SEQUENCE, BATCH, HIDDEN, FFN, HEADS, GROUPS, LOW = 8, 2, 16, 24, 4, 2, 5
GPT = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
}
COLUMNS = ("self_attention.linear_qkv", "mlp.linear_fc1")
ROWS = ("self_attention.linear_proj", "mlp.linear_fc2")


def shard(name: str, full: torch.Tensor, gated: bool, rank: int) -> torch.Tensor:
    """A rank's part of a dense parameter, as Megatron lays it out."""
    module, _, kind = name.rpartition(".")
    if module == "mlp.linear_fc1" and gated:
        return torch.cat([half.chunk(WORLD)[rank] for half in full.chunk(2)])
    if module in COLUMNS:
        return full.chunk(WORLD)[rank]
    if module in ROWS and kind == "weight":
        return full.chunk(WORLD, 1)[rank]
    return full


def dense(gated: bool, biases: bool) -> reference.Weights:
    """All weights of one layer, the same on both ranks."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    width = HIDDEN // HEADS
    wide = FFN * (2 if gated else 1)
    weights = {
        "self_attention.linear_qkv.weight": draw((HEADS + 2 * GROUPS) * width, HIDDEN),
        "self_attention.linear_proj.weight": draw(HIDDEN, HIDDEN),
        "mlp.linear_fc1.weight": draw(wide, HIDDEN),
        "mlp.linear_fc2.weight": draw(HIDDEN, FFN),
        "input_layernorm.weight": 1 + draw(HIDDEN),
        "pre_mlp_layernorm.weight": 1 + draw(HIDDEN),
    }
    if biases:
        for name in list(weights):
            weights[name.replace("weight", "bias")] = draw(weights[name].shape[0])
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def case(name: str, *, sequence_parallel: bool, keep: bool) -> dict[str, float]:
    from megatron_ft.mecefo.degraded import Degraded

    config = mecefo_model.config(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        tensor_model_parallel_size=WORLD,
        sequence_parallel=sequence_parallel,
        **(GPT if name == "gpt" else {}),
    )
    gated = config.gated_linear_unit
    weights = dense(gated, config.add_bias_linear)
    block = mecefo_model.block(config)
    layer = block.layers[0]
    with torch.no_grad():
        for part, parameter in layer.named_parameters():
            parameter.copy_(shard(part, weights[part], gated, RANK))

    generator = torch.Generator().manual_seed(12)
    shape = (SEQUENCE, BATCH, HIDDEN)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    angles = mecefo_model.rotary(config, SEQUENCE)
    dense_x = x.clone().requires_grad_()
    read = reference.Shape(heads=HEADS, groups=GROUPS, gated=gated, norm=config.normalization)
    want = reference.stack(dense_x, [weights], read, angles)
    torch.autograd.backward(want.output, grad)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(WORLD)[RANK] if sequence_parallel else tensor

    handle = Degraded(block.layers, MecefoOptions(rank=LOW))
    handle.on([0], keep_ffn=[0] if keep else [])
    inside = mine(x).clone().requires_grad_()
    output = block(hidden_states=inside, attention_mask=None, rotary_pos_emb=angles)
    torch.autograd.backward(output, mine(grad))
    handle.flush()
    handle.close()

    assert dense_x.grad is not None and inside.grad is not None
    errors = {
        "output": error(output.detach(), mine(want.output.detach())),
        "input": error(inside.grad, mine(dense_x.grad)),
    }
    low = {rank: low_rank(want.seen[0], weights, gated, rank) for rank in range(WORLD)}
    for part, parameter in layer.named_parameters():
        if part.startswith(("input_layernorm", "self_attention")):
            assert parameter.grad is None, part
            continue
        assert parameter.grad is not None, part
        got = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(got)  # as Megatron does before the optimizer
        full = weights[part].grad
        assert full is not None
        expected = low[RANK].get(part)
        errors[part] = error(got, shard(part, full, gated, RANK) if expected is None else expected)
    gradient = layer.mlp.linear_fc1.weight.grad
    other = basis_of("mlp.linear_fc1.weight", weights, gated, 1 - RANK)
    errors["control"] = error(gradient @ other @ other.T, gradient)
    return errors


def basis_of(part: str, weights: reference.Weights, gated: bool, rank: int) -> torch.Tensor:
    matrix = shard(part, weights[part].detach(), gated, rank)
    return torch.linalg.svd(matrix, full_matrices=True).Vh[:LOW].T


def low_rank(
    seen: reference.Seen, weights: reference.Weights, gated: bool, rank: int
) -> dict[str, torch.Tensor]:
    """Gradients of a rank's shards, each by the singular vectors of that shard."""
    fc1, fc2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
    assert seen.y1.grad is not None and seen.y2.grad is not None
    grad_y1 = shard(fc1, reference.rows(seen.y1.grad).T, gated, rank).T
    x2 = reference.rows(seen.x2).chunk(WORLD, 1)[rank]
    return {
        fc1: reference.low_rank(
            grad_y1, seen.x1, shard(fc1, weights[fc1].detach(), gated, rank), LOW
        ),
        fc2: reference.low_rank(
            seen.y2.grad, x2, shard(fc2, weights[fc2].detach(), gated, rank), LOW
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with mecefo_model.megatron(RANK, WORLD, FOLDER / "store"):
        for name in ("llama", "gpt"):
            for sequence_parallel in (False, True):
                for keep in (False, True):
                    label = f"{name} sequence_parallel={sequence_parallel} keep={keep}"
                    found[label] = case(name, sequence_parallel=sequence_parallel, keep=keep)
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
