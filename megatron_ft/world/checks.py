"""Refusals of wrong arguments, before any message is sent: as torch's gloo backend refuses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ft.world.link import Link


def single(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The only tensor of a list that torch passes for historical reasons.

    Raises:
        RuntimeError: There are several or none, or it is sparse.
    """
    if len(tensors) != 1:
        raise RuntimeError(f"{op}: takes one tensor per process, got {len(tensors)}")
    tensor = tensors[0]
    if tensor.layout is not torch.strided:
        raise RuntimeError(f"{op}: unsupported layout {tensor.layout}")
    return tensor


def root(op: str, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise RuntimeError(f"{op}: invalid root rank: {rank} (the group has {size})")


def same_dtype(op: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
    for i, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or tensor.layout is not like.layout:
            raise RuntimeError(
                f"{op}: invalid tensor type at index {i} (expected {like.dtype}, got "
                f"{tensor.dtype})"
            )


def length(op: str, what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    if len(tensors) != size:
        raise RuntimeError(
            f"{op}: invalid {what} list (expected length {size}, got {len(tensors)})"
        )


def same_sizes(op: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
    for i, tensor in enumerate(tensors):
        if tensor.shape != like.shape:
            raise RuntimeError(
                f"{op}: invalid tensor size at index {i} (expected {tuple(like.shape)}, got "
                f"{tuple(tensor.shape)})"
            )


def numel(op: str, tensor: torch.Tensor, expected: int) -> None:
    if tensor.numel() != expected:
        raise RuntimeError(
            f"{op}: invalid tensor size (expected {expected} elements, got {tensor.numel()})"
        )


def splits(op: str, sizes: Sequence[int], tensor: torch.Tensor, num_parts: int) -> list[int]:
    """How many elements of ``tensor`` go to or come from each group rank.

    Args:
        sizes: Rows of dimension 0 for each group rank; empty for equal parts.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % num_parts:
            raise RuntimeError(f"{op}: tensor's dim 0 does not divide equally across group size")
        sizes = [rows // num_parts] * num_parts
    if len(sizes) != num_parts:
        raise RuntimeError(f"{op}: number of tensor splits not equal to group size")
    if sum(sizes) != rows:
        raise RuntimeError(f"{op}: split sizes doesn't match total dim 0 size")
    row = tensor.numel() // rows if rows else 0
    return [size * row for size in sizes]


def full(op: str, link: Link) -> None:
    """Refuse an operation in which every slot has a part of its own.

    Raises:
        NotImplementedError: A slot is vacant, or shares its process with another.
    """
    if not link.full:
        raise NotImplementedError(
            f"{op}: needs a process for every slot, but of {link.slots} only {link.live} are "
            f"served, by {link.num_processes} processes: the others' parts would be nowhere"
        )
