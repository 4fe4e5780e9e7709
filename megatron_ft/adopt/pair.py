"""A process's own stage and the adopted one, as the step transaction needs them: as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ft.adopt import step
from megatron_ft.adopt.stage import AdoptedStage
from megatron_ft.adopt.step import Seat

if TYPE_CHECKING:
    from megatron_ft.session import Session


class Pair:
    """Two stages on one process.

    Args:
        session: This process's, with its own stage.
        adopted: The other one.
    """

    def __init__(self, session: Session, adopted: AdoptedStage) -> None:
        assert session.world is not None
        self.session = session
        self.adopted = adopted
        topology = session.world.topology
        (own,), (other,) = session.model, adopted.model
        self.seats = sorted(
            (
                Seat(topology.stage_of(session.world.slots[0]), own, contextlib.nullcontext),
                Seat(adopted.stage, other, adopted.view.shown),
            ),
            key=lambda seat: seat.stage,
        )
        """Both slots, by stage."""
        (seat,) = (seat for seat in self.seats if seat.stage == adopted.stage)
        is_last = adopted.stage == topology.pipeline - 1
        self.loss_group = seat.groups.dp_cp if is_last else None
        """Over which reports are summed, if the adopted stage computes the loss."""

    @property
    def optimizers(self) -> dict[int, Any]:
        """By stage."""
        adopted = self.adopted
        return {
            seat.stage: adopted.optimizer if seat.stage == adopted.stage else self._own
            for seat in self.seats
        }

    @property
    def _own(self) -> Any:
        return self.session.optimizer

    def follow_scales(self) -> None:
        """The adopted optimizer's loss scales are the own one's, where there are any."""
        step.follow_scales(self._own, self.adopted.optimizer)

    # -- passes ----------------------------------------------------------------------------------

    def begin(self, training: bool) -> None:
        """Do for the adopted stage what Megatron has done for the own one before its schedule."""
        for chunk in self.adopted.model:
            chunk.train(training)
            if training:
                chunk.zero_grad_buffer()
        if training:
            self.adopted.optimizer.zero_grad()

    def iterator(self, own: Any, forward_only: bool) -> Any:
        """The adopted stage's data of the kind that is read now; None if it reads none."""
        kind = self.session.kind_of_data(not forward_only) if own is None else own.kind
        return self.adopted.iterators.get(kind)

    @contextlib.contextmanager
    def both(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A call of the schedule, made one of an executor of both stages."""
        own = call["data_iterator"]
        inner = own[0] if isinstance(own, list) else own
        other = self.iterator(getattr(inner, "iterable", inner), call["forward_only"])
        of_stage = [other if seat.stage == self.adopted.stage else own for seat in self.seats]
        chunks = [seat.chunk for seat in self.seats]
        with step.hooks_of(chunks):
            yield call | {"model": chunks, "data_iterator": of_stage}

    def finalize(self, num_tokens: Any, force_all_reduce: bool) -> None:
        """Megatron's ``finalize_model_grads``, for both."""
        step.finalize(self.seats, num_tokens, force_all_reduce=force_all_reduce)

    # -- what an optimizer is asked --------------------------------------------------------------

    def prepare_grads(self) -> bool:
        """Whether gradients overflowed the loss scale, anywhere in the replica."""
        (chunk,) = self.session.model
        alone = self.session.transaction.alone
        return step.prepare_grads(self._own, self.adopted.optimizer, chunk, alone)

    def count_zeros(self) -> Any:
        """Zeros among the gradients of the replica."""
        return step.count_zeros(self._own, self.adopted.optimizer)

    def _compute_grad_norms_by_group(self) -> None:
        self._own._compute_grad_norms_by_group()
        # Megatron asks all stages once which of them have such groups; the answer is that of both.
        self.adopted.optimizer._has_grad_norm_group_cache = dict(
            self._own._has_grad_norm_group_cache
        )

    def step(self) -> None:
        """Do for the adopted stage what Megatron does for the own one after a commit."""
        done, _, _ = self.adopted.optimizer.step()
        if done:
            self.adopted.scheduler.step(increment=self.session.args.global_batch_size)
