"""The stage that a process runs beside its own: model chunk, optimizer, schedule of rates, data.

It is built by Megatron's own set-up, which is called a second time with the adopted slot's groups,
none of which talks to anybody meanwhile. Its state then comes from another replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from mpi4py import MPI

from megatron_ft.adopt.view import SlotView
from megatron_ft.checkfree import lr_scale
from megatron_ft.rejoin import transfer
from megatron_ft.rejoin.transfer import Moved

if TYPE_CHECKING:
    from megatron_ft.session import Session


class AdoptedStage:
    """A stage beside one's own.

    Args:
        session: This process's; it has built its own stage.
        view: Megatron's globals as the adopted slot sees them.
    """

    def __init__(self, session: Session, view: SlotView) -> None:
        assert session.world is not None
        self.slot = view.slot
        self.shard = session.world.topology.shard_of(view.slot)
        self.stage = session.world.topology.stage_of(view.slot)
        self.view = view
        self.session = session
        self.holds_state = False
        """Whether its state has come."""
        self.uncounted = 0
        """CheckFree: optimizer steps that the Adam of its layers does not count."""
        with _undisturbed(session.args), view.alone(session.world):
            session.args.load = session.args.pretrained_checkpoint = None
            groups = ProcessGroupCollection.use_mpu_process_groups()
            self.model, self.optimizer, self.scheduler = session.build_again(pg_collection=groups)
            self.iterators = _iterators()
        # Its own timers would meet with nobody.
        for single in (self.optimizer, *self.optimizer.chained_optimizers):
            if getattr(single, "config", None) is not None:
                single.config.timers = None
        self._generators = _generators()
        if session.early.checkfree.enabled:
            lr_scale.follow(
                *(session, session.early.checkfree, self.stage, self.optimizer, self.model),
                lambda: self.uncounted,
            )

    @property
    def bucket_groups(self) -> list[Any]:
        return [group for chunk in self.model for group in chunk.bucket_groups]

    def receive(self, comm: MPI.Intracomm, rank: int) -> Moved:
        """Take the state from ``rank`` of ``comm``; see ``transfer.receive``."""
        with self.face() as face:
            moved = transfer.receive(face, comm, rank)
            self._hear(face)
        return moved

    def take(self, other: AdoptedStage) -> None:
        """Take the state from another one of this process, of the same shard."""
        assert other.holds_state and other.shard == self.shard
        with other.face() as theirs:
            state = transfer.state_of(theirs)
        with self.face() as face:
            transfer.take(face, state)
            self._hear(face)

    def _hear(self, face: Any) -> None:
        session = self.session
        session.grad_squares = session.grad_squares | face.grad_squares
        self.uncounted = lr_scale.hear(session.args, face.args, self.stage)
        self.holds_state = True

    def send(self, comm: MPI.Intracomm, rank: int) -> Moved:
        """Give the state to ``rank`` of ``comm``; see ``transfer.send``."""
        with self.face() as face:
            return transfer.send(face, comm, rank)

    @contextlib.contextmanager
    def face(self) -> Iterator[Any]:
        """What a transfer takes for the session: this stage, with the counters of all."""
        session = self.session
        own = _generators()
        _set_generators(self._generators)
        args = SimpleNamespace(**vars(session.args))
        lr_scale.tell(args, self.stage, self.uncounted)
        try:
            yield SimpleNamespace(
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                args=args,
                transaction=SimpleNamespace(eval_starts=dict(session.transaction.eval_starts)),
                committed=session.committed,
                evaluations=session.evaluations,
                evaluates_from=session.evaluates_from,
                saved=session.saved,
                grad_squares=dict(session.grad_squares),
                mecefo=session.mecefo,
            )
            self._generators = _generators()
        finally:
            _set_generators(own)


@contextlib.contextmanager
def _undisturbed(args: Any) -> Iterator[None]:
    """Megatron's set-up writes to its flags and draws random numbers: both as before afterwards."""
    before, generators = dict(vars(args)), _generators()
    try:
        yield
    finally:
        vars(args).clear()
        vars(args).update(before)
        _set_generators(generators)


def _iterators() -> dict[str, Any]:
    """The shown slot's data, by kind; nothing for a stage that reads none."""
    from megatron.training.training import get_train_valid_test_num_samples

    from megatron_ft import llama

    if not llama.reads_data():
        return {}
    found = llama.datasets_provider(get_train_valid_test_num_samples())
    return {iterator.kind: iterator for iterator in found if iterator is not None}


def _generators() -> tuple[Any, ...]:
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), device, dict(get_cuda_rng_tracker().get_states())


def _set_generators(state: tuple[Any, ...]) -> None:
    host, device, tracker = state
    torch.set_rng_state(host)
    if device is not None:
        torch.cuda.set_rng_state(device)
    get_cuda_rng_tracker().set_states(dict(tracker))
