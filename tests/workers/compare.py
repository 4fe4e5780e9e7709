"""Bit-for-bit comparison of nested results, and the values that make sums exact."""

from __future__ import annotations

from typing import Any

import torch


def difference(left: Any, right: Any, at: str = "") -> str | None:
    """Where two results differ first; None if they are the same in type, shape and every bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _tensor_difference(left, right, at)
    if type(left) is not type(right):
        return f"{at}: {type(left).__name__} {left!r} is not {type(right).__name__} {right!r}"
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return f"{at}: {len(left)} items are not {len(right)}"
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            found = difference(a, b, f"{at}[{i}]")
            if found:
                return found
        return None
    return None if left == right else f"{at}: {left!r} is not {right!r}"


def _tensor_difference(left: torch.Tensor, right: torch.Tensor, at: str) -> str | None:
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{at}: {left.dtype}{tuple(left.shape)} is not {right.dtype}{tuple(right.shape)}"
    if left.dtype == torch.bool:
        # gloo stores the sum of true and true as a byte of 2.
        left, right = left.to(torch.uint8).clamp(max=1), right.to(torch.uint8).clamp(max=1)
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    if torch.equal(a, b):
        return None
    return f"{at}: {left.flatten()[:8].tolist()} is not {right.flatten()[:8].tolist()}"


def values(
    *shape: int, dtype: torch.dtype = torch.float32, rank: int, salt: int = 0
) -> torch.Tensor:
    """Small integers of either sign, the same wherever they are computed.

    Sums and products over a few ranks are exact in every element type, so that results must agree
    in every bit whatever the order of summation.
    """
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -3
    whole = torch.randint(low, 4, shape, generator=generator)
    if dtype.is_complex:
        imaginary = torch.randint(low, 4, shape, generator=generator)
        return torch.complex(whole.double(), imaginary.double()).to(dtype)
    return whole.to(dtype)
