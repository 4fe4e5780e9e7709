"""One training step is one transaction (docs/design.md): nothing a failure tears apart is visible.

``StepTransaction.wrap`` stands between Megatron's ``train_step`` and its schedule. In each attempt
(``recover.attempt``) this process runs the schedule over the microbatch ids that its replica has to
compute, lets Megatron reduce, sums what is reported, and rehearses the collectives of the optimizer
step; then all vote. If anyone failed, the world is repaired, reduced buckets are restored, lost ids
are dealt to living replicas, and only those are computed. What returns to Megatron is committed:
its optimizer step is local arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_ft.recover.attempt import Attempt
from megatron_ft.recover.buckets import BucketSnapshots
from megatron_ft.recover.policy_workload import PolicyWorkload
from megatron_ft.recover.rehearsal import LossScalers
from megatron_ft.recover.reports import Committed, Reports
from megatron_ft.recover.schedule_call import chunks_of, iterators_of
from megatron_ft.rejoin.refill import filled
from megatron_ft.world.repaired import Repaired
from megatron_ft.world.world import World

if TYPE_CHECKING:
    from megatron_ft.adopt.pair import Pair
    from megatron_ft.mecefo.live import Mecefo
    from megatron_ft.mecefo.quotas import Speeds
    from megatron_ft.schedule.executor import Executor
    from megatron_ft.topology import Shard


class StepTransaction:
    """Runs Megatron's schedules so that each call commits on all living replicas or on none.

    Args:
        world: The processes.
        policy: The resilient policy of the process groups, told when an attempt runs.
        workload: Who computes what, for training steps.
        eval_workload: Likewise for evaluation.
        replica: The replica that this process serves.
        loss_group: Data- and context-parallel group over which reports are summed.
        is_last_stage: Whether the loss is computed here.
        repair: Repairs the world, in a training step or not; raises ReplicaLost where this process
            has no slot afterwards.
        at_boundary: Called before each training step.
        wants_boundary: Whether this process asks for a repair before the next one.
        keyed_rng: Seeds the generators for (iteration, microbatch id, stage, or None for this
            slot's); None without dropout.
    """

    def __init__(
        self,
        world: World,
        policy: Any,
        workload: PolicyWorkload,
        eval_workload: PolicyWorkload,
        replica: int,
        loss_group: dist.ProcessGroup,
        is_last_stage: bool,
        repair: Callable[[str, Mapping[str, Any], bool], Repaired],
        at_boundary: Callable[[], None],
        wants_boundary: Callable[[], bool],
        keyed_rng: Callable[[int, int, int | None], None] | None = None,
    ) -> None:
        self.world = world
        self.policy = policy
        self.workload = workload
        self.eval_workload = eval_workload
        self.replica = replica
        self.loss_group = loss_group
        self.is_last_stage = is_last_stage
        self.repair = repair
        self.at_boundary = at_boundary
        self.wants_boundary = wants_boundary
        self.keyed_rng = keyed_rng
        # What the strategies put here.
        self.optimizer: Any = None
        self.on_commit: Callable[[int], None] = lambda iteration: None
        self.measure: Callable[[], dict[Shard, float]] | None = None
        """What of the unclipped gradients is remembered of each step; None for nothing."""
        self.executor: Executor | None = None
        """What runs in the place of Megatron's schedule: its routes are asked of the ids."""
        self.pipeline_group: Any = None
        """With an executor: the group over which reports are summed before the replicas'."""
        self.placed: Executor | None = None
        """Likewise while a process of this replica runs two stages."""
        self.pair: Pair | None = None
        """Both stages, where this process runs one beside its own."""
        self.alone: Any = None
        """The group of this slot alone."""
        self.mecefo: Mecefo | None = None
        """Degrades layers and applies MeCeFO's gradient rule, where that is on."""
        self.speeds: Speeds | None = None
        """How fast each replica is, where quotas follow from that."""
        self._committed_epochs: tuple[int | None, int | None] = (None, None)
        """In which the last two steps were committed."""
        # The step under way.
        self.iteration = 0
        self.step_start = 0
        """Dataset sample at which the step's microbatch 0 begins."""
        self.base = 0
        """Dataset sample at which the microbatch 0 of what runs begins."""
        self.snapshots: BucketSnapshots | None = None
        self.reports = Reports()
        self.rehearsed: dict[str, Any] = {}
        """What the optimizer's collectives gave, by the name of its method."""
        self.measured: dict[Shard, float] | None = None
        self._attempt: Attempt | None = None
        self._scalers: LossScalers | None = None
        self._finalize: Callable[..., None] | None = None
        # What is left of earlier ones.
        self.last: Committed | None = None
        self.eval_starts: dict[str, int] = {}
        """Where the next batch of evaluation begins in its dataset, by its kind."""
        self.eval_batch = 0
        self._evaluates: str | None = None
        """The kind of data of the batch of evaluation under way."""
        self.kind_of_evaluation: Callable[[], str] = lambda: "valid"
        """The same on stages that read data and on those that do not, so that all know alike where
        evaluation is."""
        self.evaluated: list[dict[str, Any]] = []
        """What the batches of an evaluation reported; whoever runs it empties the list."""

    # -- what Megatron calls ---------------------------------------------------------------------

    def wrap(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's forward-backward function, made a transaction."""

        def forward_backward(**call: Any) -> Any:
            if call.get("collect_non_loss_data"):
                return schedule(**call)
            return self.run(schedule, call)

        return forward_backward

    def run(self, schedule: Callable[..., Any], call: dict[str, Any]) -> list[dict[str, Any]]:
        """One step or one batch of evaluation, until it commits.

        Returns:
            What Megatron expects of a schedule on this stage, with sums over all replicas: the
            groups over which Megatron would sum again are of this slot alone meanwhile.

        Raises:
            ReplicaLost: This process's replica cannot go on; it belongs to the pool now.
        """
        training = not call["forward_only"]
        if training:
            self.at_boundary()
            self.policy.entering = False
        workload = self.workload if training else self.eval_workload
        started = time.monotonic()
        self._begin(workload, call, training)
        attempts = recomputed = 0
        while True:
            attempts += 1
            self._attempt = attempt = Attempt(self, workload, call)
            if attempts > 1:
                replicas = range(self.world.topology.data)
                recomputed += sum(len(workload.to_compute(r)) for r in replicas)
            if training and not self._settled(workload):
                assert self.snapshots is not None
                self.snapshots.in_list_order()
            # Who runs which stage may change from attempt to attempt.
            counts, ok = attempt.run(self.placed or self.executor or schedule)
            if self.vote(ok, training):
                break
            self._mend(attempt, training)
        workload.commit()
        if not training:
            self.evaluated += self.reports.summed
            if self._evaluates is not None:
                # Not before the vote, which is the same for all: who begins again begins alike.
                self.eval_starts[self._evaluates] = self.base + self.eval_batch
        if training:
            # In the first step of an epoch some have begun anew and others have only just come.
            if self.speeds is not None and self.asked_in_this_epoch:
                self.speeds.observe(attempt.times)
            self._committed_epochs = (self._committed_epochs[1], self.world.epoch)
            self.on_commit(self.iteration)
            if self.pair is not None:
                self.pair.step()  # as Megatron's own: its learning rate may depend on the iteration
        if self.snapshots is not None:
            self.snapshots.drop()
        self.last = Committed(counts, attempts, recomputed, time.monotonic() - started)
        return self.reports.summed

    def finalize(self, model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
        """Megatron's finalize_model_grads; reached when this slot's pipeline work is done."""
        assert self._finalize is not None and self._attempt is not None
        self._attempt.computed()
        if num_tokens is not None:
            num_tokens = self.reports.add_tokens(num_tokens) * int(self._attempt.contributes)
        if self.pair is not None:
            self.pair.finalize(num_tokens, bool(kwargs.get("force_all_reduce")))
        else:
            self._finalize(model, num_tokens, **kwargs)

    def before_reduction(self, bucket_group: Any) -> None:
        """Snapshot a bucket group that Megatron is about to reduce; a spare contributes zeros."""
        if not self.policy.in_transaction or self.snapshots is None:
            return
        assert self._attempt is not None
        self.policy.watch.tick()
        self.snapshots.take(bucket_group, self.world.epoch)
        if not self._attempt.contributes:
            for bucket in bucket_group.buckets:
                bucket.grad_data.zero_()

    def rehearses(self, optimizer: Any) -> bool:
        """Whether the collectives of this optimizer's step are those that were rehearsed."""
        hosted = self.pair is not None and optimizer is self.pair.adopted.optimizer
        return hosted or optimizer is self.optimizer

    # -- what others ask -------------------------------------------------------------------------

    def host(self, pair: Pair | None) -> None:
        """From now on this process runs two stages, or its own alone."""
        self.pair = pair
        if self.snapshots is not None:
            self.snapshots.host(() if pair is None else pair.adopted.bucket_groups)

    @property
    def last_reports(self) -> list[dict[str, Any]]:
        """What the last step reported, sums and counts; empty but on the last stage."""
        return self.reports.summed

    def attempted_ids(self) -> Sequence[int]:
        """The ids of the attempt under way, in the order of its microbatches."""
        assert self._attempt is not None
        return self._attempt.ids

    def quotas(self) -> list[int]:
        """Microbatches that each replica computed of the last training step."""
        return self.workload.quotas()

    # -- a step begins ---------------------------------------------------------------------------

    def _begin(self, workload: PolicyWorkload, call: dict[str, Any], training: bool) -> None:
        chunks = chunks_of(call["model"])
        if training:
            self._adopt_config(chunks)
            if self.snapshots is None:
                groups = [g for c in chunks for g in c.bucket_groups]
                self.snapshots = BucketSnapshots(groups)
                self.host(self.pair)
            self._scalers = LossScalers(self.optimizer)
        self.reports.forget()
        self.rehearsed = {}
        live = self.world.assignment.whole_replicas(self.world.topology)
        self._deal(workload, live, training)
        if self.pair is not None:
            self.pair.begin(training)
        iterators = iterators_of(call, self.pair)
        self.base = self.step_start
        self._evaluates = None
        if not training:
            self._evaluates = iterators[0].kind if iterators else self.kind_of_evaluation()
            start = iterators[0].base if iterators else 0
            self.base = self.eval_starts.get(self._evaluates, start)
        for iterator in iterators:
            iterator.begin_step(self.base)

    def _settled(self, workload: PolicyWorkload) -> bool:
        """Whether all replicas' backward passes make gradients ready in the same, known order.

        The same on all of them: with a failure or a newcomer the epoch is another one, and a whole
        step later each replica has seen the order.
        """
        live = self.world.assignment.whole_replicas(self.world.topology)
        computing = all(workload.to_compute(replica) for replica in live)
        return computing and self._committed_epochs == (self.world.epoch, self.world.epoch)

    @property
    def asked_in_this_epoch(self) -> bool:
        """Whether the processes of this epoch have committed a step together."""
        return self._committed_epochs[1] == self.world.epoch

    def _adopt_config(self, chunks: Sequence[Any]) -> None:
        config = chunks[0].config
        if getattr(config.finalize_model_grads_func, "__self__", None) is not self:
            self._finalize = config.finalize_model_grads_func
            config.finalize_model_grads_func = self.finalize

    def _deal(self, workload: PolicyWorkload, live: Sequence[int], training: bool) -> None:
        """Begin the step's workload, with fewer microbatches where a replica is slower."""
        quotas = None
        if training and self.mecefo is not None:
            before = self.mecefo.nodes
            self.mecefo.begin_step(self.iteration, live)
            if self.speeds is not None:
                if self.mecefo.nodes != before:
                    self.speeds.forget()
                num_ids = workload.ledger.num_microbatches
                quotas = self.speeds.quotas(num_ids, live, self.mecefo.slower)
        workload.begin(live, self.iteration, quotas=quotas)

    # -- an attempt ends -------------------------------------------------------------------------

    def vote(self, ok: bool, training: bool) -> bool:
        """The one agreement of an attempt: everything that I had to do under this epoch is done."""
        return self.world.agree(ok, boundary=training and self.wants_boundary())

    def _mend(self, broken: Attempt, training: bool) -> None:
        workload = broken.workload
        if training:
            assert self._scalers is not None
            self._scalers.restore()  # first, for this process may send its state in the repair
            if self.pair is not None:
                self.pair.follow_scales()
        repaired = self.repair(
            f"attempt of step {self.iteration}",
            {"done": broken.pipeline_done, "replica": self.replica, "training": training},
            training,
        )
        live = self.world.assignment.whole_replicas(self.world.topology)
        assert self.replica in live, "a process of a dark replica goes to the pool"
        if repaired.refilled or filled(repaired.plan):
            # Replicas came back in the middle of the step: all begin it anew, as they do.
            self._deal(workload, live, training)
            self._set_back(repaired.epoch, training, forgets=True)
            return
        undone = {
            r.facts["replica"]
            for r in repaired.reports.values()
            if "replica" in r.facts and not r.facts["done"]
        }
        # A stage that was adopted has lost its gradients, whatever its replica's others have done.
        undone |= repaired.adopted
        workload.after_failure(live, sorted(undone & set(live)))
        forgets = workload.forgets(self.replica)
        self._set_back(repaired.epoch, training, forgets)
        if training and self.mecefo is not None:
            if forgets:
                self.mecefo.discard()
            self.mecefo.begin_attempt(self.iteration, live)

    def _set_back(self, epoch: int, training: bool, forgets: bool) -> None:
        """Undo what the broken attempt left, and all of the step where this replica forgets it."""
        if training:
            assert self.snapshots is not None
            self.snapshots.reset_bookkeeping()
            if forgets:
                self.snapshots.zero()
            else:
                self.snapshots.restore(epoch)
        if forgets:
            self.reports.forget()
        self.rehearsed = {}
