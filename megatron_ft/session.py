"""What one process of the job holds together: world, run directory, model, step transaction.

Patches reach it by ``current()``; there is one per process, from ``open_session`` to
``close_session``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft import reentry, reported, reporting
from megatron_ft.arguments import Early
from megatron_ft.control.session_orders import Control
from megatron_ft.mecefo.nodes import Node
from megatron_ft.observe import checkpoint_id
from megatron_ft.observe.observer import Observer
from megatron_ft.observe.wandb_megatron import MegatronWriter, settings_from_megatron
from megatron_ft.recovery_plan import Adopt, Fill, Rebuild
from megatron_ft.rejoin.membership import Membership
from megatron_ft.rejoin.refill import filled
from megatron_ft.rejoin.relabel import relabel
from megatron_ft.rejoin.transfer import Moved
from megatron_ft.topology import Shard
from megatron_ft.world.environment import note_checkpoint, note_loading
from megatron_ft.world.errors import ReplicaLost, WorldBroken
from megatron_ft.world.repaired import Repaired
from megatron_ft.world.watch import NO_WATCH, Watch
from megatron_ft.world.world import World

logger = logging.getLogger("megatron_ft")


MAX_REPAIRS_IN_VAIN = 5


class NoWayOn(Exception):
    """The planner ran out of rules; the job ends with exit code 75 and this message."""


@dataclass
class Step:
    """What is known of the step that Megatron has just finished."""

    seconds: float = 0.0


@dataclass(frozen=True)
class EvaluatesFrom:
    """What an evaluation that is done again must have as it was."""

    iteration: int
    starts: Mapping[str, int]
    consumed: int
    evaluations: int


class Session:
    """One process's part in the job.

    Args:
        early: Flags and sizes.
        world: The processes; None with a stock backend, where nothing is survived.
        watch: Fencing; None where no strategy is on.
        observer: This process's event log, progress line and wandb run.
    """

    def __init__(
        self,
        early: Early,
        world: World | None,
        watch: Watch | None,
        observer: Observer,
    ) -> None:
        self.early = early
        self.world = world
        self.watch = watch
        self.observer = observer
        self.policy: Any = None
        self.args: Any = None
        self.transaction: Any = None
        self.mecefo: Any = None
        """With --ft-mecefo, which layers are degraded; set when there is a model."""
        self.degraded_sources: list[Callable[[int], frozenset[Node]]] = []
        """Who is degraded in an iteration, beside the processes that have adopted a stage."""
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.step = Step()
        self.injector: Any = None
        self.faults: list[str] = []
        self.evaluating = False
        self._repairs_in_vain = 0
        self._how = ""
        self.leave: Callable[[int, str], None] = lambda code, message: None
        """Ends this process with all others, from whatever thread; set by the runtime."""
        self.part: Callable[[], None] = lambda: None
        """Ends this process while the others go on; set by the runtime."""
        self.iteration = 0
        self.first_iteration = 1
        self.evaluations = 0
        self.loss_group: Any = None
        self.committed = 0
        """The last iteration that all replicas agreed on; the state is that after it."""
        self.reentered = False
        """Whether this process has entered training while others were in it."""
        self.stepped = False
        """Whether this process has begun a step since the job started."""
        self.resumes = False
        """Whether Megatron's loop is to do what comes after the last step only: its evaluation, its
        checkpoint, whether the job ends."""
        self.saved: int | None = None
        """The last iteration whose checkpoint is written."""
        self.evaluates_from: EvaluatesFrom | None = None
        """Where the evaluation after the last step began."""
        self.training_over = False
        """Whether Megatron has left its training loop: what is lost now is not computed again."""
        self.grad_squares: dict[Shard, float] = {}
        """Parts of the stages' squared gradient norms in the last committed step, as far as they
        are known here: of the own shard, and of one that was adopted (CheckFree)."""
        self.training = False
        """Whether set-up is done."""
        self.joining = False
        """Whether this process builds by itself, to take a slot later."""
        self.no_way_on = NoWayOn
        self.barred_said: set[int] = set()
        self.control = Control(self)
        self.membership = Membership(self)
        self.membership.on_repaired = self._repaired
        self.on_built: list[Callable[[], None]] = []
        self.hosting: Any = None
        """This process's part in adoption (MeCeFO); None where nothing is adopted."""
        self.build_again: Callable[..., Any] = _not_built
        """Megatron's set-up of model and optimizer, with the arguments of its first call."""
        self._evaluations_after = 0

    # -- who writes ------------------------------------------------------------------------------

    @property
    def resilient(self) -> bool:
        """Whether a strategy is on, so that a death is mended instead of ending the job."""
        return self.early.strategy is not None

    @property
    def epoch(self) -> int:
        return self.world.epoch if self.world is not None else 0

    def emit(self, kind: str, **fields: Any) -> None:
        """Write an event of the current iteration and epoch."""
        self.observer.emit(kind, iteration=self.iteration, epoch=self.epoch, **fields)

    def wandb_writer(self, args: Any) -> MegatronWriter | None:
        """What Megatron gets as its wandb writer: one run for the whole job."""
        settings = settings_from_megatron(args)
        if settings is None:
            return None
        # Finetuning is a run of its own, whatever it begins with.
        self.observer.use_wandb(settings, None if args.finetune else checkpoint_id.kept(args.load))
        return MegatronWriter(self.observer.wandb)

    def elect(self) -> bool:
        """Begin or stop to write for all, as the assignment says; whether this process does."""
        if self.world is not None and not self.world.assignment.live_slots:
            # The job is about to stop, and somebody has to say so.
            process_of = (self.world.elected,)
        elif self.world is not None:
            process_of = self.world.assignment.process_of
        else:
            process_of = tuple(range(int(self.args.world_size)))
        elected = self.observer.elect(dict(enumerate(process_of)))
        if self.resilient:
            self.control.elect(elected)
        return elected

    # -- what Megatron does ----------------------------------------------------------------------

    def built(self, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        """Megatron has built what is trained."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        if self.world is not None:
            self.world.relabel = lambda old, new: relabel(self, old, new)
        for call in self.on_built:
            call()

    def run_train(self, train: Callable[[], Any]) -> Any:
        """Megatron's train, entered again by a process that has been given a slot meanwhile."""
        if self.joining:
            self._wait_for_slot()
            reentry.resume(self)
        else:
            self._train_started()
        while True:
            try:
                return train()
            except ReplicaLost as lost:
                logger.info("%s", lost)
            reentry.prepare(self)
            self.reentered = True
            if not self.world.slots:
                self._wait_for_slot()
            self.policy.entering = True
            reentry.resume(self)

    def _wait_for_slot(self) -> None:
        """In the pool, model and all, until there is a slot to serve."""
        if self.watch is not None:
            self.watch.disarm()
        self.membership.stop_building()
        self.membership.pool.wait()
        self.joining = False
        self.reentered = True
        self.policy.survives = self.policy.entering = True
        self.training = True
        self.iteration = self.committed
        self.first_iteration = self.committed + 1

    def _train_started(self) -> None:
        """Set-up is done; from here on a death is survived."""
        self.training = True
        self.iteration = self.committed = self.args.iteration
        self.first_iteration = self.iteration + 1
        self.elect()
        if os.environ["RANK"] == "0":
            note_loading(None)
        reporting.run_restarted(self)
        reporting.run_started(self)
        if self.policy is not None and self.resilient:
            self.policy.survives = True
        if self.membership.replacements.respawn:
            self.membership.replacements.start_missing()

    def train_ended(self) -> None:
        self.training_over = True
        if self.watch is not None:
            self.watch.disarm()

    @contextlib.contextmanager
    def step_begins(self) -> Iterator[None]:
        """Around Megatron's train_step."""
        self.iteration = self.args.curr_iteration + 1
        self.stepped = True
        if self.transaction is not None:
            self.transaction.iteration = self.iteration
            self.transaction.step_start = self.args.consumed_train_samples
        if self.watch is not None:
            self.watch.arm()
        started = time.monotonic()
        with reported.summed_once(self):
            yield
        self.step.seconds = time.monotonic() - started

    def committed_step(self, iteration: int) -> None:
        """All replicas have agreed on a step; its optimizer step is local arithmetic."""
        self.committed = iteration
        self._repairs_in_vain = 0
        if self.transaction.measured is not None:
            self.grad_squares = dict(self.transaction.measured)

    def step_committed(
        self,
        iteration: int,
        losses: Mapping[str, Any],
        learning_rate: float | None,
        grad_norm: float | None,
    ) -> None:
        """A step is done; on the last stage ``losses`` holds what is reported of it."""
        reports = self.transaction.last_reports if self.transaction is not None else []
        losses = losses or reported.of_an_adopted_stage(reports)
        if "lm loss" in losses:
            loss = losses["lm loss"].item()
            norm = float(grad_norm) if grad_norm is not None else None
            reporting.step(self, iteration, loss, norm, learning_rate)

    @contextlib.contextmanager
    def evaluation_begins(self) -> Iterator[None]:
        """Around Megatron's evaluate."""
        self.evaluating = True
        if self.transaction is not None:
            self.transaction.evaluated.clear()
            known = self.evaluates_from
            if known is None or known.iteration != self.iteration:  # the first of several sets
                self.evaluates_from = EvaluatesFrom(
                    self.iteration,
                    dict(self.transaction.eval_starts),
                    self.args.consumed_valid_samples,
                    self.evaluations,
                )
        self._evaluations_after += int(self.training_over)
        try:
            with (self.watch or NO_WATCH).working(), reported.summed_once(self):
                yield
        finally:
            self.evaluating = False

    def evaluated(self, losses: Any, data_iterator: Any, seconds: float) -> None:
        """An evaluation is done; None when it broke off at a time limit."""
        if losses is None:
            return
        self.evaluations += 1  # on all stages: one of them may become the last
        reports = self.transaction.evaluated if self.transaction is not None else []
        losses = losses or reported.of_an_adopted_stage(reports)
        if "lm loss" in losses:
            reporting.evaluation(self, losses["lm loss"].item(), data_iterator, seconds)

    def save(self, original: Callable[..., Any], iteration: int, args: Any, kwargs: Any) -> None:
        """Megatron's save_checkpoint, tried again if a process dies in it."""
        if self.saved == iteration and not self.training_over:
            return  # what comes after this step is done again, but this was done
        started = time.monotonic()
        written = True
        with (self.watch or NO_WATCH).saving():
            if self.resilient:
                from megatron_ft.recover.saving import save

                written = save(self, lambda: original(iteration, *args, **kwargs), iteration)
            else:
                original(iteration, *args, **kwargs)
        if not written:
            return
        self.saved = iteration
        reporting.checkpoint(self, iteration, time.monotonic() - started)
        if self.observer.log.elected:
            note_checkpoint(iteration)

    # -- failures --------------------------------------------------------------------------------

    def mend(
        self, how: str, facts: Mapping[str, Any] | None = None, *, refills: bool = False
    ) -> Repaired:
        """Repair the world and write down what happened.

        Args:
            how: Where the failure was noticed.
            facts: What the others want to know of this process.
            refills: Whether the caller goes on well with replicas that came back in this repair.

        Raises:
            ReplicaLost: This process serves no slot any more, or must enter training again because
                replicas came back at a place where the others could not.
            NoWayOn: The planner has no rule left.
        """
        assert self.world is not None
        if self.watch is not None:
            self.watch.tick()
        self._how = how
        repaired = self.membership.repair({"iteration": self.iteration, **(facts or {})})
        asked = bool((facts or {}).get("boundary"))
        self._repairs_in_vain = 0 if repaired.dead or asked else self._repairs_in_vain + 1
        if self._repairs_in_vain > MAX_REPAIRS_IN_VAIN:
            raise RuntimeError(
                f"{how}: MPI reports failures, but nobody has died in {MAX_REPAIRS_IN_VAIN} repairs"
            )
        self.stop(repaired)
        if self.membership.leaving:
            self.part()
        if not self.world.slots:
            raise ReplicaLost(f"process {self.world.process} serves no slot any more: to the pool")
        if (repaired.refilled or filled(repaired.plan)) and not refills:
            raise ReplicaLost("replicas came back outside of a step: training is entered again")
        return repaired

    def comes_to(self, how: str) -> None:
        """What a death that is noticed from now on is noticed at."""
        self._how = how

    def boundary(self) -> None:
        """Between two steps: let pool processes take their slots, if somebody asked for it."""
        assert self.world is not None
        if self.world.boundary_asked:
            # Whoever has noticed a death since the vote waits in an agreement; this ends it.
            self.world.agree(True)
            self.mend("step boundary", {"boundary": True}, refills=True)

    def stop(self, repaired: Repaired) -> None:
        """Raise NoWayOn if the repair's plan says so."""
        if repaired.plan is not None and repaired.plan.stop is not None:
            raise NoWayOn(f"{repaired.plan.stop.reason}. {repaired.plan.stop.advice}")

    def filled(self, fill: Fill | Rebuild, moved: Moved | None) -> None:
        """This process serves a slot from now on."""
        reporting.slot_filled(self, fill, moved)

    def adopted(self, adopt: Adopt, moved: Moved | None) -> None:
        """This process serves a slot beside its own from now on."""
        reporting.stage_adopted(self, adopt, moved)

    def evaluation_state(self) -> dict[str, Any]:
        """What of evaluations and checkpoints all who train know alike."""
        consumed = getattr(self.args, "consumed_valid_samples", 0)
        return {
            "count": self.evaluations,
            "consumed": consumed,
            "starts": {} if self.transaction is None else dict(self.transaction.eval_starts),
            "from": self.evaluates_from,
            "saved": self.saved,
        }

    def take_evaluation_state(self, known: Mapping[str, Any]) -> None:
        """Know what the others know who trained while this process waited in the pool."""
        self.evaluations, self.evaluates_from = known["count"], known["from"]
        self.saved, self.args.consumed_valid_samples = known["saved"], known["consumed"]
        self.transaction.eval_starts = dict(known["starts"])

    def kind_of_data(self, training: bool) -> str:
        """What is read now, for a process whose own stage reads nothing."""
        if training:
            return "train"
        # After training Megatron evaluates on the validation data, then on the test data.
        last = self.training_over and self._evaluations_after > int(self.args.do_valid)
        return "test" if last else "valid"

    def lose_state(self, stage: int) -> None:
        """What this process holds of a stage is gone, although it lives: CheckFree's simulation.

        Args:
            stage: Its own one, or one that it has adopted.

        Raises:
            WorldBroken: Always: the step cannot go on, and the repair finds the state missing.
        """
        from megatron_ft.checkfree import parts

        assert self.world is not None
        beside = None if self.hosting is None else self.hosting.stage
        if beside is not None and beside.stage == stage:
            parts.destroy(beside.model, beside.optimizer)
            beside.holds_state = False
        else:
            parts.destroy(self.model, self.optimizer)
            self.membership.receiving = True
        raise WorldBroken("lose-stage", "model", f"the state of stage {stage} is lost")

    def _repaired(self, repaired: Repaired) -> None:
        self.elect()
        if self.transaction is not None and self.transaction.speeds is not None:
            self.transaction.speeds.forget()
        # Where all meet for the last time nothing is repaired, unless somebody has died since.
        if repaired.plan is not None or any(map(repaired.before.slots_of, repaired.dead)):
            reporting.incident(self, repaired, self._how)


def _not_built(**kwargs: Any) -> Any:
    raise AssertionError("nothing has been built yet")


_current: Session | None = None


def open_session(session: Session) -> Session:
    """Make ``session`` the one that patches see."""
    global _current
    assert _current is None, "a session is open already"
    _current = session
    return session


def close_session() -> None:
    global _current
    _current = None


def current() -> Session:
    """The open session."""
    assert _current is not None, "no session is open"
    return _current
