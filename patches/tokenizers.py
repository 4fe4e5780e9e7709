"""Megatron's tokenizers without Hugging Face's transformers, where the job needs none of them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from .registry import Patch, Reliance

LIBRARY = "transformers"
MODULE = "megatron.core.tokenizers.text.libraries"
WITHOUT_LIBRARY = frozenset(
    {
        "NullTokenizer",
        "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer",
        "Llama2Tokenizer",
        "TikTokenizer",
    }
)
"""What ``--tokenizer-type`` may be for it; for others Megatron is imported as it is."""


def import_tokenizers(tokenizer_type: str) -> None:
    """Import Megatron's text tokenizers, without ``transformers`` where it is of no use.

    Megatron imports it for every tokenizer, which is a fifth of all that a process imports before
    it can take a slot. It is hidden only while Megatron looks for it; whoever else asks for it gets
    it.
    """
    if tokenizer_type not in WITHOUT_LIBRARY or LIBRARY in sys.modules:
        importlib.import_module(MODULE)
        return
    sys.modules[LIBRARY] = None  # type: ignore[assignment]  # so an import says it is missing
    try:
        importlib.import_module(MODULE)
    finally:
        del sys.modules[LIBRARY]


def _import_less(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_tokenizer(args: Any, **kwargs: Any) -> Any:
        import_tokenizers(args.tokenizer_type)
        return original(args, **kwargs)

    return build_tokenizer


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="tokenizers.build_tokenizer",
        target="megatron.training.global_vars:build_tokenizer",
        reason="imports transformers whatever the tokenizer, and replacements are waited for",
        kind="wrap",
        requires=("args",),
        make=_import_less,
    ),
)

RELIANCES: tuple[Reliance, ...] = (
    Reliance(
        name="calls.HAVE_TRANSFORMERS",
        target=f"{MODULE}.huggingface_tokenizer:HAVE_TRANSFORMERS",
        reason="Megatron does without transformers where it is not installed",
    ),
)
