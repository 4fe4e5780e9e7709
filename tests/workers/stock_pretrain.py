"""Megatron as it is: none of this package but the host that answers for the GPU.

Started by torchrun on gloo with Megatron's own flags, sampler, store and log: what training over
ulfm is held to. Batches and loss are written as Megatron's interfaces ask for them, apart from
``megatron_ft.llama``.
"""

# ruff: noqa: E402  the host answers for the GPU before Megatron is imported
from __future__ import annotations

import os
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"

from megatron_ft.patches import cpu_device, wheel
from megatron_ft.patches.registry import registry

registry.install(wheel.PATCHES)
registry.install(cpu_device.PATCHES)

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def provide(num_samples: list[int]) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


def forward(data_iterator: Any, model: torch.nn.Module) -> Any:
    batch = next(data_iterator) if data_iterator is not None else {}
    if mpu.get_tensor_model_parallel_world_size() > 1:
        objects = [batch]
        torch.distributed.broadcast_object_list(
            objects,
            src=mpu.get_tensor_model_parallel_src_rank(),
            group=mpu.get_tensor_model_parallel_group(),
        )
        batch = objects[0]
    tokens, positions = batch.get("tokens"), batch.get("position_ids")
    output = model(tokens, positions, None, labels=batch.get("labels"))

    def loss(output: torch.Tensor) -> Any:
        mask = batch["loss_mask"].view(-1)
        total = torch.sum(output.view(-1) * mask)
        count = mask.sum().to(torch.int)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    return output, loss


if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, provide, ModelType.encoder_or_decoder, forward)
