"""The ``--ft-*`` flags, LLaMA's defaults, and what a machine without a GPU needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.enums import AttnBackend

LLAMA_DEFAULTS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "create_attention_mask_in_dataloader": False,
    "dataloader_type": "external",
    "tokenizer_type": "NullTokenizer",
}

CPU_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "use_cpu_initialization": True,
    "use_gloo_process_groups": False,
}


class FtArgumentError(ValueError):
    """Flags that cannot work together; the message says what to do."""


def add_ft_arguments(
    parser: argparse.ArgumentParser, *, has_gpu: bool, default_backend: str
) -> argparse.ArgumentParser:
    """Register ``--ft-*`` beside Megatron's flags and set the defaults of this product.

    Args:
        parser: Megatron's parser, all of its flags in it.
        has_gpu: Whether the flags of a machine without a GPU stay out.
        default_backend: What ``--distributed-backend`` is if the user does not say.
    """
    group = parser.add_argument_group("megatron_ft", "training that goes on when processes die")
    group.add_argument(
        "--ft-run-dir",
        metavar="DIR",
        help="where events.jsonl, summary.json and wandb files go; default runs/<timestamp>",
    )
    _allow_ulfm(parser, default_backend)
    _set_defaults(parser, LLAMA_DEFAULTS)
    if not has_gpu:
        _set_defaults(parser, CPU_DEFAULTS | {"attention_backend": AttnBackend.unfused})
    return parser


def provider(*, has_gpu: bool, default_backend: str) -> Callable[..., argparse.ArgumentParser]:
    """``extra_args_provider`` for Megatron's ``parse_and_validate_args``."""

    def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_ft_arguments(parser, has_gpu=has_gpu, default_backend=default_backend)

    return extra_args_provider


def _allow_ulfm(parser: argparse.ArgumentParser, default_backend: str) -> None:
    action = parser._option_string_actions["--distributed-backend"]
    action.choices = [*(action.choices or ()), "ulfm"]
    action.default = default_backend


def _set_defaults(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    known = {action.dest for action in parser._actions}
    missing = sorted(set(defaults) - known)
    assert not missing, f"Megatron has no flags {missing}: the defaults need a look"
    parser.set_defaults(**defaults)
