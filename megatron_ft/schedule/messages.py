"""Activations and gradients on their way between the stages of a replica.

Everything is started as soon as the schedule says so and waited for where it is needed, in the one
order that all processes follow (``compiler``). A few sends may be unfinished at a time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.schedule.actions import Action, Kind

MAX_SENDS = 2
"""Sends under way from a process: an activation and a gradient. What they send lives on meanwhile,
so their number bounds that memory."""

_TIMERS = {
    Kind.SEND_ACTIVATION: "forward-send",
    Kind.RECEIVE_ACTIVATION: "forward-recv",
    Kind.SEND_GRADIENT: "backward-send",
    Kind.RECEIVE_GRADIENT: "backward-recv",
}
_Key = tuple[Kind, int, int]


@contextlib.contextmanager
def timed(config: Any, name: str) -> Iterator[None]:
    """Megatron's timer of that name, where timers are on."""
    if config.timers is None:
        yield
        return
    timer = config.timers(name, log_level=2)
    timer.start()
    yield
    timer.stop()


class Messages:
    """What one process sends and receives in one run of a schedule.

    Args:
        group: The pipeline group; processes are its group ranks.
        shape: Of an activation and of its gradient: (sequence, micro batch, hidden), the sequence
            divided by the context-parallel size, and by the tensor-parallel size with sequence
            parallelism.
        config: Megatron's, for the type of what is sent and the timers.
    """

    def __init__(self, group: dist.ProcessGroup, shape: tuple[int, ...], config: Any) -> None:
        self.group = group
        self.shape = shape
        self.config = config
        self._sends: deque[dist.Work] = deque()
        self._here: dict[_Key, tuple[torch.Tensor, dist.Work | None]] = {}

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send; the caller may free ``tensor.data`` at once.

        Raises:
            WorldBroken: A process of the replica died (ulfm).
        """
        with timed(self.config, _TIMERS[action.kind]):
            # Another tensor on the same memory: the caller replaces the data of its own.
            work = dist.isend(tensor.detach(), group=self.group, group_dst=action.peer)
            assert work is not None
            self._sends.append(work)
            if len(self._sends) > MAX_SENDS:
                self._sends.popleft().wait()

    def receive(self, action: Action) -> None:
        """Start to receive; ``take`` waits for it."""
        if self.config.pipeline_dtype is None:
            raise RuntimeError("pipeline_dtype must be set where stages exchange activations")
        tensor = torch.empty(
            self.shape,
            requires_grad=True,
            device=torch.cuda.current_device(),
            dtype=self.config.pipeline_dtype,
        )
        work = dist.irecv(tensor, group=self.group, group_src=action.peer)
        assert work is not None
        self._here[action.kind, action.microbatch, action.stage] = (tensor, work)

    def hand_over(self, kind: Kind, microbatch: int, stage: int, tensor: torch.Tensor) -> None:
        """Pass on to another stage of this process what would be received elsewhere."""
        # Cut from the graph of the stage before: each stage has a backward pass of its own.
        self._here[kind, microbatch, stage] = (tensor.detach().requires_grad_(), None)

    def take(self, kind: Kind, microbatch: int, stage: int) -> torch.Tensor:
        """What the pass of a microbatch at a stage needs.

        Raises:
            WorldBroken: A process of the replica died (ulfm).
        """
        tensor, work = self._here.pop((kind, microbatch, stage))
        if work is not None:
            with timed(self.config, _TIMERS[kind]):
                work.wait()
        return tensor

    def finish(self) -> None:
        """Wait for what is still being sent."""
        assert not self._here, f"received and not used: {list(self._here)}"
        while self._sends:
            self._sends.popleft().wait()
