"""One backend's groups, and the registers of what must hold on them.

A case returns what it computed; gloo and ulfm must return the same. Where gloo cannot do it, or
does it wrongly (it reduces the bytes under a strided view), the case returns what it got and what
that must be, and runs on ulfm alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from compare import values

GLOO_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]
MORE_DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.uint64]
COPY_DTYPES = [
    *GLOO_DTYPES,
    *MORE_DTYPES,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


@dataclass
class Side:
    """One backend's groups; the same for each case."""

    name: str
    rank: int
    size: int
    world: dist.ProcessGroup
    world_again: dist.ProcessGroup
    pair: Any
    """Ranks 1 and 3; not a group for the others."""
    turned: Any
    """Ranks 3, 0, 2 in this order."""
    solo: dist.ProcessGroup
    """This rank alone."""

    def values(self, *shape: int, **kwargs: Any) -> torch.Tensor:
        return values(*shape, rank=kwargs.pop("rank", self.rank), **kwargs)

    def strided(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values with gaps between them; contiguous for gloo, which gets those wrong."""
        if self.name == "gloo":
            return tensor.clone()
        wide = torch.full((*tensor.shape, 3), 7, dtype=tensor.dtype)
        wide[..., 1] = tensor
        return wide[..., 1]


Case = Callable[[Side], Any]
BOTH: dict[str, Case] = {}
ULFM_ONLY: dict[str, Case] = {}


def both(function: Case) -> Case:
    BOTH[function.__name__] = function
    return function


def ulfm_only(function: Case) -> Case:
    """The case returns (got, expected)."""
    ULFM_ONLY[function.__name__] = function
    return function


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        kind = RuntimeError if isinstance(error, RuntimeError) else type(error)
        return kind.__name__
    return None
