"""How torch's element types and reductions become MPI's.

Copies move elements of the same width, whatever they mean. Reductions of half and bfloat16, which
MPI cannot add, are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

MAX_COUNT = 2**31 - 1
"""Elements in one MPI call: counts are C ints before MPI 4."""

_BY_WIDTH = {
    1: MPI.BYTE,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}

_NUMBERS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}

_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PREMUL_SUM: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}

# A bool is false or true, never 2: what gloo's byte arithmetic means, without its bytes.
_BOOL_OPS = {
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.BOR: MPI.LOR,
    ReduceOp.PRODUCT: MPI.LAND,
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.BAND: MPI.LAND,
    ReduceOp.BXOR: MPI.LXOR,
}

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_LINEAR = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction of one element type."""

    op: MPI.Op
    wire: MPI.Datatype
    compute: torch.dtype
    """Element type in which MPI reduces."""
    average: bool = False
    """Divide by the number of slots afterwards."""
    factor: float | torch.Tensor | None = None
    """Multiply by it before."""


_cache: dict[tuple[int, torch.dtype], Reduction] = {}


def copy_type(tensor: torch.Tensor) -> MPI.Datatype:
    """The MPI type that moves elements of ``tensor``'s width."""
    return _BY_WIDTH[tensor.element_size()]


def reduction(op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    """How to reduce elements of ``dtype`` by ``op``.

    Raises:
        RuntimeError: ``op`` is not defined for ``dtype``, in the words of torch's gloo backend.
    """
    # torch makes isinstance say that every RedOpType is a ReduceOp.
    given: Any = op
    kind: ReduceOp.RedOpType = getattr(given, "op", given)
    key = (kind.value, dtype)
    found = _cache.get(key)
    if found is None:
        found = _cache[key] = _plan(kind, dtype)
    if kind == ReduceOp.PREMUL_SUM:
        if kind is given:
            raise RuntimeError("ReduceOp.PREMUL_SUM without a factor")
        return Reduction(found.op, found.wire, found.compute, factor=given.factor)
    return found


def _plan(kind: ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    if kind not in _OPS:
        raise RuntimeError(f"Unsupported reduce operation {kind}")
    if dtype.is_complex and kind not in _LINEAR:
        raise RuntimeError(f"Cannot use ReduceOp.{kind.name} with complex dtype {dtype}")
    if dtype == torch.bool and kind in _BOOL_OPS:
        return Reduction(_BOOL_OPS[kind], MPI.C_BOOL, dtype)
    floating = dtype.is_floating_point or dtype.is_complex
    if kind in _BITWISE and floating:
        raise RuntimeError(f"Cannot use ReduceOp.{kind.name} with non-integral dtype")
    if kind in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) and not floating:
        raise RuntimeError(f"Cannot use ReduceOp.{kind.name} with integral dtype {dtype}")
    compute = torch.float32 if dtype in _HALF else dtype.to_real()
    if compute not in _NUMBERS:
        raise RuntimeError(f"Invalid scalar type {dtype}")
    return Reduction(_OPS[kind], _NUMBERS[compute], compute, average=kind == ReduceOp.AVG)
