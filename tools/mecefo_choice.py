"""What rank and interval of MeCeFO's singular vectors cost in the gradient, on a small LLaMA.

For ``bench_mecefo.py --what choice``. A byte-level model trains in this process on the default
corpus. Along an exact run the FFN gradients are compared with their low-rank ones; then the same
training runs again as if one of four replicas were degraded all the time, in all its layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mecefo_model
import numpy as np
import torch

VOCABULARY = 257
HIDDEN, FFN, LAYERS, HEADS, SEQUENCE = 128, 344, 4, 4, 128
SEQUENCES = 8
"""Of a step."""
REPLICAS = 4
DEGRADED, EXACT = slice(SEQUENCES // REPLICAS), slice(SEQUENCES // REPLICAS, None)
"""Sequences of the degraded replica and of the others."""
LR = 2e-3


@dataclass
class Trained:
    """A model after its steps."""

    loss: float
    """On held-out text."""
    gradients: dict[str, torch.Tensor]
    """Of the FFN weights in one more step, exact."""
    weights: dict[int, dict[str, torch.Tensor]]
    """FFN weights so many steps before that one."""


class Corpus:
    """Random sequences of the default corpus; the last twentieth is held out."""

    def __init__(self, folder: Path) -> None:
        from megatron_ft.data import prepare_default

        tokens = np.memmap(f"{prepare_default(folder)}.bin", dtype=np.uint16, mode="r")
        cut = len(tokens) * 19 // 20
        self.parts = {"train": tokens[:cut], "held out": tokens[cut:]}

    def batch(self, part: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, ``[sequences, sequence]``."""
        tokens = self.parts[part]
        starts = np.random.default_rng(seed).integers(len(tokens) - SEQUENCE - 1, size=SEQUENCES)
        rows = torch.from_numpy(
            np.stack([tokens[s : s + SEQUENCE + 1].astype(np.int64) for s in starts])
        )
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def new_model() -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(mecefo_model.SEED)
    config = mecefo_model.config(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=HEADS,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def loss_of(
    model: Any, batch: tuple[torch.Tensor, torch.Tensor], rows: slice = slice(None)
) -> torch.Tensor:
    tokens, labels = batch[0][rows], batch[1][rows]
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    return model(tokens, positions, None, labels=labels).mean()


def train(
    corpus: Corpus, steps: int, low_rank: tuple[int, int] | None, ages: tuple[int, ...]
) -> Trained:
    """Train from the same start on the same sequences.

    Args:
        low_rank: Rank and interval of the FFN gradients of a quarter of the sequences, by the
            formula; None for exact ones.
        ages: Steps before the end at which the FFN weights are kept.
    """
    from megatron_ft.mecefo.basis import right_singular_vectors

    model = new_model()
    ffn = {n: p for n, p in model.named_parameters() if "linear_fc" in n}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    kept: dict[int, dict[str, torch.Tensor]] = {}
    bases: dict[str, torch.Tensor] = {}
    for step in range(steps):
        if steps - step in ages:
            kept[steps - step] = {n: p.detach().clone() for n, p in ffn.items()}
        warm = min(1.0, (step + 1) / (steps // 10))
        decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = LR * warm * decay
        optimizer.zero_grad()
        batch = corpus.batch("train", step)
        if low_rank is not None:
            rank, interval = low_rank
            if step % interval == 0:
                bases = {n: right_singular_vectors(p, rank) for n, p in ffn.items()}
            (loss_of(model, batch, DEGRADED) / REPLICAS).backward()
            for name, parameter in ffn.items():
                assert parameter.grad is not None
                parameter.grad = parameter.grad @ bases[name] @ bases[name].T
            (loss_of(model, batch, EXACT) * (REPLICAS - 1) / REPLICAS).backward()
        else:
            loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, corpus.batch("train", steps)).backward()
    kept[0] = {n: p.detach().clone() for n, p in ffn.items()}
    with torch.no_grad():
        held_out = [float(loss_of(model, corpus.batch("held out", seed))) for seed in range(32)]
    gradients = {n: p.grad.clone() for n, p in ffn.items() if p.grad is not None}
    return Trained(sum(held_out) / len(held_out), gradients, kept)


def gradient_error(trained: Trained, rank: int, age: int) -> dict[str, float]:
    """Relative errors of the FFN gradients, all weights taken together.

    Returns:
        ``error`` with the singular vectors of ``age`` steps ago, ``random`` with directions drawn
        at random, ``best`` with the ``rank`` directions that fit each gradient best.
    """
    from megatron_ft.mecefo.basis import right_singular_vectors

    generator = torch.Generator().manual_seed(rank)
    lost = {"error": 0.0, "random": 0.0, "best": 0.0}
    whole = 0.0
    for name, gradient in trained.gradients.items():
        width = gradient.shape[1]
        drawn = torch.linalg.qr(torch.randn(width, min(rank, width), generator=generator)).Q
        bases = {
            "error": right_singular_vectors(trained.weights[age][name], rank),
            "random": drawn,
            "best": right_singular_vectors(gradient, rank, exact_up_to=width),
        }
        whole += float(gradient.square().sum())
        for kind, basis in bases.items():
            lost[kind] += float((gradient - gradient @ basis @ basis.T).square().sum())
    return {kind: math.sqrt(value / whole) for kind, value in lost.items()}
