"""Megatron's layer in MeCeFO mode against a layer in plain torch, in double precision."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mecefo_reference as reference
import pytest
from harness import ROOT, run_alone

sys.path.insert(0, str(ROOT / "tools"))

import mecefo_model
import torch

from megatron_ft.mecefo.options import MecefoOptions

SEQUENCE, BATCH, HIDDEN, FFN, RANK = 12, 2, 32, 48, 8
BOUND = 1e-9
"""Relative; the task's own is 1e-6. Double precision leaves 1e-13 of rounding here."""

GPT = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt-biases": GPT,
    "qk-layernorm": {"qk_layernorm": True, "num_query_groups": 4, "add_qkv_bias": True},
}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
EVERYTHING = MecefoOptions(rank=RANK)
EXACT = MecefoOptions(rank=10_000, skip_attention=False)
"""Everything is done MeCeFO's way, and nothing is approximate."""


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mecefo_model.megatron():
        yield
    torch.set_num_threads(threads)


def degraded(block: Any, options: MecefoOptions, *, ddp: Any = (), **on: Any) -> Any:
    from megatron_ft.mecefo.degraded import Degraded

    made = Degraded(block.layers, options, ddp=ddp)
    made.on(range(len(block.layers)), **on)
    return made


class Model:
    """A block, its input, and a pass through it."""

    def __init__(self, **options: Any) -> None:
        self.config = mecefo_model.config(**options)
        self.block = mecefo_model.block(self.config)
        with torch.no_grad():  # norms of ones and biases of zeros would hide mistakes
            for name, parameter in self.block.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.mul_(6)
        shape = (SEQUENCE, BATCH, HIDDEN)
        dtype = self.config.params_dtype
        self.x = torch.randn(shape, dtype=dtype)
        self.grad = torch.randn(shape, dtype=dtype)
        self.angles = mecefo_model.rotary(self.config, SEQUENCE)

    def run(self, *, seed: int = 5, x: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Forward and backward; output and input gradient."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        torch.manual_seed(seed)
        inside = (self.x if x is None else x).clone().requires_grad_()
        output = self.block(hidden_states=inside, attention_mask=None, rotary_pos_emb=self.angles)
        torch.autograd.backward(output, self.grad)
        return output.detach(), inside.grad

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name, those that there are; taken away from the model."""
        found = {n: p.grad for n, p in self.block.named_parameters() if p.grad is not None}
        self.block.zero_grad()
        return found

    def reference(self, rank: int | None, *, skip_attention: bool = True) -> dict[str, Any]:
        """What ``run`` should give, by the formulas."""
        weights = [
            {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
            for layer in self.block.layers
        ]
        shape = reference.Shape(
            heads=self.config.num_attention_heads,
            groups=self.config.num_query_groups,
            gated=self.config.gated_linear_unit,
            norm=self.config.normalization,
            skip_attention=skip_attention,
        )
        inside = self.x.clone().requires_grad_()
        result = reference.stack(inside, weights, shape, self.angles)
        torch.autograd.backward(result.output, self.grad)
        gradients = {
            f"layers.{i}.{name}": weight.grad
            for i, layer in enumerate(weights)
            for name, weight in layer.items()
            if weight.grad is not None
        }
        for i, (seen, layer) in enumerate(zip(result.seen, weights, strict=True)):
            for name, x, y in (("linear_fc1", seen.x1, seen.y1), ("linear_fc2", seen.x2, seen.y2)):
                if rank is not None:
                    weight = layer[f"mlp.{name}.weight"]
                    gradients[f"layers.{i}.mlp.{name}.weight"] = reference.low_rank(
                        y.grad, x, weight, rank
                    )
        return {"output": result.output.detach(), "input": inside.grad, "weights": gradients}


def close(a: torch.Tensor, b: torch.Tensor, bound: float = BOUND) -> bool:
    return float((a.double() - b.double()).norm() / b.double().norm()) <= bound


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], bound: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert close(got[name], want[name], bound), name


# -- against the formulas --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [True, False])
def test_the_whole_method_is_its_formulas(name: str, recompute: bool) -> None:
    model = Model(**MODELS[name])
    stock, _ = model.run()
    stock_gradients = model.gradients()
    handle = degraded(model.block, MecefoOptions(rank=RANK, recompute_ffn=recompute))
    output, input_grad = model.run()
    handle.flush()
    got = model.gradients()
    handle.close()

    assert torch.equal(output, stock)
    want = model.reference(RANK)
    assert close(output, want["output"])
    assert close(input_grad, want["input"])
    assert_same(got, want["weights"], BOUND)
    skipped = stock_gradients.keys() - got.keys()
    assert skipped == {n for n in stock_gradients if "self_att" in n or "input_layernorm" in n}
    # the bound can tell the low-rank gradient from the exact one
    fc1 = "layers.0.mlp.linear_fc1.weight"
    assert not close(got[fc1], model.reference(None)["weights"][fc1], 1e-2)


@pytest.mark.parametrize(
    "options",
    [
        MecefoOptions(rank=RANK, recompute_ffn=False, low_rank=False),
        MecefoOptions(rank=RANK, skip_attention=False, low_rank=False),
        MecefoOptions(rank=RANK, skip_attention=False, recompute_ffn=False),
        MecefoOptions(rank=RANK, low_rank=False),
    ],
    ids=["skip", "recompute", "low-rank", "skip-recompute"],
)
@pytest.mark.parametrize("name", ["llama", "gpt-biases"])
def test_each_technique_alone(name: str, options: MecefoOptions) -> None:
    model = Model(**MODELS[name])
    handle = degraded(model.block, options)
    output, input_grad = model.run()
    handle.flush()
    got = model.gradients()
    handle.close()
    rank = RANK if options.low_rank else None
    want = model.reference(rank, skip_attention=options.skip_attention)
    assert close(output, want["output"]) and close(input_grad, want["input"])
    assert_same(got, want["weights"], BOUND)


def test_exact_attention_in_some_layers() -> None:
    model = Model()
    handle = degraded(model.block, EVERYTHING, exact_attention=[1], keep_ffn=[1])
    assert (handle.indices, handle.skipped_attention) == ((0, 1), (0,))
    _, input_grad = model.run()
    handle.flush()
    got = model.gradients()
    handle.close()
    assert "layers.1.self_attention.linear_qkv.weight" in got
    assert "layers.0.self_attention.linear_qkv.weight" not in got
    assert not close(input_grad, model.reference(RANK)["input"], 1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_full_rank_is_exact(name: str) -> None:
    model = Model(**MODELS[name], **DROPOUT)
    output, input_grad = model.run()
    want = model.gradients()
    handle = degraded(model.block, EXACT)
    again, again_grad = model.run()
    handle.flush()
    got = model.gradients()
    handle.close()
    assert torch.equal(output, again)
    assert close(again_grad, input_grad)
    assert_same(got, want, BOUND)


# -- dropout, precision, accumulation --------------------------------------------------------------


def test_dropout_is_replayed() -> None:
    model = Model(**DROPOUT)
    found = []
    for options, seed in (
        (MecefoOptions(rank=RANK, recompute_ffn=False), 5),
        (MecefoOptions(rank=RANK), 5),
        (MecefoOptions(rank=RANK), 6),
    ):
        handle = degraded(model.block, options)
        output, input_grad = model.run(seed=seed)
        after = torch.get_rng_state()
        handle.flush()
        handle.close()
        found.append((output, after, input_grad, model.gradients()))
    kept, replayed, other = found
    assert torch.equal(kept[0], replayed[0]) and torch.equal(kept[1], replayed[1])
    assert close(replayed[2], kept[2])
    assert_same(replayed[3], kept[3], BOUND)
    fc2 = "layers.0.mlp.linear_fc2.weight"
    assert not close(other[3][fc2], kept[3][fc2], 1e-2)


def wrapped(model: Model, **settings: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    return DistributedDataParallel(model.config, ddp, model.block)


BF16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
FP32 = {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}


def test_bf16_with_fp32_gradients() -> None:
    model = Model(**BF16)
    stock, _ = model.run()
    model.gradients()
    ddp = wrapped(model)
    handle = degraded(model.block, EVERYTHING, ddp=[ddp])
    output, input_grad = model.run()
    handle.flush()
    assert torch.equal(output, stock)
    precise = Model()
    with torch.no_grad():
        for to, source in zip(precise.block.parameters(), model.block.parameters(), strict=True):
            to.copy_(source)
    precise.x, precise.grad = model.x.double(), model.grad.double()
    want = precise.reference(RANK)
    assert close(input_grad, want["input"], 3e-2)
    for name, parameter in model.block.named_parameters():
        assert parameter.main_grad.dtype is torch.float32 and parameter.grad is None
        if name in want["weights"]:
            assert close(parameter.main_grad, want["weights"][name], 5e-2), name
        else:
            assert not parameter.main_grad.any()
    handle.close()


def test_factors_add_up_and_are_flushed_once() -> None:
    model = Model()
    others = [torch.randn_like(model.x) for _ in range(3)]
    want: dict[str, torch.Tensor] = {}
    for x in others:
        model.x = x
        for name, gradient in model.reference(RANK)["weights"].items():
            want[name] = want.get(name, torch.zeros_like(gradient)) + gradient
    handle = degraded(model.block, EVERYTHING)
    model.run()  # discarded: only its norm gradients, which autograd adds, would stay
    handle.discard()
    model.gradients()
    for x in others:
        model.run(x=x)
    fc1 = model.block.layers[0].mlp.linear_fc1.weight
    assert fc1.grad is None
    with pytest.raises(AssertionError, match="would be lost"):
        handle.off()
    handle.flush()
    handle.flush()
    assert_same(model.gradients(), want, BOUND)
    assert handle.memory().factor_bytes == 8 * RANK * 2 * (2 * FFN + HIDDEN)
    assert handle.memory().basis_bytes == 8 * RANK * 2 * (HIDDEN + FFN)
    handle.close()
    assert handle.memory().factor_bytes == 0


def test_off_is_stock_to_the_bit() -> None:
    model = Model(**DROPOUT)
    before = (*model.run(), model.gradients())
    handle = degraded(model.block, EVERYTHING)
    model.run()
    handle.flush()
    model.gradients()
    handle.close()
    after = (*model.run(), model.gradients())
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])
    assert not any("ft_degraded" in vars(m) for m in model.block.modules())


def test_evaluation_is_stock() -> None:
    model = Model(**DROPOUT)
    model.block.eval()
    call = {"attention_mask": None, "rotary_pos_emb": model.angles}
    with torch.no_grad():
        before = model.block(hidden_states=model.x.clone(), **call)
        handle = degraded(model.block, EVERYTHING)
        after = model.block(hidden_states=model.x.clone(), **call)
    handle.close()
    assert torch.equal(before, after)


def test_singular_vectors_follow_the_weights() -> None:
    """Each layer in its turn, from the step of its snapshot to the next step."""
    from megatron_ft.mecefo.basis import right_singular_vectors

    model = Model()
    handle = degraded(model.block, MecefoOptions(rank=RANK, svd_interval=4), step=10)
    fc1 = [layer.mlp.linear_fc1.weight for layer in model.block.layers]
    want = [right_singular_vectors(weight, RANK) for weight in fc1]
    snapshots: dict[tuple[int, int], torch.Tensor] = {}
    for step in range(10, 20):
        for index, weight in enumerate(fc1):
            snapshots[step, index] = weight.detach().clone()
        handle.begin_step(step)
        for index, weight in enumerate(fc1):
            # layer 0 takes its snapshots in steps 14 and 18, layer 1 in 12 and 16
            since = step - 1 - 10 - 2 * index
            if step - 1 > 10 and since >= 0 and since % 4 == 0:
                want[index] = right_singular_vectors(snapshots[step - 1, index], RANK)
            assert torch.equal(weight.ft_low_rank.basis, want[index]), (step, index)
        with torch.no_grad():
            for weight in fc1:
                weight.add_(torch.randn_like(weight))
    handle.close()
    assert not hasattr(fc1[0], "ft_low_rank")


# -- memory ----------------------------------------------------------------------------------------


def kept_bytes(model: Model) -> int:
    """Of all tensors that a forward pass keeps for its backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.block.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.block(
            hidden_states=model.x.clone().requires_grad_(),
            attention_mask=None,
            rotary_pos_emb=model.angles,
        )
    return sum(seen.values())


def test_a_degraded_layer_keeps_its_ffn_input_only() -> None:
    model = Model()
    stock = kept_bytes(model)
    handle = degraded(model.block, EVERYTHING)
    assert kept_bytes(model) == 2 * SEQUENCE * BATCH * HIDDEN * 8
    handle.on([0, 1], keep_ffn=[0, 1])
    some = kept_bytes(model)
    handle.close()
    assert 2 * SEQUENCE * BATCH * HIDDEN * 8 < some < stock


@pytest.mark.parametrize("name", ["llama", "gpt-biases"])
def test_the_count_of_kept_activations_is_near(name: str) -> None:
    from megatron_ft.mecefo.budget import LayerShape, layer_activations

    model = Model(**MODELS[name])
    shape = LayerShape(
        hidden=HIDDEN,
        ffn=FFN,
        gated=model.config.gated_linear_unit,
        num_heads=4,
        num_query_groups=2,
        head_width=HIDDEN // 4,
        sequence=SEQUENCE,
    )
    count = layer_activations(shape, EVERYTHING)
    per_token = 2 * SEQUENCE * BATCH * 8
    measured = kept_bytes(model) / per_token
    handle = degraded(model.block, EVERYTHING, keep_ffn=[0, 1])
    kept = kept_bytes(model) / per_token
    handle.close()
    assert measured == pytest.approx(count.normal, rel=0.25)
    assert kept == pytest.approx(count.ffn_kept, rel=0.25)


# -- Megatron's data parallelism and recomputation -------------------------------------------------


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


# -- what is refused -------------------------------------------------------------------------------


def test_a_mixture_of_experts_is_refused() -> None:
    from megatron_ft.mecefo.degraded import Degraded

    settings = {"moe_ffn_hidden_size": 48, "moe_router_load_balancing_type": "none"}
    block = mecefo_model.block(mecefo_model.config(num_moe_experts=2, **settings))
    with pytest.raises(ValueError, match="layer 1 is a mixture of experts"):
        Degraded(block.layers, EVERYTHING)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mlp_chunks_for_training", 2, "--mlp-chunks-for-training"),
        ("cuda_graph_impl", "local", "CUDA graphs"),
        ("fp8", "hybrid", "fp8"),
        ("context_parallel_size", 2, "--context-parallel-size 1"),
    ],
)
def test_options_that_are_refused(name: str, value: Any, message: str) -> None:
    from megatron_ft.mecefo.degraded import Degraded

    block = mecefo_model.block(mecefo_model.config())
    Degraded(block.layers, EVERYTHING)
    setattr(block.layers[0].config, name, value)
    with pytest.raises(ValueError, match=message):
        Degraded(block.layers, EVERYTHING)


def test_other_linear_layers_and_frozen_weights_are_refused() -> None:
    from megatron_ft.mecefo.degraded import Degraded

    block = mecefo_model.block(mecefo_model.config())
    block.layers[1].mlp.linear_fc2.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="layer 2 has frozen FFN weights"):
        Degraded(block.layers, EVERYTHING)
    block.layers[1].mlp.linear_fc1 = torch.nn.Linear(HIDDEN, 2 * FFN)
    with pytest.raises(ValueError, match="Linear and RowParallelLinear in its FFN"):
        Degraded(block.layers, EVERYTHING)
    block.layers[1].self_attention.sink = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"layer 2: its attention has .*self_attention.sink"):
        Degraded(block.layers, EVERYTHING)


def test_layers_that_are_not_there() -> None:
    from megatron_ft.mecefo.degraded import Degraded

    handle = Degraded(mecefo_model.block(mecefo_model.config()).layers, EVERYTHING)
    with pytest.raises(ValueError, match=r"no layers \[2\]"):
        handle.on([1, 2])


# -- tensor and sequence parallelism ---------------------------------------------------------------


def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Shards against the dense reference: each rank compares its part and writes what it saw."""
    run = run_alone(
        [
            *(
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
            ),
            *("--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *(str(ROOT / "tests" / "workers" / "mecefo_tp_worker.py"), str(tmp_path)),
        ],
        tmp_path,
        timeout=180,
    )
    assert run.returncode == 0, run.output[-4000:]
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert len(seen) == 8
        for case, errors in seen.items():
            control = errors.pop("control")
            assert max(errors.values()) <= BOUND, (rank, case, errors)
            assert control > 1e-2, (rank, case, "the other rank's singular vectors would pass too")
