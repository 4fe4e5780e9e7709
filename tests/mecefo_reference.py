"""A degraded layer in plain torch, written from the formulas: what Megatron's is compared with.

No Megatron here: weights are named tensors, the attention is a matrix of scores, and the low-rank
weight gradient is (G_y^T (x V1)) V1^T with V1 from ``torch.linalg.svd``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a layer reads its weights."""

    heads: int
    groups: int
    gated: bool
    norm: str
    """"RMSNorm" or "LayerNorm"."""
    skip_attention: bool = True


@dataclass
class Seen:
    """What the FFN's products of one layer saw: inputs, and outputs whose gradients are kept."""

    x1: torch.Tensor
    y1: torch.Tensor
    x2: torch.Tensor
    y2: torch.Tensor


@dataclass
class Result:
    """Of a stack of layers."""

    output: torch.Tensor
    seen: list[Seen] = field(default_factory=list)


def norm(x: torch.Tensor, weights: Weights, name: str, kind: str) -> torch.Tensor:
    if kind == "RMSNorm":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    else:
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    x = x * weights[f"{name}.weight"]
    return x + weights[f"{name}.bias"] if f"{name}.bias" in weights else x


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """RoPE of ``[sequence, batch, heads, width]``."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * torch.cos(angles).to(x.dtype) + turned * torch.sin(angles).to(x.dtype)


def attention(x: torch.Tensor, w: Weights, shape: Shape, angles: torch.Tensor) -> torch.Tensor:
    """Causal self-attention of ``[sequence, batch, hidden]``, projection included."""
    sequence, batch, hidden = x.shape
    width = hidden // shape.heads
    per_group = shape.heads // shape.groups
    mixed = linear(x, w, "self_attention.linear_qkv")
    mixed = mixed.view(sequence, batch, shape.groups, per_group + 2, width)
    q = mixed[..., :per_group, :].reshape(sequence, batch, shape.heads, width)
    k, v = mixed[..., per_group, :], mixed[..., per_group + 1, :]
    if "self_attention.q_layernorm.weight" in w:
        q = norm(q, w, "self_attention.q_layernorm", shape.norm)
        k = norm(k, w, "self_attention.k_layernorm", shape.norm)
    q, k = rotate(q, angles), rotate(k, angles)
    k, v = k.repeat_interleave(per_group, 2), v.repeat_interleave(per_group, 2)
    scores = torch.einsum("sbhw,tbhw->bhst", q, k) / math.sqrt(width)
    future = torch.ones(sequence, sequence).triu(1).bool()
    scores = scores.masked_fill(future, -10000.0).softmax(-1)
    context = torch.einsum("bhst,tbhw->sbhw", scores, v).reshape(sequence, batch, hidden)
    return linear(context, w, "self_attention.linear_proj")


def layer(
    x: torch.Tensor, w: Weights, shape: Shape, angles: torch.Tensor
) -> tuple[torch.Tensor, Seen]:
    """One layer; what the attention adds has no gradient if it is skipped."""
    branch = attention(norm(x, w, "input_layernorm", shape.norm), w, shape, angles)
    x = x + (branch.detach() if shape.skip_attention else branch)
    x1 = norm(x, w, "pre_mlp_layernorm", shape.norm)
    y1 = linear(x1, w, "mlp.linear_fc1")
    y1.retain_grad()
    if shape.gated:
        gate, up = y1.chunk(2, -1)
        x2 = F.silu(gate) * up
    else:
        x2 = F.gelu(y1)
    y2 = linear(x2, w, "mlp.linear_fc2")
    y2.retain_grad()
    return x + y2, Seen(x1, y1, x2, y2)


def stack(x: torch.Tensor, layers: list[Weights], shape: Shape, angles: torch.Tensor) -> Result:
    result = Result(x)
    for weights in layers:
        result.output, seen = layer(result.output, weights, shape, angles)
        result.seen.append(seen)
    return result


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def low_rank(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rank: int
) -> torch.Tensor:
    """(G_y^T (x V1)) V1^T, V1 the first ``rank`` right singular vectors of ``weight``."""
    basis = torch.linalg.svd(weight.detach(), full_matrices=True).Vh[:rank].T
    return (rows(grad_y).T @ (rows(x).detach() @ basis)) @ basis.T
