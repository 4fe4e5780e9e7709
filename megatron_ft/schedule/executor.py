"""Runs a compiled schedule with Megatron's own forward and backward steps.

An ``Executor`` is called like Megatron's ``forward_backward_pipelining_without_interleaving`` and
like its ``forward_backward_no_pipelining``, and does what they do: with the route 0, 1, .., P-1 and
a process for each stage it computes the same in the same order. What it adds are other routes and
two stages on one process.

Megatron's functions are looked up when they are called, so that patches of them hold here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_ft.schedule.actions import SENDS, Action, Kind, Schedule
from megatron_ft.schedule.by_index import ByIndex
from megatron_ft.schedule.chunks import Chunk, chunks_for
from megatron_ft.schedule.compiler import compile_schedule
from megatron_ft.schedule.messages import Messages
from megatron_ft.schedule.passage import passage
from megatron_ft.schedule.placement import Placement, normal
from megatron_ft.schedule.routes import Route, identity

RouteChoice = Callable[[int, bool], Sequence[Route]]
Around = Callable[[int], contextlib.AbstractContextManager[None]]


def straight(num_stages: int) -> RouteChoice:
    """Every microbatch on the route 0, 1, .., P-1."""
    return lambda num_microbatches, forward_only: (identity(num_stages),) * num_microbatches


class Executor:
    """A forward-backward function for any routes and placement.

    Args:
        routes: The route of each microbatch, asked in each call with the number of microbatches and
            whether it is forward only; all processes of a replica must get the same answer. By
            default all go straight.
        placement: The process (rank in the pipeline group) of each stage, by default its own. May
            be set between calls, on all processes of a replica.
        limit: Microbatches in flight, see ``compile_schedule``.
        around: Opened around each forward and backward pass at a stage, which it is told.
    """

    def __init__(
        self,
        routes: RouteChoice | None = None,
        placement: Placement | None = None,
        limit: int | None = None,
        around: Around | None = None,
    ) -> None:
        self.routes = routes
        self.placement = placement
        self.limit = limit
        self.around = around or (lambda stage: contextlib.nullcontext())

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run all microbatches of a step or of an evaluation batch.

        Args:
            data_iterator: One, or a list with one for each chunk.
            model: The chunk of the stage that this process runs, or a list of the chunks of its
                stages, ascending.

        Returns:
            What the loss function reports of each microbatch that ends on this process, in the
            order of their indices.

        Raises:
            ValueError: The configuration asks for something that the executor does not do.
            WorldBroken: A process of the replica died (ulfm).
        """
        if adjust_tensor_shapes_fn is not None:
            raise ValueError("the schedule executor cannot adjust the shapes of activations")
        pg_collection, pp_group = _groups(pg_collection, p2p_communicator)
        schedule = self._schedule(pp_group.size(), num_microbatches, forward_only)
        chunks = chunks_for(schedule, pp_group.rank(), model, data_iterator)
        config = next(iter(chunks.values())).config
        (shape,) = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=pg_collection.tp,
            cp_group=pg_collection.cp,
        )
        run = _Run(
            schedule=schedule,
            process=pp_group.rank(),
            chunks=chunks,
            messages=Messages(pp_group, shape, config),
            forward_step_func=forward_step_func,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            cp_size=pg_collection.cp.size(),
            around=self.around,
        )
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        if config.finalize_model_grads_func is None or forward_only:
            run.run()
        else:
            with _deferred_head(chunks.get(schedule.num_stages - 1), pg_collection.tp):
                run.run()
            config.finalize_model_grads_func(
                [chunk.model for chunk in chunks.values()],
                run.tokens(pp_group) if config.calculate_per_token_loss else None,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return run.reports()

    def _schedule(self, num_stages: int, num_microbatches: int, forward_only: bool) -> Schedule:
        placement = self.placement or normal(num_stages)
        if len(placement) != num_stages:
            raise ValueError(f"a placement of {len(placement)} stages in a group of {num_stages}")
        choose = self.routes or straight(num_stages)
        routes = tuple(choose(num_microbatches, forward_only))
        assert len(routes) == num_microbatches, "one route for each microbatch"
        return compile_schedule(routes, placement, self.limit, forward_only=forward_only)


def _groups(pg_collection: Any, p2p_communicator: Any) -> tuple[Any, Any]:
    """Megatron's groups for this call, and the pipeline group among them."""
    if pg_collection is None:
        if p2p_communicator is not None:
            raise ValueError("Provide both p2p_communicator and pg_collection, or neither")
        pg_collection = schedules._build_default_pg_collection()
    return pg_collection, p2p_communicator.pp_group if p2p_communicator else pg_collection.pp


@contextlib.contextmanager
def _deferred_head(last: Chunk | None, tp_group: Any) -> Iterator[None]:
    """Around a step: the head's weight gradient, where Megatron defers it to the end."""
    if last is None:
        yield
        return
    head = schedules.clear_embedding_activation_buffer(last.config, last.model, True)
    yield
    schedules.finish_embedding_wgrad_compute(last.config, head, True, tp_group)


class _Run:
    """One call of the executor."""

    def __init__(
        self,
        schedule: Schedule,
        process: int,
        chunks: dict[int, Chunk],
        messages: Messages,
        forward_step_func: Callable[..., Any],
        collect_non_loss_data: bool,
        first_val_step: bool | None,
        cp_size: int,
        around: Around,
    ) -> None:
        self.schedule = schedule
        self.actions = schedule.actions[process]
        self.process = process
        self.chunks = chunks
        self.messages = messages
        self.forward_step_func = forward_step_func
        self.collect_non_loss_data = collect_non_loss_data
        self.first_val_step = first_val_step
        self.cp_size = cp_size
        self.around = around
        self.forwards_left = dict.fromkeys(chunks, schedule.num_microbatches)
        self.backwards_left = dict.fromkeys(chunks, schedule.num_microbatches)
        self.live: dict[tuple[int, int], tuple[Any, Any]] = {}
        """Input and output of each forward pass whose backward pass is to come."""
        self.outgoing: dict[tuple[Kind, int, int], torch.Tensor] = {}
        self.reported: dict[int, list[Any]] = {}
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")

    def run(self) -> None:
        with contextlib.ExitStack() as reductions:
            if not self.schedule.forward_only:
                for chunk in self.chunks.values():
                    reductions.enter_context(chunk.hold_back_reduction())
            for action in self.actions:
                self._do(action)
            self.messages.finish()
            if not self.schedule.forward_only:
                for chunk in self.chunks.values():
                    chunk.after_last_action()
        assert not self.live and not self.outgoing

    def reports(self) -> list[Any]:
        return [report for index in sorted(self.reported) for report in self.reported[index]]

    def tokens(self, pp_group: Any) -> torch.Tensor:
        """The tokens of this replica, on the last stage at least, where Megatron looks for them."""
        if any(route[-1] != self.schedule.num_stages - 1 for route in self.schedule.routes):
            dist.all_reduce(self.num_tokens, group=pp_group)
        return self.num_tokens

    def _do(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            with self.around(action.stage):
                self._forward(action.microbatch, action.stage)
        elif action.kind is Kind.BACKWARD:
            with self.around(action.stage):
                self._backward(action.microbatch, action.stage)
        elif action.kind in SENDS:
            self._send(action)
        else:
            self.messages.receive(action)

    def _forward(self, index: int, stage: int) -> None:
        chunk, at = self.chunks[stage], passage(self.schedule.routes, index, stage)
        received = None
        if not at.enters:
            received = self.messages.take(Kind.RECEIVE_ACTIVATION, index, stage)
        done = self.schedule.num_microbatches - self.forwards_left[stage]
        self.forwards_left[stage] -= 1
        chunk.innermost.passage = at
        if isinstance(chunk.iterator, ByIndex):
            chunk.iterator.begin(index)
        reports: list[Any] = []
        output, num_tokens = schedules.forward_step(
            self.forward_step_func,
            chunk.iterator,
            chunk.model,
            self.schedule.num_microbatches,
            received,
            reports,
            chunk.config,
            self.cp_size,
            collect_non_loss_data=self.collect_non_loss_data,
            checkpoint_activations_microbatch=self._checkpoints(chunk, done),
            is_first_microbatch=schedules.check_first_val_step(
                self.first_val_step, self.schedule.forward_only, done == 0
            ),
            current_microbatch=index,
            is_last_stage=at.leaves,
        )
        chunk.innermost.passage = None
        if isinstance(chunk.iterator, ByIndex):
            chunk.iterator.end()
        self.num_tokens += num_tokens
        if reports:
            self.reported[index] = reports
        if not at.leaves:
            self._pass_on(Kind.SEND_ACTIVATION, index, stage, 1, output)
        if not self.schedule.forward_only:
            self.live[index, stage] = (received, output)

    def _checkpoints(self, chunk: Chunk, done: int) -> bool | None:
        """Whether all layers recompute this microbatch: the later ones of those in flight do.

        None where Megatron's ``num_microbatches_with_partial_activation_checkpoints`` is not set.
        """
        partial = chunk.config.num_microbatches_with_partial_activation_checkpoints
        if partial is None:
            return None
        window = self.schedule.peak_live(chunk.stage)
        return bool(window and done % window >= partial)

    def _backward(self, index: int, stage: int) -> None:
        chunk, at = self.chunks[stage], passage(self.schedule.routes, index, stage)
        received, output = self.live.pop((index, stage))
        gradient = None
        if not at.leaves:
            gradient = self.messages.take(Kind.RECEIVE_GRADIENT, index, stage)
        self.backwards_left[stage] -= 1
        if not self.backwards_left[stage]:
            chunk.before_last_backward()
        gradient = schedules.backward_step(received, output, gradient, chunk.config)
        if not at.enters:
            self._pass_on(Kind.SEND_GRADIENT, index, stage, -1, gradient)

    def _pass_on(self, kind: Kind, index: int, stage: int, step: int, tensor: torch.Tensor) -> None:
        """Keep what was computed for the send that follows, or hand it over to a stage here."""
        route = self.schedule.routes[index]
        following = route[route.index(stage) + step]
        if self.schedule.placement[following] != self.process:
            self.outgoing[kind, index, stage] = tensor
            return
        receive = Kind.RECEIVE_ACTIVATION if step == 1 else Kind.RECEIVE_GRADIENT
        self.messages.hand_over(receive, index, following, tensor)
        self._release(kind, stage, tensor)

    def _send(self, action: Action) -> None:
        tensor = self.outgoing.pop((action.kind, action.microbatch, action.stage))
        self.messages.send(action, tensor)
        self._release(action.kind, action.stage, tensor)

    def _release(self, kind: Kind, stage: int, tensor: torch.Tensor) -> None:
        """Of an output that was passed on, only its graph is needed."""
        if kind is Kind.SEND_ACTIVATION and not self.schedule.forward_only:
            config = self.chunks[stage].config
            schedules.deallocate_output_tensor(tensor, config.deallocate_pipeline_outputs)
