"""What the budgets count, read from Megatron's configuration; the same on all processes."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_ft.mecefo.budget import LayerShape, layer_activations, layer_cost
from megatron_ft.mecefo.choices import Choices
from megatron_ft.mecefo.options import MecefoOptions


def choices_of(options: MecefoOptions, args: Any, config: Any, num_stages: int) -> Choices:
    """The choices for a model.

    Args:
        args: Megatron's.
        config: The model's TransformerConfig.
        num_stages: Of the pipeline.
    """
    return Choices(
        options,
        layer_numbers(config, num_stages),
        layer_cost(layer_shape(config, args.seq_length), options),
        layer_activations(
            layer_shape(config, args.seq_length, shards=config.tensor_model_parallel_size),
            options,
            # Transformer Engine chooses a fused attention wherever there is one.
            flash=args.transformer_impl == "transformer_engine" or args.use_flash_attn,
            fused_activation=config.bias_activation_fusion,
            dropout=config.attention_dropout > 0,
        ),
        microbatches=args.global_batch_size // args.micro_batch_size // args.data_parallel_size,
    )


def layer_numbers(config: Any, num_stages: int) -> list[range]:
    """The numbers of each stage's layers, from 1 as Megatron counts them."""
    stages: list[range] = []
    first = 1
    for stage in range(num_stages):
        count = get_num_layers_to_build(config, pp_rank=stage)
        stages.append(range(first, first + count))
        first += count
    return stages


def layer_shape(config: Any, sequence: int, *, shards: int = 1) -> LayerShape:
    """A layer, or one of so many tensor-parallel shards of it."""
    return LayerShape(
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size // shards,
        gated=config.gated_linear_unit,
        num_heads=config.num_attention_heads // shards,
        num_query_groups=max(1, config.num_query_groups // shards),
        head_width=config.kv_channels,
        sequence=sequence,
    )
