"""What the released wheel of Megatron lacks, with or without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .registry import Patch


def _nothing_to_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        import megatron.core.datasets.helpers_cpp  # noqa: F401  the wheel has it compiled

    return compile_helpers


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="wheel.compile_helpers",
        target="megatron.core.datasets.utils:compile_helpers",
        reason="runs make, but the wheel has no Makefile and holds the compiled helper already",
        kind="replace",
        make=_nothing_to_compile,
    ),
)
