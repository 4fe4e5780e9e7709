"""What an operation has started and not ended: MPI requests, and what follows their arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from mpi4py import MPI


class Pending:
    """Requests in flight and what is to be done when they have arrived.

    Holds every host buffer that MPI still reads or writes.
    """

    __slots__ = ("error", "finish", "held", "requests", "source")

    def __init__(
        self,
        requests: list[MPI.Request],
        finish: Callable[[], None],
        held: Sequence[torch.Tensor] = (),
        error: MPI.Exception | None = None,
    ) -> None:
        self.requests = requests
        self.finish = finish
        self.held = held
        self.error = error
        """Why the operation could not be started as a whole: these requests go nowhere."""
        self.source: int | None = None
        """Rank in the communicator of the sender of the last message."""

    def release(self) -> None:
        """Let go of buffers and tensors once nothing is in flight."""
        self.requests = []
        self.finish = nothing
        self.held = ()


def nothing() -> None:
    """What is to be done after an operation that leaves nothing to do."""


def settle(
    requests: Iterable[MPI.Request | None],
    finish: Callable[[], None],
    held: Sequence[torch.Tensor] = (),
) -> Pending | None:
    """What a body returns: ``finish`` done now if nothing is in flight (blocking calls).

    Args:
        requests: Makes one MPI call for each item, when asked for it: if a call fails while earlier
            ones are in flight, these and their buffers must not be lost.
    """
    flying = []
    try:
        for request in requests:
            if request is not None:
                flying.append(request)
    except MPI.Exception as error:
        if not flying:
            raise
        return Pending(flying, finish, held, error)
    if flying:
        return Pending(flying, finish, held)
    finish()
    return None


def merge(parts: Iterable[Pending | None]) -> Pending | None:
    """One ``Pending`` for several operations; their ``finish`` run in order.

    Args:
        parts: Starts one operation for each item, when asked for it.
    """
    flying: list[Pending] = []
    error = None
    try:
        for part in parts:
            if part is not None:
                flying.append(part)
                if part.error is not None:
                    error = part.error
                    break
    except MPI.Exception as caught:
        if not flying:
            raise
        error = caught
    if not flying:
        return None

    def finish() -> None:
        for part in flying:
            part.finish()

    requests = [request for part in flying for request in part.requests]
    return Pending(requests, finish, [tensor for part in flying for tensor in part.held], error)
