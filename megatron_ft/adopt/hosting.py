"""What a process does when it adopts a slot, and when it gives it back.

repair: the plan says Adopt     ``World`` connects the groups of the slot, ``host`` makes them
state moves                     ``adopt`` builds the stage and receives its state
attempt                         the transaction runs both stages (``adopt.pair``)
repair: the slot is another's   its state goes where it is wanted, then ``settle`` drops it
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from megatron_ft.adopt import groups, view
from megatron_ft.adopt.pair import Pair
from megatron_ft.adopt.rules import hosts_in
from megatron_ft.adopt.stage import AdoptedStage
from megatron_ft.adopt.view import SlotView
from megatron_ft.recovery_plan import Adopt
from megatron_ft.rejoin.transfer import Moved
from megatron_ft.schedule.executor import Executor
from megatron_ft.schedule.placement import normal
from megatron_ft.topology import Shard
from megatron_ft.world.derive import GroupKey
from megatron_ft.world.link import Link
from megatron_ft.world.repaired import Report

if TYPE_CHECKING:
    from megatron_ft.session import Session

logger = logging.getLogger("megatron_ft.adopt")


class Hosting:
    """This process's part in adoption.

    Attributes:
        stage: What it runs beside its own stage.
        unable: Whether it cannot: it has tried and failed, as for want of memory.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stage: AdoptedStage | None = None
        self.unable = False
        self._view: SlotView | None = None
        self._names: view.Names = {}
        self._kept: list[AdoptedStage] = []
        """What it has run and holds, while it serves no slot or in a repair."""
        assert session.world is not None
        self.world = session.world
        self.world.host = self._host
        self.world.unhost = self._unhost

    # -- what the others are told ----------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What a repair must know: what is held beside one's own shard, and Megatron's globals."""
        built = bool(self.session.model) and not self.session.joining
        return {
            "held": self.held(),
            "unable": self.unable,
            "names": view.names() if built else {},
            # A repair that begins again may have given it another one meanwhile.
            "names_of": self.world.label,
            "adopted_names": self._names,
        }

    def held(self) -> frozenset[Shard]:
        """The shards of which this process holds the state beside its own."""
        return frozenset(stage.shard for stage in self._all() if stage.holds_state)

    # -- repairs ---------------------------------------------------------------------------------

    def _host(
        self, slot: int, links: Mapping[GroupKey, Link], reports: Mapping[int, Report]
    ) -> dict[GroupKey, Any]:
        made = groups.make(slot, links, self.session.policy)
        self._names = _names_of(self.world.topology, slot, reports)
        self._view = SlotView(slot, self._names, made, self.session.args)
        return dict(made)

    def _unhost(self, made: Iterable[Any]) -> None:
        groups.forget(made)
        self._view = None  # names stay: where all who built the stage are dead, others ask for them

    def adopt(self, action: Adopt) -> Moved | None:
        """Build what this process adopts, and get its state; None if it is here already.

        Raises:
            MPI.Exception: Whoever sends it died.
        """
        world, shard = self.world, self.world.topology.shard_of(action.slot)
        assert self._view is not None and self._view.slot == action.slot
        here = self.holding(shard) if action.source_process == world.process else None
        try:
            if self.stage is None or self.stage.view is not self._view:
                with world.watch.working():
                    built = AdoptedStage(self.session, self._view)
                self._keep()
                self.stage = built
            if here is None:
                with world.watch.waiting():
                    return self.stage.receive(world.comm, world.rank_of(action.source_process))
            if here is not self.stage:
                self.stage.take(here)
            return None
        except MPI.Exception:
            raise
        except Exception:
            # Trying again would fail again, for ever: the others must plan without it.
            self.unable = True
            gc.collect()  # half a model and its hooks hold each other
            raise

    def holding(self, shard: Shard) -> AdoptedStage:
        """What this process holds of a shard that is not its own."""
        return next(stage for stage in self._all() if stage.holds_state and stage.shard == shard)

    def _all(self) -> list[AdoptedStage]:
        return [*([] if self.stage is None else [self.stage]), *self._kept]

    def _keep(self) -> None:
        """From now on nothing is run beside the own stage; what is held of another one stays."""
        self._kept = [stage for stage in self._all() if stage.holds_state]
        self.stage = None

    def outdated(self, committed: int) -> None:
        """What is held beside the own stage is of no use if others have committed more steps.

        A process of the pool may get its own stage's new state, and would pass for one that holds
        that of the other one, too.
        """
        if committed > self.session.committed:
            if self.stage is not None:
                self.stage.holds_state = False
            if self._kept:
                self._kept = []
                gc.collect()

    def settle(self) -> None:
        """After a repair: drop what is another's again, and let the pipeline follow.

        A process without a slot keeps what it has. If what it sends in this repair does not arrive,
        or nobody trains for the time being, there may be no other copy.
        """
        transaction = self.session.transaction
        if self.stage is not None and self.stage.view is not self._view:
            self._keep()
        stage = self.stage
        dropped = bool(self.world.slots and self._kept)
        if dropped:
            self._kept = []
        if transaction is not None:
            self._follow(transaction, stage)
        if dropped:
            gc.collect()  # a model and its optimizer hold each other; by now nobody else does

    def _follow(self, transaction: Any, stage: AdoptedStage | None) -> None:
        """Let the step and the pipeline have the stages that this process serves now."""
        hosted = None if transaction.pair is None else transaction.pair.adopted
        if stage is not hosted:
            transaction.host(None if stage is None else Pair(self.session, stage))
            self._serve(stage)
        transaction.placed = None
        if self.world.slots:
            replica = self.world.topology.replica_of(self.world.slots[0])
            placement = hosts_in(self.world.topology, self.world.assignment, replica)
            if placement != normal(len(placement)):
                transaction.placed = Executor(placement=placement, around=self.around)

    def _serve(self, stage: AdoptedStage | None) -> None:
        """Let MeCeFO know which layers this process has, and may degrade."""
        mecefo = self.session.mecefo
        if mecefo is None:
            return
        chunks = [] if stage is None else [(stage.stage, chunk) for chunk in stage.model]
        own = self.world.topology.stage_of(self.world.label)
        chunks += [(own, chunk) for chunk in self.session.model]
        mecefo.serve(
            sorted(chunks, key=lambda served: served[0]),
            optimizers=() if stage is None else [stage.optimizer],
        )

    def around(self, stage: int) -> contextlib.AbstractContextManager[None]:
        """Opened around each pass at ``stage``: Megatron's globals are those of its slot."""
        if self.stage is not None and self.stage.stage == stage:
            return self.stage.view.shown()
        return contextlib.nullcontext()


def _names_of(topology: Any, slot: int, reports: Mapping[int, Report]) -> view.Names:
    at = topology.coordinate(slot)
    for _, report in sorted(reports.items()):
        known = [(report.facts.get("names_of"), report.facts.get("names"))]
        if report.adopted is not None:
            known.append((report.adopted[0], report.facts.get("adopted_names")))
        for label, names in known:
            if label is not None and names and topology.coordinate(label)._replace(dp=at.dp) == at:
                return view.moved_names(topology, names, label, slot)
    raise AssertionError(f"nobody knows the groups of slot {slot}")
