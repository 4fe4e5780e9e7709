"""What an operation returns: torch's ``Work``, done already or with MPI requests in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.distributed.distributed_c10d import Work

from megatron_ft.world import completion, patience, staging
from megatron_ft.world.errors import WorldBroken, translate
from megatron_ft.world.pending import Pending

if TYPE_CHECKING:
    from megatron_ft.world.group import UlfmProcessGroup

_NO_TIMEOUT = timedelta(0)


class DoneWork(Work):
    """An operation that is over.

    Args:
        results: What its future holds.
    """

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(self._results))
        return future


class PendingWork(Work):
    """An operation whose requests are in flight; its group tracks it until they are not.

    MPI moves the data of large messages only while some thread of the process is inside MPI: in
    ``wait``, in any other operation, or in the completion thread after ``get_future``.
    """

    def __init__(
        self,
        group: UlfmProcessGroup,
        op: str,
        pending: Pending,
        results: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self._group = group
        self._op = op
        self._comm = group.link.comm
        self._pending = pending
        self._results = results
        self._error: Exception | None = None
        if pending.error is not None:
            self._error = self._translated(pending.error)
        self._landed: list[torch.cuda.Event] = []
        self._done = False
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the operation.

        Raises:
            WorldBroken: A process of the group failed.
            RuntimeError: MPI refused the operation, or ``timeout`` (if not zero) has passed.
        """
        with self._lock:
            if not self._done:
                watch = self._group.policy.watch
                watch.begin_wait()
                try:
                    self._wait(timeout)
                finally:
                    watch.end_wait()
        if self._error is not None:
            raise self._error
        # Another thread, on another stream, may have found it over.
        staging.follow(self._landed)
        return True

    def _wait(self, timeout: timedelta) -> None:
        seconds = timeout.total_seconds()
        if seconds > 0:
            self._poll_until(time.monotonic() + seconds, timeout)
        self._attempt(self._wait_all)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is over, well or not; never waits."""
        if self._done:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            return self._done or self._attempt(self._test_all)
        finally:
            self._lock.release()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._results)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the list of results, completed by a thread of its own."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        completion.complete(self, future)
        return future

    def source_rank(self) -> int:
        """Group rank of the sender, once the message has arrived."""
        self.wait()
        assert self._pending.source is not None, f"{self._op} is not a receive"
        return self._group.link.group_rank(self._pending.source)

    _source_rank = source_rank

    def drain(self) -> None:
        """End every request, after the group's communicator was revoked; raises nothing.

        Afterwards ``wait`` raises ``WorldBroken`` unless everything had arrived.
        """
        with self._lock:
            if self._done:
                return
            broken = False
            for request in self._pending.requests:
                broken |= not _end(request)
            if broken and self._error is None:
                self._error = WorldBroken(
                    self._op, self._group.group_name, "the group was repaired"
                )
            if self._error is None:
                self._finish()
            self._retire()

    def _attempt(self, over: Callable[[], bool]) -> bool:
        """Whether the work is over: ``over()`` says so, or raises what ended it."""
        if self._error is not None:
            return True
        try:
            if not over():
                return False
        except MPI.Exception as error:
            self._error = self._translated(error)
            # Requests behind the failed one may still write: they stay tracked until drained.
            if not isinstance(self._error, WorldBroken):
                self._retire()
            return True
        self._finish()
        self._retire()
        return True

    def _finish(self) -> None:
        self._pending.finish()
        self._landed = staging.landed(self._results)

    def _wait_all(self) -> bool:
        status = MPI.Status()
        for request in self._pending.requests:
            if patience.crowded():
                patience.wait(lambda request=request: request.Test(status))  # type: ignore[misc]
            else:
                request.Wait(status)
            self._note_source(status)
        return True

    def _test_all(self) -> bool:
        status = MPI.Status()
        for request in self._pending.requests:
            if not request.Test(status):
                return False
            self._note_source(status)
        return True

    def _note_source(self, status: MPI.Status) -> None:
        # A request that an earlier look completed is null now and has an empty status.
        if status.source != MPI.ANY_SOURCE:
            self._pending.source = status.source

    def _poll_until(self, deadline: float, timeout: timedelta) -> None:
        while not self._attempt(self._test_all):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._op} on group {self._group.group_name!r}: timed out after {timeout}"
                )
            time.sleep(0)

    def _translated(self, error: MPI.Exception) -> RuntimeError:
        translated = translate(error, self._op, self._group.group_name, self._comm)
        translated.__cause__ = error
        return translated

    def _retire(self) -> None:
        self._done = True
        self._pending.release()
        self._group.forget(self)


def _end(request: MPI.Request) -> bool:
    """Complete a request of a revoked communicator; whether its data arrived."""
    if request == MPI.REQUEST_NULL:
        return True
    try:
        request.Wait()
    except MPI.Exception as error:
        if error.Get_error_class() == MPI.ERR_PROC_FAILED_PENDING:
            # A receive from any source that could still be met by a live sender.
            request.Cancel()
            request.Wait()
        return False
    return True
