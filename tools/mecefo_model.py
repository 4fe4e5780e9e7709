"""Small stacks of Megatron's TransformerLayers in this process, to measure and test MeCeFO's."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import torch.distributed as dist

SEED = 1234


@contextlib.contextmanager
def megatron(rank: int = 0, world: int = 1, store: Path | None = None) -> Iterator[None]:
    """Megatron's groups over gloo, on the CPU, with the patches of MeCeFO; undone afterwards."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_ft.patches import cpu_device, mecefo
    from megatron_ft.patches.registry import registry

    patches = (*cpu_device.PATCHES, *mecefo.PATCHES)
    registry.install(patches)
    with tempfile.TemporaryDirectory() as folder:
        path = store or Path(folder) / "store"
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
        model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            registry.remove(patches)


def config(**options: Any) -> Any:
    """A LLaMA-like configuration, in double precision unless ``options`` say otherwise."""
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "transformer_impl": "local",
    }
    return TransformerConfig(**{**settings, **options})


def block(options: Any) -> Any:
    """A TransformerBlock of ``options.num_layers`` local layers, the same on every call."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    torch.manual_seed(SEED)
    submodules = get_gpt_layer_local_submodules(
        num_experts=options.num_moe_experts,
        qk_layernorm=options.qk_layernorm,
        normalization=options.normalization,
    )
    made = TransformerBlock(
        config=options,
        spec=ModuleSpec(module=TransformerLayer, submodules=submodules),
        pre_process=True,
        post_process=False,
    )
    return made.to(options.params_dtype)


def rotary(options: Any, sequence: int) -> torch.Tensor:
    """Rotary angles ``[sequence, 1, 1, head width]``."""
    width = options.kv_channels
    inverse = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(sequence).float(), inverse)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
