"""MeCeFO in a running job: which layers of this process are degraded, and the gradient rule.

The step transaction calls ``Mecefo`` at fixed places of each attempt (arXiv 2510.16415, section 4).
Who is degraded is known alike on all processes, from the assignment of slots and from injected
`degrade` faults, so the rule needs no message. It is applied to reduced gradients: when an attempt
breaks, the buckets' snapshots undo it together with the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ft.mecefo.choices import Choices
from megatron_ft.mecefo.degraded import Degraded
from megatron_ft.mecefo.gradient_rule import attention_factor, attention_parameters, rescale
from megatron_ft.mecefo.hold import hold
from megatron_ft.mecefo.nodes import Node, nodes_of
from megatron_ft.mecefo.options import MecefoOptions
from megatron_ft.mecefo.quotas import Speeds
from megatron_ft.mecefo.shapes import choices_of
from megatron_ft.validation import FtArgumentError

if TYPE_CHECKING:
    from megatron_ft.session import Session

NodesAt = Callable[[int], frozenset[Node]]
"""Iteration -> the degraded nodes."""


class Mecefo:
    """This process's part in MeCeFO.

    Args:
        options: The flags.
        choices: Which layers of a degraded node are better than the cheapest.
        nodes_at: Who is degraded; asked once in each attempt, the same answer everywhere.
        replica: The replica that this process serves now.
        entered: Whether this process has come into a job that was under way.
        optimizer: Megatron's, of the stage that this process has built.
        emit: Writes an agreed event: name, kind, fields.
    """

    def __init__(
        self,
        options: MecefoOptions,
        choices: Choices,
        nodes_at: NodesAt,
        replica: Callable[[], int],
        entered: Callable[[], bool],
        optimizer: Any,
        emit: Callable[..., None],
    ) -> None:
        self.options = options
        self.choices = choices
        self.nodes: frozenset[Node] = frozenset()
        """Of the attempt under way, in all replicas."""
        self._nodes_at = nodes_at
        self._replica = replica
        self._entered = entered
        self._own_optimizer = optimizer
        self._optimizers: list[Any] = [optimizer]
        self._emit = emit
        self._degraded: Degraded | None = None
        self._stages: list[int] = []
        self._announced: frozenset[Node] | None = None
        self._iteration = 0

    def serve(self, chunks: Sequence[tuple[int, Any]], *, optimizers: Sequence[Any] = ()) -> None:
        """This process runs these stages from now on: its own, and in an adoption another one.

        Between two steps, or in a repair after which this process computes the step anew.

        Args:
            chunks: Stage, from 0, and Megatron's DDP-wrapped chunk of it.
            optimizers: Megatron's, of what is adopted, beside the own one.

        Raises:
            ValueError: A layer cannot be degraded; says what to use instead.
        """
        self.close()
        self._optimizers = [self._own_optimizer, *optimizers]
        layers = [(stage, layer) for stage, chunk in chunks for layer in layers_of(chunk)]
        self._stages = [stage for stage, _ in layers]
        self._degraded = Degraded(
            [layer for _, layer in layers], self.options, ddp=[chunk for _, chunk in chunks]
        )
        for stage, layer in layers:
            assert layer.layer_number in self.choices.layers[stage], (stage, layer.layer_number)

    def close(self) -> None:
        """Every layer is stock again; what this step has in low-rank factors is forgotten."""
        if self._degraded is not None:
            self._degraded.discard()
            self._degraded.close()
            self._degraded = None
        self._hold(())

    # -- what the transaction calls --------------------------------------------------------------

    def begin_step(self, iteration: int, live: Sequence[int]) -> None:
        """A step begins, or begins anew from nothing.

        Args:
            iteration: Megatron's, from 1.
            live: The whole replicas.
        """
        degraded = self._served
        degraded.discard()
        self.begin_attempt(iteration, live)
        degraded.begin_step(iteration)
        self._announce(iteration)

    def begin_attempt(self, iteration: int, live: Sequence[int]) -> None:
        """Switch this process's layers; those of a replica change only while it holds nothing.

        A replica that keeps what it has computed before a failure keeps its nodes too: a node
        changes by a death in its replica, or where all begin the step anew.
        """
        self.nodes = frozenset(n for n in self._nodes_at(iteration) if n.replica in set(live))
        self._hold(())
        mine = [node for node in self.nodes if node.replica == self._replica()]
        layers = self._served.layers
        on: list[int] = []
        exact: list[int] = []
        kept: list[int] = []
        for index, (stage, layer) in enumerate(zip(self._stages, layers, strict=True)):
            chosen = [self.choices.of(node.stages) for node in mine if stage in node.stages]
            if not chosen:
                continue
            on.append(index)
            if all(layer.layer_number in choice.exact for choice in chosen):
                exact.append(index)
            if all(layer.layer_number in choice.kept for choice in chosen):
                kept.append(index)
        self._served.on(on, exact_attention=exact, keep_ffn=kept, step=iteration)

    def after_reduction(self, contributed: Mapping[int, int]) -> None:
        """Apply the gradient rule to this process's reduced gradients.

        Before the gradient norm; once in an attempt.

        Args:
            contributed: What each live replica has in the mean of this step: microbatches, or
                tokens where the loss is per token.
        """
        held: list[Any] = []
        for stage, layer in zip(self._stages, self._served.layers, strict=True):
            affected = self.choices.skipping(stage, self.nodes)[layer.layer_number]
            if not affected:
                continue
            parameters = attention_parameters(layer)
            factor = attention_factor(contributed, affected)
            if factor is None:
                held += parameters
            else:
                rescale(parameters, factor)
        self._hold(held)

    def discard(self) -> None:
        """What this process has computed of the step is void."""
        self._served.discard()

    # -- what others want to know ----------------------------------------------------------------

    @property
    def slower(self) -> frozenset[int]:
        """The replicas with a degraded node."""
        return frozenset(node.replica for node in self.nodes)

    @property
    def num_degraded(self) -> int:
        """Degraded stages of all replicas."""
        return sum(len(node.stages) for node in self.nodes)

    @property
    def degraded_here(self) -> tuple[int, ...]:
        """Numbers of the layers of this process that are degraded now."""
        return tuple(self._served.layers[i].layer_number for i in self._served.indices)

    def assert_degraded(self, fault: object) -> None:
        """A fault has struck that degrades this process's node: it must be so already."""
        assert self.degraded_here, f"{fault}: no layer of this process is degraded"

    def _hold(self, parameters: Sequence[Any]) -> None:
        """Mark the optimizers, for a patch of their step, which follows the vote."""
        for optimizer in self._optimizers:
            optimizer.ft_held = parameters

    @property
    def _served(self) -> Degraded:
        assert self._degraded is not None, "serve() comes first"
        return self._degraded

    @property
    def said(self) -> tuple[int, frozenset[Node] | None]:
        """The last iteration for which it was written down who is degraded, and who was."""
        return self._iteration, self._announced

    def hear(self, said: tuple[int, frozenset[Node] | None]) -> None:
        """A process that comes into the job goes on from what another one has said."""
        self._iteration, self._announced = said

    def _announce(self, iteration: int) -> None:
        """Write down who is degraded from this step on, and who is not any more."""
        following = iteration - self._iteration in (0, 1)
        known, self._announced, self._iteration = self._announced, self.nodes, iteration
        if self._entered() and not (following and known is not None):
            return  # the others have said it
        known = known or frozenset()
        for kind, nodes in (
            ("stages_restored", known - self.nodes),
            ("stages_degraded", self.nodes - known),
        ):
            for node in sorted(nodes):
                stages = "+".join(map(str, node.stages))
                self._emit(
                    kind,
                    agreed=f"{kind}-{iteration}-{node.replica}-{stages}",
                    replica=node.replica,
                    stages=list(node.stages),
                )


def layers_of(chunk: Any) -> list[Any]:
    """The TransformerLayers of a chunk, whatever it is wrapped in."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return list(chunk.decoder.layers)


def install(session: Session) -> None:
    """Prepare a process that has built its stage.

    Raises:
        FtArgumentError: Its layers or its optimizer cannot be degraded or held.
    """
    from megatron.core import parallel_state as mpu

    world, options, transaction = session.world, session.early.mecefo, session.transaction
    assert world is not None
    topology = world.topology

    def nodes_at(iteration: int) -> frozenset[Node]:
        found = nodes_of(world.assignment, topology)
        return found.union(*(source(iteration) for source in session.degraded_sources))

    mecefo = Mecefo(
        options,
        choices_of(options, session.args, session.model[0].config, topology.pipeline),
        nodes_at,
        lambda: int(transaction.replica),
        lambda: session.reentered,
        session.optimizer,
        session.emit,
    )
    stage = mpu.get_pipeline_model_parallel_rank()
    try:
        mecefo.serve([(stage, chunk) for chunk in session.model])
        with hold(session.optimizer, ()):  # says so if it cannot
            pass
    except ValueError as error:
        raise FtArgumentError(str(error)) from error
    session.mecefo = transaction.mecefo = mecefo
    if options.quotas:
        transaction.speeds = Speeds(topology.pipeline)
