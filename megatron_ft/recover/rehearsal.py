"""The optimizer in an attempt: its collectives are run before the vote, its loss scalers set back.

A commit is local arithmetic then: whoever dies after the vote cannot leave some stages of a replica
at the next step and others not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ft.transaction import StepTransaction


def rehearse(transaction: StepTransaction) -> None:
    """Run the collectives of ``optimizer.step`` now, so that none is left after the vote."""
    # Of two stages the optimizers are asked as one.
    own = transaction.optimizer
    if not transaction.asked_in_this_epoch:
        # Megatron asks the other stages in its first step only, and who comes together after a
        # failure may or may not have had one.
        for single in (own, *own.chained_optimizers):
            single._has_grad_norm_group_cache = None
    optimizer: Any = own if transaction.pair is None else transaction.pair
    found_inf = optimizer.prepare_grads()
    rehearsed: dict[str, Any] = {"prepare_grads": found_inf}
    if not found_inf:
        if transaction.world.assignment.adopted:
            from megatron_ft.adopt.step import grad_norm

            rehearsed["get_grad_norm"] = grad_norm(transaction)
        else:
            rehearsed["get_grad_norm"] = optimizer.get_grad_norm()
        if own.config.log_num_zeros_in_grad:
            rehearsed["count_zeros"] = optimizer.count_zeros()
        optimizer._compute_grad_norms_by_group()
    measure = transaction.measure
    transaction.measured = measure() if measure is not None and not found_inf else None
    transaction.rehearsed = rehearsed


class LossScalers:
    """The loss scalers of an optimizer as they are now: the rehearsal of an attempt moves them on.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
    """

    def __init__(self, optimizer: Any) -> None:
        scalers = [getattr(o, "grad_scaler", None) for o in optimizer.chained_optimizers]
        self._before = [(s, s.state_dict()) for s in scalers if s is not None]

    def restore(self) -> None:
        """Set them back."""
        for scaler, state in self._before:
            scaler.load_state_dict(state)
