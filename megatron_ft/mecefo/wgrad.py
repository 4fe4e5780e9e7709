"""The low-rank weight gradient of one product, gathered over the microbatches of a step.

For y = W x with W ``[m, n]`` and V1 ``[n, r]``: G_W = sum G_y^T x ~ (sum G_y^T (x V1)) V1^T. The
bracket is the factor, ``[m, r]``; V1^T is multiplied once per step.
"""

from __future__ import annotations

import torch


class LowRankWgrad:
    """Factor and basis of one weight shard.

    Args:
        weight: ``[m, n]``; the gradient goes to its ``main_grad`` where it has one, else to
            ``grad``.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.weight = weight
        self.basis: torch.Tensor | None = None
        """V1, ``[n, r]``, in the weight's dtype."""
        self._factor: torch.Tensor | None = None
        self.pending = False
        """Whether the factor holds something that is not in the gradient yet."""

    def set_basis(self, basis: torch.Tensor) -> None:
        """Use another V1 from now on; between steps only."""
        assert not self.pending, "the factor of this step belongs to the old singular vectors"
        self.basis = basis
        self._factor = None

    def accumulate(self, grad_output: torch.Tensor, projected: torch.Tensor) -> None:
        """Add one microbatch: G_y ``[tokens, m]`` and x V1 ``[tokens, r]``."""
        if self._factor is None:
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            shape = (self.weight.shape[0], projected.shape[1])
            self._factor = torch.empty(shape, dtype=dtype, device=grad_output.device)
        if not self.pending:
            self._factor.zero_()
        if projected.dtype == self._factor.dtype:
            self._factor.addmm_(grad_output.t(), projected)
        else:
            self._factor.add_(grad_output.t() @ projected)
        self.pending = True

    @torch.no_grad()
    def flush(self) -> None:
        """Add factor times V1^T to the gradient; the factor is empty afterwards."""
        if not self.pending:
            return
        assert self._factor is not None and self.basis is not None
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is None:
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            main_grad = self.weight.grad
        basis = self.basis.to(self._factor.dtype)
        if main_grad.dtype == self._factor.dtype:
            main_grad.addmm_(self._factor, basis.t())
        else:
            main_grad.add_(self._factor @ basis.t())
        self.pending = False

    def discard(self) -> None:
        """Forget what is in the factor: the step's microbatches are computed again elsewhere."""
        self.pending = False

    def release(self) -> None:
        """Free factor and basis."""
        assert not self.pending, "gradients of a step would be lost: flush() or discard() first"
        self.basis = self._factor = None

    @property
    def factor_bytes(self) -> int:
        return 0 if self._factor is None else self._factor.nbytes

    @property
    def basis_bytes(self) -> int:
        return 0 if self.basis is None else self.basis.nbytes
