"""Points at which injected faults strike: wrappers around Megatron and around this package.

Installed only in a run that injects faults, so that production code knows nothing of them. Each
wrapper tells the session's injector where this process is and goes on, if it still can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .registry import OURS, Patch

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_BUCKET_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"


class _Counts:
    """How often a point was met in the current attempt of the current iteration."""

    def __init__(self) -> None:
        self.where: Any = None
        self.counts: dict[str, int] = {}

    def next(self, point: str, where: Any) -> int:
        if where != self.where:
            self.where, self.counts = where, {}
        self.counts[point] = self.counts.get(point, -1) + 1
        return self.counts[point]


_counts = _Counts()


def _reach(point: str, counted: bool = False) -> None:
    from megatron_ft.session import current

    session = current()
    if session.injector is None:
        return
    n = None
    if counted:
        n = _counts.next(point, (session.iteration, session.epoch, session.evaluations))
    session.injector.reach(point, session.iteration, n)


def _before(point: str, counted: bool = False) -> Callable[[Any], Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reach_first(*args: Any, **kwargs: Any) -> Any:
            _reach(point, counted)
            return original(*args, **kwargs)

        return reach_first

    return make


def _after(point: str) -> Callable[[Any], Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reach_then(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            _reach(point, True)
            return result

        return reach_then

    return make


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        from megatron_ft.session import current

        _reach("eval" if current().evaluating else "forward", True)
        return original(*args, **kwargs)

    return forward_step


def _built(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def built(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.joining:
            _reach("join", True)
        return result

    return built


def _vote(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def vote(self: Any, ok: bool, training: bool) -> Any:
        if ok and training:
            _reach("reduced")
        agreed = original(self, ok, training)
        if agreed and training:
            _reach("voted")
        return agreed

    return vote


def _patch(name: str, target: str, make: Callable[[Any], Any], package: str | None = None) -> Patch:
    return Patch(
        name=f"faults.{name}",
        target=target,
        reason="a place where an injected fault can strike",
        kind="wrap",
        make=make,
        **({"package": package, "versions": ">=0"} if package else {}),
    )


PATCHES: tuple[Patch, ...] = (
    _patch("forward", f"{_SCHEDULES}:forward_step", _forward),
    _patch("backward", f"{_SCHEDULES}:backward_step", _before("backward", True)),
    _patch("reduce", f"{_BUCKET_GROUP}.start_grad_sync", _before("reduce", True)),
    _patch("vote", "megatron_ft.transaction:StepTransaction.vote", _vote, OURS),
    _patch(
        "optimizer",
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step_with_ready_grads",
        _before("optimizer"),
    ),
    _patch("logging", "megatron.training.training:training_log", _before("logging")),
    _patch(
        "save",
        "megatron.training.checkpointing:maybe_save_dataloader_state",
        _before("save", True),
    ),
    _patch(
        "save.state",
        "megatron.training.checkpointing:generate_state_dict",
        _before("save", True),
    ),
    _patch(
        "save.part",
        "megatron.core.dist_checkpointing.strategies.filesystem_async:"
        "FileSystemWriterAsync.write_preloaded_data_multithread",
        _before("save", True),
    ),
    _patch("save.written", "megatron.core.dist_checkpointing:save", _after("save")),
    _patch(
        "save.tracker",
        "megatron.training.checkpointing:get_checkpoint_tracker_filename",
        _before("save", True),
    ),
    _patch(
        "repair", "megatron_ft.world.world:World.plan_and_derive", _before("repair", True), OURS
    ),
    _patch("join.built", "megatron_ft.session:Session.built", _built, OURS),
    _patch("join.send", "megatron_ft.rejoin.transfer:send", _before("join", True), OURS),
    _patch("join.receive", "megatron_ft.rejoin.transfer:receive", _before("join", True), OURS),
    _patch("join.received", "megatron_ft.rejoin.transfer:_load", _before("join", True), OURS),
    _patch("pool", "megatron_ft.world.world:World.needs_repair", _before("pool"), OURS),
)
