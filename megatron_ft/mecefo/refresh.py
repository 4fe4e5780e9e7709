"""Taking the singular vectors anew every tau steps, beside training.

A step snapshots a layer's weights and hands them to one worker thread; the answer is put to use at
a fixed later step, whenever the thread was done. So a run is the same on a fast and a slow machine.
On CUDA the thread works on a stream of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from megatron_ft.mecefo.basis import right_singular_vectors
from megatron_ft.mecefo.wgrad import LowRankWgrad

DELAY = 1
"""Steps from a snapshot to the use of what came of it."""


def is_due(step: int, adopted: int, interval: int, index: int, num_layers: int) -> bool:
    """Whether layer ``index`` takes a snapshot in ``step``.

    The layers take turns, so that neither copies nor work of all of them come at once.

    Args:
        step: Training step.
        adopted: Step at which the layer was degraded, with fresh singular vectors.
        interval: tau.
        index: Of the layer among ``num_layers`` on this process.
    """
    since = step - adopted - index * interval // num_layers
    return step > adopted and since >= 0 and since % interval == 0


class Refresher:
    """Computes singular vectors, at once or in turns.

    Args:
        rank: r.
        interval: tau, in steps.
    """

    def __init__(self, rank: int, interval: int) -> None:
        self.rank = rank
        self.interval = interval
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: dict[int, tuple[int, Future[list[torch.Tensor]]]] = {}
        self._threads = torch.get_num_threads()
        self._local = threading.local()

    def now(self, wgrads: Sequence[LowRankWgrad]) -> None:
        """Give ``wgrads`` the singular vectors of their weights as they are now; waits."""
        found = self._submit(wgrads).result()
        for wgrad, basis in zip(wgrads, found, strict=True):
            wgrad.set_basis(basis)

    def begin_step(
        self, step: int, adopted: int, index: int, num_layers: int, wgrads: Sequence[LowRankWgrad]
    ) -> None:
        """Put to use what is due in ``step`` for one layer, and snapshot it if its turn has come.

        Call it once per step and layer, before the first forward pass, everywhere with the same
        ``step``.
        """
        if index in self._under_way and step >= self._under_way[index][0]:
            for wgrad, basis in zip(wgrads, self._under_way.pop(index)[1].result(), strict=True):
                wgrad.set_basis(basis)
        if is_due(step, adopted, self.interval, index, num_layers):
            self._under_way[index] = (step + DELAY, self._submit(wgrads))

    def forget(self, index: int) -> None:
        """A layer is exact again: what is under way for it has no use."""
        self._under_way.pop(index, None)

    def close(self) -> None:
        """End the worker thread."""
        self._under_way.clear()
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None

    def _submit(self, wgrads: Sequence[LowRankWgrad]) -> Future[list[torch.Tensor]]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "mecefo-svd", self._begin_thread)
        # the optimizer writes into the weights before the worker has read them
        snapshots = [wgrad.weight.detach().clone() for wgrad in wgrads]
        event = None
        if snapshots[0].is_cuda:
            event = torch.cuda.Event()
            event.record()
        return self._worker.submit(self._compute, snapshots, event)

    def _begin_thread(self) -> None:
        # a thread of its own has torch's default, and sums depend on how they are cut
        torch.set_num_threads(self._threads)

    def _compute(self, snapshots: list[torch.Tensor], event: Any) -> list[torch.Tensor]:
        if event is None:
            return [right_singular_vectors(weight, self.rank) for weight in snapshots]
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(snapshots[0].device)
        stream = self._local.stream
        with torch.cuda.device(snapshots[0].device), torch.cuda.stream(stream):
            event.wait(stream)
            found = [right_singular_vectors(weight, self.rank) for weight in snapshots]
        stream.synchronize()
        return found
