"""The first r right singular vectors of a weight (arXiv 2510.16415, technique III)."""

from __future__ import annotations

import torch

EXACT_UP_TO = 512
"""Widths up to which all singular vectors are computed; above, a randomized method finds r."""
OVERSAMPLE = 8
POWER_ITERATIONS = 4
"""Of the randomized method (Halko, Martinsson, Tropp 2011, algorithm 4.4)."""
_SEED = 20510


@torch.no_grad()
def right_singular_vectors(
    weight: torch.Tensor,
    rank: int,
    *,
    exact_up_to: int = EXACT_UP_TO,
    power_iterations: int = POWER_ITERATIONS,
) -> torch.Tensor:
    """An orthonormal basis of what the first ``rank`` right singular vectors span.

    Only the span matters for the gradient: it is used as V1 V1^T. The answer depends on the
    arguments and nothing else, so it is the same whenever it is computed.

    Args:
        weight: ``[m, n]``, any floating dtype; one tensor-parallel shard.
        rank: r; n is taken if that is less.
        exact_up_to: Largest n for which the Gram matrix is diagonalized.
        power_iterations: Of the randomized method used above that.

    Returns:
        V1, ``[n, min(rank, n)]``, in the dtype of ``weight``.
    """
    width = weight.shape[1]
    if rank >= width:  # all of the space: nothing to look for, and the gradient is exact
        return torch.eye(width, dtype=weight.dtype, device=weight.device)
    matrix = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if width <= exact_up_to:
        found = _largest(matrix.t() @ matrix, rank)
    else:
        found = _randomized(matrix, rank, power_iterations)
    return found.to(weight.dtype).contiguous()


def _largest(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Eigenvectors of the largest eigenvalues of a symmetric matrix."""
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)


def _randomized(matrix: torch.Tensor, rank: int, power_iterations: int) -> torch.Tensor:
    width = matrix.shape[1]
    generator = torch.Generator().manual_seed(_SEED)
    start = torch.randn(width, min(rank + OVERSAMPLE, width), generator=generator)
    basis = start.to(matrix)
    for _ in range(power_iterations + 1):
        basis = torch.linalg.qr(matrix.t() @ (matrix @ basis)).Q
    image = matrix @ basis
    return basis @ _largest(image.t() @ image, rank)
