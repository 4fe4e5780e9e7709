"""From the command line to a finished run."""

from __future__ import annotations

import os
import sys
import time
import warnings


def prepare_environment() -> bool:
    """Set what must stand before torch is imported; returns whether a GPU is present."""
    has_gpu = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    if not has_gpu:
        # Megatron's jit_fuser is torch.compile, and dynamo asks for a CUDA driver.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return has_gpu


def main(program_start: float | None = None) -> int:
    """Parse, install, and pretrain; the exit code is that of docs/run_directory.md."""
    has_gpu = prepare_environment()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")

    import torch

    has_gpu = has_gpu and torch.cuda.is_available()
    from megatron_ft.patches import cpu_device
    from megatron_ft.patches.registry import registry

    if not has_gpu:
        registry.install(cpu_device.PATCHES)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_ft import arguments, llama

    set_startup_timestamps(program_start=program_start, main_entry=time.time())
    args = parse_and_validate_args(
        extra_args_provider=arguments.provider(has_gpu=has_gpu, default_backend="gloo"),
    )
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, llama.datasets_provider, ModelType.encoder_or_decoder, llama.forward_step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
