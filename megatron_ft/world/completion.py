"""The thread that completes futures of operations in flight.

MPI calls nobody back. Someone who asks for a future (torch's DDP, its hooks) may never call
``wait``, so one thread of the process looks after those operations, sleeping between looks: it must
not take a core from the training.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from megatron_ft.world.comms import AGREEING

if TYPE_CHECKING:
    from megatron_ft.world.work import PendingWork

type _Item = tuple[PendingWork, torch.futures.Future[list[torch.Tensor]]]

INTERVAL_S = 1e-4

_queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
_start = threading.Lock()
_thread: threading.Thread | None = None


def complete(work: PendingWork, future: torch.futures.Future[list[torch.Tensor]]) -> None:
    """Set ``future`` when ``work`` is over: at once if it is already."""
    if work.is_completed():
        _set(work, future)
        return
    global _thread
    with _start:
        if _thread is None:
            _thread = threading.Thread(target=_run, name="ulfm-futures", daemon=True)
            _thread.start()
    _queue.put((work, future))


def _run() -> None:
    flying: list[_Item] = []
    while True:
        if not flying:
            flying.append(_queue.get())
        while not _queue.empty():
            flying.append(_queue.get())
        # All of them at each look: an operation of another group may end first.
        waiting = []
        for work, future in flying:
            with AGREEING:
                over = work.is_completed()
            if over:
                _set(work, future)
            else:
                waiting.append((work, future))
        flying = waiting
        if flying:
            time.sleep(INTERVAL_S)


def _set(work: PendingWork, future: torch.futures.Future[list[torch.Tensor]]) -> None:
    error = work.exception()
    if error is not None:
        future.set_exception(error)
        return
    results = work.result()
    for device in {tensor.device for tensor in results if tensor.is_cuda}:
        # Copied on this thread's stream, which nobody else waits for.
        torch.cuda.current_stream(device).synchronize()
    future.set_result(results)
