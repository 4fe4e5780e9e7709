"""CheckFree: the learning rate of rebuilt layers, twins kept equal, and what checkpoints hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .registry import Patch, Reliance


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> Any:
        rate = getattr(self, "ft_layer_rate", None)
        if rate is None or self.is_stub_optimizer:
            return original(self)
        with rate.apart(self.optimizer):
            return original(self)

    return step_with_ready_grads


def _embedding_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _allreduce_word_embedding_grads(model: Any, *args: Any, **kwargs: Any) -> None:
        from megatron_ft.checkfree import twins

        original(model, *args, **kwargs)
        twins.reduce_grads(model)

    return _allreduce_word_embedding_grads


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_state_dict(
        args: Any, model: Any, optimizer: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        from megatron_ft.checkfree import twin_state

        state = original(args, model, optimizer, *rest, **kwargs)
        # Without CheckFree+ what is marked like a twin is the other end of tied embeddings.
        if args.ft_checkfree_plus and args.ckpt_format == "torch" and "optimizer" in state:
            state["optimizer"] = twin_state.without_twins(optimizer, state["optimizer"])
        return state

    return generate_state_dict


def _load_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        from megatron.training import get_args

        from megatron_ft.checkfree import twin_state

        if get_args().ft_checkfree_plus and not self.is_stub_optimizer:
            state_dict = twin_state.with_twins(self, state_dict)
        return original(self, state_dict)

    return load_state_dict


def _check_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_ft.checkfree import lr_scale

        original(checkpoint_args, *args, **kwargs)
        lr_scale.remember(get_args(), checkpoint_args)

    return check_checkpoint_args


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(ddp_model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_ft.checkfree import twin_state

        result = original(ddp_model, optimizer, *args, **kwargs)
        twin_state.restore(ddp_model, optimizer)
        return result

    return load_checkpoint


_OPTIMIZER = "megatron.core.optimizer.optimizer"
_CHECKPOINT = "megatron.training.checkpointing"

PATCHES: tuple[Patch, ...] = (
    *(
        Patch(
            name=f"checkfree.step.{owner}",
            target=f"{_OPTIMIZER}:{owner}.step_with_ready_grads",
            reason="the scheduler writes the learning rate of whole groups, which checkpoints "
            "identify by it; only the layers of a rebuilt stage have another one",
            kind="wrap",
            make=_step,
            requires=("self",),
        )
        for owner in ("FP32Optimizer", "MixedPrecisionOptimizer")
    ),
    Patch(
        name="checkfree.twin_grads",
        target="megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
        reason="twins get their gradients summed where tied embeddings do, between the reduction "
        "over replicas and the division by the number of tokens",
        kind="wrap",
        make=_embedding_grads,
        requires=("model",),
    ),
    Patch(
        name="checkfree.save",
        target=f"{_CHECKPOINT}:generate_state_dict",
        reason="files of the torch format have no twins in them",
        kind="wrap",
        make=_generate,
        requires=("args", "model", "optimizer"),
    ),
    *(
        Patch(
            name=f"checkfree.load.{owner}",
            target=f"{_OPTIMIZER}:{owner}.load_state_dict",
            reason="a file of the torch format has no twins in it",
            kind="wrap",
            make=_load_optimizer,
            requires=("self", "state_dict"),
        )
        for owner in ("FP32Optimizer", "Float16OptimizerWithFloat16Params")
    ),
    Patch(
        name="checkfree.remember",
        target=f"{_CHECKPOINT}:check_checkpoint_args",
        reason="the only place that sees the args of a checkpoint, which say what was rebuilt when",
        kind="wrap",
        make=_check_args,
        requires=("checkpoint_args",),
    ),
    Patch(
        name="checkfree.restore",
        target="megatron.training.training:load_checkpoint",
        reason="twins are taken from the originals once everything is loaded",
        kind="wrap",
        make=_load,
        requires=("ddp_model", "optimizer"),
    ),
)

_GPT = "megatron.core.models.gpt.gpt_model:GPTModel"
_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"
_BUILDER = "megatron.training.models.gpt:GPTModelBuilder"


def _reads(owner: str, names: str, reason: str) -> tuple[Reliance, ...]:
    short = owner.partition(":")[2]
    return tuple(
        Reliance(name=f"checkfree.{short}.{name}", target=f"{owner}.{name}", reason=reason)
        for name in names.split()
    )


RELIANCES: tuple[Reliance, ...] = (
    Reliance(
        name="checkfree.filter_grads",
        target=f"{_OPTIMIZER}:MegatronOptimizer._filter_grads_for_norm",
        reason="which gradients count in a stage's norm",
        positional=("self", "params"),
        requires=("param_filter",),
    ),
    Reliance(
        name="checkfree.model_config",
        target="megatron.training.argument_utils:gpt_config_from_args",
        reason="the model with twins has a builder of its own",
        requires=("model_config_cls",),
    ),
    Reliance(
        name="checkfree.embedding",
        target="megatron.core.models.common.embeddings.language_model_embedding:"
        "LanguageModelEmbedding.__init__",
        reason="the twin of the embedding",
        requires=(
            *("config", "vocab_size", "max_sequence_length", "position_embedding_type"),
            *("scatter_to_sequence_parallel", "tp_group"),
        ),
    ),
    Reliance(
        name="checkfree.output_layer",
        target="megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__",
        reason="the twin of the output layer",
        positional=("self", "input_size", "output_size"),
        requires=("config", "init_method", "bias", "skip_bias_add", "gather_output", "tp_group"),
    ),
    Reliance(
        name="checkfree.wrapper",
        target="megatron.core.transformer.module:Float16Module.forward",
        reason="activations between stages stay in half precision",
        requires=("fp32_output",),
    ),
    Reliance(
        name="checkfree.load_optimizer",
        target=f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params.fp32_from_float16_groups",
        reason="fp32 copies of twins are not in a file of the torch format",
    ),
    *_reads(_GPT, "setup_embeddings_and_output_layer", "marks twins as it marks the originals"),
    *_reads(
        _GPT,
        "pre_process post_process decoder embedding output_layer vocab_size max_sequence_length "
        "position_embedding_type parallel_output",
        "a microbatch begins or ends its route here, or does not",
    ),
    *_reads(_BLOCK, "pre_process post_process final_layernorm submodules layers", "likewise"),
    *_reads(_BUILDER, "build_model build_distributed_models", "what twins are added to"),
)
