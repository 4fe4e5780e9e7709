"""MeCeFO mode with Megatron's data parallelism, recomputation, pipeline and tied embeddings."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from harness import ROOT
from mecefo_layers import (
    BATCH,
    BOUND,
    DROPOUT,
    EVERYTHING,
    EXACT,
    FP32,
    MODELS,
    SEQUENCE,
    Model,
    assert_same,
    close,
    degraded,
    wrapped,
)
from mecefo_layers import groups as groups

sys.path.insert(0, str(ROOT / "tools"))

import mecefo_model
import torch


def main_grads(model: Model) -> dict[str, torch.Tensor]:
    return {n: p.main_grad.clone() for n, p in model.block.named_parameters()}


def train_step(model: Model, ddp: Any, *, aligned: bool = False) -> dict[str, torch.Tensor]:
    """Two microbatches, as Megatron's schedule passes them, and the reduction.

    Args:
        aligned: The schedule starts all reductions together, after the last backward pass, as it
            does on all pipeline stages but the first (``--overlap-grad-reduce``).
    """
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        model.run(seed=1)
        if aligned:
            model.run(seed=2)
    if aligned:
        ddp.start_grad_sync()
    else:
        model.run(seed=2)
    ddp.finish_grad_sync()
    return main_grads(model)


@pytest.mark.parametrize("first", ["degraded", "stock"])
def test_overlapped_reduction_has_every_parameter_registered(first: str) -> None:
    """Also when the first batch, from which Megatron learns the counts, is a degraded one.

    Nobody calls ``flush``: gradients are complete before whatever reduction there is.
    """
    found: dict[str, list[Any]] = {}
    for way in ("overlapped", "aligned", "plain"):
        overlap = way != "plain"
        model = Model(**FP32, **DROPOUT)
        ddp = wrapped(model, overlap_grad_reduce=overlap, bucket_size=1)
        assert len(ddp.bucket_groups) > (4 if overlap else 0)
        handle = degraded(model.block, EVERYTHING, ddp=[ddp])
        found[way] = []
        order = (True, True, False, True) if first == "degraded" else (False, True, False, True)
        for on in order:
            handle.on([0, 1] if on else [])
            found[way].append(train_step(model, ddp, aligned=way == "aligned"))
        handle.close()
    for way in ("overlapped", "aligned"):
        for overlapped, plain in zip(found[way], found["plain"], strict=True):
            assert_same(
                {n: g for n, g in overlapped.items() if g.any()},
                {n: g for n, g in plain.items() if g.any()},
                1e-5,
            )
    fc1 = "layers.0.mlp.linear_fc1.weight"
    assert found["plain"][1][fc1].any() and not close(
        found["plain"][1][fc1], found["plain"][2][fc1], 1e-2
    )


@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_reduced_in_the_order_of_the_other_replicas(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that are not degraded call the same collectives: another order would be a hang."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    order: list[str] = []
    real = _ParamAndGradBucketGroup.start_grad_sync

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        order.append(names[id(self.buckets[0].params_list[0])])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(_ParamAndGradBucketGroup, "start_grad_sync", start_grad_sync)
    model = Model(**FP32, **DROPOUT, **MODELS[name])
    names = {id(p): n for n, p in model.block.named_parameters()}
    ddp = wrapped(model, overlap_grad_reduce=True, bucket_size=1)
    handle = degraded(model.block, EVERYTHING, ddp=[ddp])
    orders = []
    for on, exact, keep in (([], [], []), ([], [], []), ([0, 1], [], []), ([0, 1], [1], [0, 1])):
        handle.on(on, exact_attention=exact, keep_ffn=keep)
        order.clear()
        train_step(model, ddp)
        orders.append(list(order))
    handle.close()
    assert len(orders[1]) == len(ddp.bucket_groups)
    assert orders[1] == orders[2] == orders[3]
    # the first batch learns the counts, and its order is that of the buckets
    assert sorted(orders[0]) == sorted(orders[1])


def test_megatron_refuses_a_reduction_in_which_parameters_are_missing() -> None:
    """The control of the test above: without registering, Megatron's own assertion fails."""
    model = Model(**FP32)
    ddp = wrapped(model, overlap_grad_reduce=True, bucket_size=1)
    handle = degraded(model.block, EVERYTHING)  # no ddp: nothing is registered
    handle.on([])
    train_step(model, ddp)
    handle.on([0, 1])
    with pytest.raises(AssertionError):
        train_step(model, ddp)
    handle.discard()
    handle.close()


RECOMPUTATION: dict[str, dict[str, Any]] = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
    },
}


@pytest.mark.parametrize("name", RECOMPUTATION)
def test_megatrons_recomputation_composes(name: str) -> None:
    plain = Model(**DROPOUT)
    handle = degraded(plain.block, EVERYTHING, exact_attention=[1])
    want = plain.run()
    handle.flush()
    want_gradients = plain.gradients()
    handle.close()
    for keep in ([], [0, 1]):
        model = Model(**DROPOUT, **RECOMPUTATION[name])
        handle = degraded(model.block, EVERYTHING, exact_attention=[1], keep_ffn=keep)
        output, input_grad = model.run()
        handle.flush()
        got = model.gradients()
        handle.close()
        assert torch.equal(output, want[0]) and close(input_grad, want[1])
        assert_same(got, want_gradients, BOUND)
        if name == "selective":
            assert all(layer.recompute_mlp for layer in model.block.layers)


def test_the_pipelines_freed_outputs() -> None:
    """Megatron's schedule frees a stage's output once it is sent, and calls autograd by itself."""
    from megatron.core.pipeline_parallel.schedules import (
        custom_backward,
        deallocate_output_tensor,
    )

    model = Model(**DROPOUT)
    handle = degraded(model.block, EVERYTHING, keep_ffn=[0])
    _, want = model.run()
    handle.flush()
    want_gradients = model.gradients()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    torch.manual_seed(5)
    inside = model.x.clone().requires_grad_()
    output = model.block(hidden_states=inside, attention_mask=None, rotary_pos_emb=model.angles)
    deallocate_output_tensor(output, True)
    assert output.numel() == 1
    custom_backward(output, model.grad)
    handle.flush()
    handle.close()
    assert torch.equal(inside.grad, want)
    assert_same(model.gradients(), want_gradients, 0)


def test_tied_embeddings() -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(3)
    model = GPTModel(
        config=mecefo_model.config(**FP32),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    tokens = torch.randint(64, (BATCH, SEQUENCE))
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(tokens, positions, None, labels=tokens).sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    want = gradients()
    handle = degraded(model.decoder, EXACT)
    model.zero_grad()
    model(tokens, positions, None, labels=tokens).sum().backward()
    handle.flush()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    handle.close()
    assert "embedding.word_embeddings.weight" in got
    assert_same(got, want, 1e-4)
