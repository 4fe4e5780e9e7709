"""MeCeFO's layer: a TransformerLayer that is marked degraded goes another way; others do not."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from .registry import Patch, Reliance


def _layer_method(way: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            degraded = getattr(self, "ft_degraded", None)
            if degraded is None:
                return original(self, hidden_states, *args, **kwargs)
            return getattr(degraded, way)(original, hidden_states, *args, **kwargs)

        return method

    return make


def _product(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _forward_impl(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        degraded = getattr(self, "ft_degraded", None)
        if degraded is None:
            return original(self, input, weight, *args, **kwargs)
        assert not args, "Megatron passes the rest by name"
        return degraded.product(original, self, input=input, weight=weight, **kwargs)

    return _forward_impl


def _module_forward(way: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            degraded = getattr(self, "ft_degraded", None)
            if degraded is None:
                return original(self, *args, **kwargs)
            return getattr(degraded, way)(original, self, *args, **kwargs)

        return forward

    return make


def _start_grad_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.params:
            low_rank = getattr(parameter, "ft_low_rank", None)
            if low_rank is not None:
                low_rank.flush()
        return original(self, *args, **kwargs)

    return start_grad_sync


def _step_with_ready_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step_with_ready_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = getattr(self, "ft_held", ())
        if not held:
            return original(self, *args, **kwargs)
        from megatron_ft.mecefo.hold import hold

        with hold(self, held):
            return original(self, *args, **kwargs)

    return step_with_ready_grads


_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_LINEAR = "megatron.core.tensor_parallel.layers"
_ENGINE = "megatron.core.extensions.transformer_engine"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

OWN: tuple[Patch, ...] = (
    Patch(
        name="mecefo.attention",
        target=f"{_LAYER}._forward_attention",
        reason="a degraded layer's attention keeps nothing and has no backward; the choice is made "
        "anew in each step, so another module or spec would not do",
        kind="wrap",
        make=_layer_method("forward_attention"),
        requires=("self", "hidden_states"),
    ),
    Patch(
        name="mecefo.ffn",
        target=f"{_LAYER}._forward_mlp",
        reason="a degraded layer's FFN is computed again in backward",
        kind="wrap",
        make=_layer_method("forward_ffn"),
        requires=("self", "hidden_states"),
    ),
    Patch(
        name="mecefo.column_product",
        target=f"{_LINEAR}:ColumnParallelLinear._forward_impl",
        reason="linear_fc1 of a degraded layer has a low-rank weight gradient; the collectives "
        "around the product stay Megatron's",
        kind="wrap",
        make=_product,
        requires=("self", "input", "weight"),
    ),
    Patch(
        name="mecefo.row_product",
        target=f"{_LINEAR}:RowParallelLinear._forward_impl",
        reason="the same for linear_fc2",
        kind="wrap",
        make=_product,
        requires=("self", "input", "weight"),
    ),
    Patch(
        name="mecefo.row_forward",
        target=f"{_LINEAR}:RowParallelLinear.forward",
        reason="the output of linear_fc2 is not needed when it is computed again for backward",
        kind="wrap",
        make=_module_forward("row_forward"),
        requires=("self", "input_"),
    ),
    Patch(
        name="mecefo.start_grad_sync",
        target=f"{_BUFFER}.start_grad_sync",
        reason="a bucket's low-rank weight gradients are completed before its reduction, whoever "
        "starts that: the last backward pass, the pipeline schedule, or the end of the step; and "
        "before recover.start_grad_sync, which is inside of this one, copies them",
        kind="wrap",
        make=_start_grad_sync,
        requires=("self",),
    ),
    Patch(
        name="mecefo.hold",
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.step_with_ready_grads",
        reason="attention parameters that no replica has a gradient for are left as they are, by "
        "weight decay and momentum too; the optimizer is marked with them for one step",
        kind="wrap",
        make=_step_with_ready_grads,
        requires=("self",),
    ),
)

# Without Transformer Engine what Megatron defines in its place are no classes.
ENGINE: tuple[Patch, ...] = tuple(
    Patch(
        name=f"mecefo.{name}",
        target=f"{_ENGINE}:{name}.forward",
        reason="in a degraded layer torch operations take the place of Transformer Engine's, whose "
        "weight gradient cannot be low-rank",
        kind="wrap",
        make=_module_forward("te_forward"),
        requires=("self", "x"),
    )
    for name in ("TELinear", "TELayerNormColumnParallelLinear")
)

PATCHES = (*OWN, *(ENGINE if importlib.util.find_spec("transformer_engine") else ()))


def _reads(owner: str, names: str, reason: str) -> tuple[Reliance, ...]:
    short = owner.rpartition(":")[2].strip(".")
    return tuple(
        Reliance(name=f"mecefo.{short}.{name}", target=f"{owner}.{name}", reason=reason)
        for name in names.split()
    )


_OPTIMIZER = "megatron.core.optimizer.optimizer"

RELIANCES: tuple[Reliance, ...] = (
    Reliance(
        name="mecefo.checkpoint",
        target="megatron.core.tensor_parallel.random:checkpoint",
        reason="recomputes the FFN with the same random numbers",
        positional=("function", "distribute_saved_activations"),
    ),
    Reliance(
        name="mecefo.register_grad_ready",
        target=f"{_BUFFER}.register_grad_ready",
        reason="parameters whose gradient autograd does not see are registered here",
        positional=("self", "param", "force_all_reduce"),
    ),
    *_reads(_BUFFER, "params", "weights of a bucket with low-rank gradients"),
    *_reads(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        "param_to_bucket_group force_all_reduce ddp_config",
        "where a parameter is registered",
    ),
    *_reads(_LAYER, "recompute_mlp recompute_pre_mlp_layernorm", "off while the FFN is recomputed"),
    *_reads(_LAYER, "input_layernorm self_attention mlp cross_attention", "parts of a layer"),
    *_reads(
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params",
        "float16_groups fp32_from_float16_groups is_stub_optimizer",
        "which fp32 copies stand for held parameters",
    ),
)

_GRADS = "megatron.core.distributed.finalize_model_grads"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"

# A process with two stages does for both what Megatron does for one (megatron_ft/adopt).
ADOPTION: tuple[Reliance, ...] = (
    Reliance(
        name="mecefo.tensor_parallel_grads",
        target=f"{_GRADS}:_allreduce_non_tensor_model_parallel_grads",
        reason="gradients of norms with sequence parallelism, stage by stage",
        positional=("model", "config", "tp_group"),
    ),
    Reliance(
        name="mecefo.embedding_grads",
        target=f"{_GRADS}:_allreduce_word_embedding_grads",
        reason="shared embeddings whose other end is another process's",
        positional=("model", "config", "embd_group", "pp_group"),
    ),
    Reliance(
        name="mecefo.shared_weight",
        target=f"{_GRADS}:_get_shared_word_embedding_weight",
        reason="shared embeddings of which both ends are this process's",
        positional=("model_module", "config"),
    ),
    Reliance(
        name="mecefo.default_groups",
        target="megatron.core.pipeline_parallel.schedules:_build_default_pg_collection",
        reason="the groups of the slot that is shown",
    ),
    Reliance(
        name="mecefo.count_zeros",
        target="megatron.core.optimizer.clip_grads:count_zeros_fp32",
        reason="zeros of both stages, contributed as one",
        positional=("parameters",),
        requires=("grad_stats_parallel_group", "tp_group", "expert_tp_group"),
    ),
    Reliance(
        name="mecefo.grad_norm",
        target="megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
        reason="the norm of one stage; replicas add them up by stage",
        positional=("grads_for_norm",),
        requires=("grad_stats_parallel_group",),
    ),
    Reliance(
        name="mecefo.num_samples",
        target="megatron.training.training:get_train_valid_test_num_samples",
        reason="the data of an adopted stage",
    ),
    *_reads(
        _DDP,
        "finish_grad_sync scale_gradients zero_grad_buffer start_grad_sync no_sync",
        "the reduction of the adopted stage's gradients",
    ),
)

RELIANCES = (*RELIANCES, *ADOPTION)
