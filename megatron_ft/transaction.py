"""One training step is one transaction (docs/design.md): nothing a failure tears apart is visible.

``StepTransaction.wrap`` stands between Megatron's ``train_step`` and its schedule. It runs the
schedule over the microbatch ids that this replica has to compute, lets Megatron reduce, sums what
is reported, rehearses the collectives of the optimizer step, and votes. If anyone failed, the world
is repaired, reduced buckets are restored, lost ids are dealt to living replicas, and only those are
computed. What returns to Megatron is committed: its optimizer step is local arithmetic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ft.recover.buckets import BucketSnapshots
from megatron_ft.recover.policy_workload import PolicyWorkload
from megatron_ft.recover.timers import break_off, running
from megatron_ft.rejoin.refill import filled
from megatron_ft.schedule.passage import passage_of
from megatron_ft.world.errors import WorldBroken
from megatron_ft.world.world import Repaired, World

if TYPE_CHECKING:
    from megatron_ft.adopt.pair import Pair
    from megatron_ft.mecefo.live import Mecefo
    from megatron_ft.mecefo.quotas import Speeds
    from megatron_ft.schedule.executor import Executor
    from megatron_ft.topology import Shard

logger = logging.getLogger("megatron_ft.transaction")


@dataclass
class Totals:
    """What this replica reports of the ids that it has computed in this step."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    tokens: torch.Tensor | None = None

    def add_reports(self, reports: Sequence[Mapping[str, torch.Tensor]]) -> None:
        for report in reports:
            for key, value in report.items():
                value = value.detach().view(-1).double()
                if value.numel() == 1:  # a mean over one microbatch: sum and count
                    value = torch.cat([value, torch.ones_like(value)])
                self.sums[key] = self.sums[key] + value if key in self.sums else value


@dataclass(frozen=True)
class Committed:
    """A committed step as the elected writer reports it."""

    microbatch_counts: tuple[int, ...]
    """How often each id was contributed; all ones."""
    attempts: int
    recomputed: int
    """Ids computed in attempts after the first, by all replicas."""
    seconds: float


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
        keyed_rng: Seeds the generators for (iteration, microbatch id); None without dropout.
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
        keyed_rng: Callable[[int, int], None] | None = None,
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
        self.snapshots: BucketSnapshots | None = None
        self.optimizer: Any = None
        self.on_commit: Callable[[int], None] = lambda iteration: None
        self.pipeline_done = False
        self.contributes = True
        self.rehearsed: dict[str, Any] = {}
        self.measure: Callable[[], dict[Shard, float]] | None = None
        """What of the unclipped gradients is remembered of each step; None for nothing."""
        self.measured: dict[Shard, float] | None = None
        self.executor: Executor | None = None
        """What runs in the place of Megatron's schedule: its routes are asked of the ids."""
        self.mecefo: Mecefo | None = None
        """Degrades layers and applies MeCeFO's gradient rule, where that is on."""
        self.speeds: Speeds | None = None
        """How fast each replica is, where quotas follow from that."""
        self._computing_since = 0.0
        self._seconds: float | None = None
        """What this replica's pipeline took for the ids of the attempt."""
        self._times: dict[int, float] = {}
        """Seconds of a microbatch in this attempt, by replica."""
        self.pipeline_group: Any = None
        """With an executor: the group over which reports are summed before the replicas'."""
        self.placed: Executor | None = None
        """Likewise while a process of this replica runs two stages."""
        self.pair: Pair | None = None
        """Both stages, where this process runs one beside its own."""
        self.alone: Any = None
        """The group of this slot alone."""
        self.evaluated: list[dict[str, Any]] = []
        """What the batches of an evaluation reported; whoever runs it empties the list."""
        self._attempted: list[int] = []
        self._base = 0
        """Dataset sample at which the microbatch 0 of what runs begins."""
        self._reports: list[dict[str, Any]] = []
        self.last: Committed | None = None
        self.iteration = 0
        self.step_start = 0
        """Dataset sample at which the step's microbatch 0 begins."""
        self.eval_starts: dict[str, int] = {}
        self.eval_batch = 0
        self._finalize: Callable[..., None] | None = None
        self._totals = Totals()
        self._computing: ForwardStep | None = None
        self._scalers_before: list[Any] = []

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
            ids = list(workload.to_compute(self.replica))
            if attempts > 1:
                replicas = range(self.world.topology.data)
                recomputed += sum(len(workload.to_compute(r)) for r in replicas)
            # Who runs which stage may change from attempt to attempt.
            runs = self.placed or self.executor or schedule
            counts, ok = self._attempt(runs, call, workload, ids, training)
            if self.vote(ok, training):
                break
            self._mend(workload, training)
        workload.commit()
        if not training:
            self.evaluated += self._reports
        if training:
            if self.speeds is not None and attempts == 1:
                self.speeds.observe(self._times)
            self.on_commit(self.iteration)
            if self.pair is not None:
                self.pair.step()  # as Megatron's own: its learning rate may depend on the iteration
        if self.snapshots is not None:
            self.snapshots.drop()
        self.last = Committed(counts, attempts, recomputed, time.monotonic() - started)
        return self._reports

    # -- one attempt -----------------------------------------------------------------------------

    def _begin(self, workload: PolicyWorkload, call: dict[str, Any], training: bool) -> None:
        chunks = chunks_of(call["model"])
        if training:
            self._adopt_config(chunks)
            if self.snapshots is None:
                groups = [g for c in chunks for g in c.bucket_groups]
                self.snapshots = BucketSnapshots(groups)
                self.host(self.pair)
            self._scalers_before = [scaler.state_dict() for scaler in self._scalers()]
        self._totals = Totals()
        self._computing = None
        self.rehearsed = {}
        live = self.world.assignment.whole_replicas(self.world.topology)
        self._deal(workload, live, training)
        if self.pair is not None:
            self.pair.begin(training)
        iterators = self._iterators(call)
        self._base = self.step_start
        if iterators and not training:
            self._base = self._eval_start(iterators[0])
        for iterator in iterators:
            iterator.begin_step(self._base)

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

    def _attempt(
        self,
        schedule: Callable[..., Any],
        call: dict[str, Any],
        workload: PolicyWorkload,
        ids: list[int],
        training: bool,
    ) -> tuple[tuple[int, ...], bool]:
        self.policy.in_transaction, self.pipeline_done = True, False
        self.contributes = workload.counts(self.replica)
        counts: tuple[int, ...] = ()
        timers = chunks_of(call["model"])[0].config.timers
        timed = running(timers)
        try:
            if ids:
                self._compute(schedule, call, ids)
            elif training:
                self._reduce_only(call)
            self.pipeline_done = True
            counts = self._sum_reports(call["num_microbatches"])
            if training:
                if self.mecefo is not None:
                    self.mecefo.after_reduction(workload.contributed())
                if self.speeds is not None:
                    self._times = self._exchange_times(self.speeds, len(ids))
                self._rehearse()
            return counts, True
        except WorldBroken as broken:
            logger.warning("attempt of iteration %d broke: %s", self.iteration, broken)
            self.world.revoke_active()
            self.world.revoke_groups(pipeline=not self.pipeline_done)
            break_off(timers, timed)
            return counts, False
        finally:
            self.policy.in_transaction = False

    def _compute(self, schedule: Callable[..., Any], call: dict[str, Any], ids: list[int]) -> None:
        for iterator in self._iterators(call):
            if iterator.base != self._base:  # of a stage adopted in the middle of the step
                iterator.begin_step(self._base)
            iterator.assign(ids)
        expected = call["num_microbatches"]
        per_token = chunks_of(call["model"])[0].config.calculate_per_token_loss
        scale = 1.0 if per_token else len(ids) / expected
        self._attempted = ids
        self._seconds, self._computing_since = None, time.monotonic()
        self._computing = ForwardStep(call["forward_step_func"], ids, scale, self._before)
        call = call | {"forward_step_func": self._computing, "num_microbatches": len(ids)}
        if self.pair is None:
            schedule(**call)
        else:
            with self.pair.both(call) as both:
                schedule(**both)
        self._bank()

    def _bank(self) -> None:
        """This slot has computed all ids of the attempt: from now on they are reported."""
        step, self._computing = self._computing, None
        if step is not None:
            passes = len(step.ids) * (1 if self.pair is None else 2)
            assert step.done == passes, f"{step.done} of {passes} forward passes ran"
            self._totals.add_reports(step.reports)
            self._totals.ids += step.reported

    def _reduce_only(self, call: dict[str, Any]) -> None:
        """Reduce again what is there: this replica has nothing more to compute."""
        assert self.snapshots is not None
        chunks = chunks_of(call["model"])
        config = chunks[0].config
        self.snapshots.start_reduction()
        tokens = torch.zeros([], dtype=torch.int, device="cuda")
        config.finalize_model_grads_func(
            chunks,
            tokens if config.calculate_per_token_loss else None,
            pg_collection=call.get("pg_collection"),
            force_all_reduce=call.get("force_all_reduce", False),
        )

    def _adopt_config(self, chunks: Sequence[Any]) -> None:
        config = chunks[0].config
        if getattr(config.finalize_model_grads_func, "__self__", None) is not self:
            self._finalize = config.finalize_model_grads_func
            config.finalize_model_grads_func = self.finalize

    def finalize(self, model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
        """Megatron's finalize_model_grads; reached when this slot's pipeline work is done."""
        assert self._finalize is not None
        self.pipeline_done = True
        self._seconds = time.monotonic() - self._computing_since
        self._bank()
        if num_tokens is not None:
            # Of all attempts of this step: what was computed before a failure still counts.
            known = self._totals.tokens
            self._totals.tokens = num_tokens.clone() if known is None else known + num_tokens
            num_tokens = self._totals.tokens.clone() * int(self.contributes)
        if self.pair is not None:
            self.pair.finalize(num_tokens, bool(kwargs.get("force_all_reduce")))
        else:
            self._finalize(model, num_tokens, **kwargs)

    def before_reduction(self, bucket_group: Any) -> None:
        """Snapshot a bucket group that Megatron is about to reduce; a spare contributes zeros."""
        if not self.policy.in_transaction or self.snapshots is None:
            return
        self.policy.watch.tick()
        self.snapshots.take(bucket_group, self.world.epoch)
        if not self.contributes:
            for bucket in bucket_group.buckets:
                bucket.grad_data.zero_()

    def _before(self, microbatch: int, stage: int | None) -> None:
        self.policy.watch.tick()
        if self.keyed_rng is not None:
            self.keyed_rng(self.iteration, microbatch, stage)

    def host(self, pair: Pair | None) -> None:
        """From now on this process runs two stages, or its own alone."""
        self.pair = pair
        if self.snapshots is not None:
            self.snapshots.host(() if pair is None else pair.adopted.bucket_groups)

    def rehearses(self, optimizer: Any) -> bool:
        """Whether the collectives of this optimizer's step are those that were rehearsed."""
        hosted = self.pair is not None and optimizer is self.pair.adopted.optimizer
        return hosted or optimizer is self.optimizer

    def _iterators(self, call: dict[str, Any]) -> list[Any]:
        """The ledger's iterators of this process's slots."""
        own = loader_of(call["data_iterator"])
        other = None if self.pair is None else self.pair.iterator(own, call["forward_only"])
        return [iterator for iterator in (own, other) if iterator is not None]

    @property
    def last_reports(self) -> list[dict[str, Any]]:
        """What the last step reported, sums and counts; empty but on the last stage."""
        return self._reports

    def attempted_ids(self) -> Sequence[int]:
        """The ids of the attempt under way, in the order of its microbatches."""
        return self._attempted

    def quotas(self) -> list[int]:
        """Microbatches that each replica computed of the last training step."""
        return self.workload.quotas()

    # -- what a commit needs ---------------------------------------------------------------------

    def _sum_reports(self, per_replica: int) -> tuple[int, ...]:
        """Sum over the replicas what was reported, and how often each id was contributed.

        Returns:
            How often each id counts, on the last stage; empty elsewhere.
        """
        self._reports = []
        group = self.loss_group if self.is_last_stage else None
        if group is None and self.pair is not None:
            group = self.pair.loss_group
        if group is None and self.pipeline_group is None:
            return ()
        # Exchangeable spares count samples from beyond the step: fewer than B of them.
        num_ids = 2 * per_replica * self.world.topology.data
        counts = torch.zeros(num_ids, dtype=torch.double, device="cuda")
        for microbatch in self._totals.ids:
            counts[microbatch] += 1
        # A replica with nothing to compute knows the names from the step before.
        self._known_keys = sorted(self._totals.sums) or self._known_keys
        nothing = torch.zeros(2, dtype=torch.double)
        sums = [self._totals.sums.get(key, nothing).to(counts) for key in self._known_keys]
        vector = torch.cat([counts, *sums])
        if not self.contributes:
            vector.zero_()
        if self.pipeline_group is not None:
            # Routes end at several stages; the last one reports for all.
            dist.all_reduce(vector, group=self.pipeline_group)
            if group is None:
                return ()
        dist.all_reduce(vector, group=group)
        pairs = vector[num_ids:].view(-1, 2).float()
        self._reports = [dict(zip(self._known_keys, pairs, strict=True))]
        return tuple(int(count) for count in vector[:num_ids].tolist())

    _known_keys: Sequence[str] = ("lm loss",)

    def _exchange_times(self, speeds: Speeds, num_ids: int) -> dict[int, float]:
        """Seconds of a microbatch on the slowest process of each replica, 0 where none ran."""
        times = torch.zeros(self.world.topology.data, dtype=torch.double, device="cuda")
        if num_ids and self._seconds is not None:
            times[self.replica] = speeds.measured(self._seconds, num_ids)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return dict(enumerate(times.tolist()))

    def _rehearse(self) -> None:
        """Run the collectives of ``optimizer.step`` now, so that none is left after the vote."""
        # Of two stages the optimizers are asked as one.
        optimizer = self.optimizer if self.pair is None else self.pair
        found_inf = optimizer.prepare_grads()
        rehearsed: dict[str, Any] = {"prepare_grads": found_inf}
        if not found_inf:
            if self.world.assignment.adopted:
                from megatron_ft.adopt.step import grad_norm

                rehearsed["get_grad_norm"] = grad_norm(self)
            else:
                rehearsed["get_grad_norm"] = optimizer.get_grad_norm()
            if self.optimizer.config.log_num_zeros_in_grad:
                rehearsed["count_zeros"] = optimizer.count_zeros()
            optimizer._compute_grad_norms_by_group()
        self.measured = self.measure() if self.measure is not None and not found_inf else None
        self.rehearsed = rehearsed

    def _eval_start(self, iterator: Any) -> int:
        """Where the next batch of evaluation begins in its dataset."""
        kind = iterator.kind
        start = self.eval_starts.get(kind, iterator.base)
        self.eval_starts[kind] = start + self.eval_batch
        return start

    def vote(self, ok: bool, training: bool) -> bool:
        """The one agreement of an attempt: everything that I had to do under this epoch is done."""
        return self.world.agree(ok, boundary=training and self.wants_boundary())

    # -- after a failure -------------------------------------------------------------------------

    def _mend(self, workload: PolicyWorkload, training: bool) -> None:
        if training:
            self._restore_scalers()  # first, for this process may send its state in the repair
        repaired = self.repair(
            f"attempt of step {self.iteration}",
            {"done": self.pipeline_done, "replica": self.replica, "training": training},
            training,
        )
        live = self.world.assignment.whole_replicas(self.world.topology)
        assert self.replica in live, "a process of a dark replica goes to the pool"
        if repaired.refilled or filled(repaired.plan):
            self._start_over(workload, live, training)
            return
        undone = {
            r.facts["replica"]
            for r in repaired.reports.values()
            if "replica" in r.facts and not r.facts["done"]
        }
        # A stage that was adopted has lost its gradients, whatever its replica's others have done.
        undone |= repaired.adopted
        workload.after_failure(live, sorted(undone & set(live)))
        if training:
            assert self.snapshots is not None
            self.snapshots.reset_bookkeeping()
            if workload.forgets(self.replica):
                self.snapshots.zero()
            else:
                self.snapshots.restore(repaired.epoch)
            if self.mecefo is not None:
                if workload.forgets(self.replica):
                    self.mecefo.discard()
                self.mecefo.begin_attempt(self.iteration, live)
        if workload.forgets(self.replica):
            self._totals = Totals()
        self.rehearsed = {}

    def _start_over(self, workload: PolicyWorkload, live: Sequence[int], training: bool) -> None:
        """Replicas came back in the middle of the step: all begin it anew, as they do."""
        self._deal(workload, live, training)
        self._totals, self.rehearsed = Totals(), {}
        if training:
            assert self.snapshots is not None
            self.snapshots.reset_bookkeeping()
            self.snapshots.zero()

    def _scalers(self) -> list[Any]:
        """The loss scalers, which the rehearsal of an attempt moves on."""
        scalers = [getattr(o, "grad_scaler", None) for o in self.optimizer.chained_optimizers]
        return [scaler for scaler in scalers if scaler is not None]

    def _restore_scalers(self) -> None:
        for scaler, before in zip(self._scalers(), self._scalers_before, strict=True):
            scaler.load_state_dict(before)


class ForwardStep:
    """The user's forward step over given ids, its loss divided by G whatever their number.

    Megatron's schedule divides each loss by the number of microbatches that it runs; scaling by
    n/G beforehand leaves 1/G, ReCoVer's invariant.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        ids: Sequence[int],
        scale: float,
        before: Callable[[int, int | None], None],
    ) -> None:
        self.inner = inner
        self.ids = ids
        self.scale = scale
        self.before = before
        self.done = 0
        self.reports: list[Mapping[str, torch.Tensor]] = []
        self.reported: list[int] = []
        """The ids whose loss was computed here."""

    def __call__(self, data_iterator: Any, model: Any, *args: Any) -> tuple[Any, Any]:
        # Megatron's schedules take them in order; an executor says which one it is.
        passage = passage_of(model)
        microbatch = self.ids[self.done if passage is None else passage.microbatch]
        self.before(microbatch, None if passage is None else passage.stage)
        self.done += 1
        output, loss_func = self.inner(data_iterator, model, *args)

        def reported(*loss_args: Any, **loss_kwargs: Any) -> Any:
            loss, *rest = loss_func(*loss_args, **loss_kwargs)
            self.reports.append(rest[-1])
            self.reported.append(microbatch)
            return (loss if self.scale == 1.0 else loss * self.scale, *rest)

        return output, reported


def chunks_of(model: Any) -> list[Any]:
    """Megatron's model chunks, however it passes them."""
    return model if isinstance(model, list) else [model]


def loader_of(data_iterator: Any) -> Any:
    """The ledger's iterator inside what Megatron passes around; None where nothing is read."""
    if isinstance(data_iterator, list):
        assert len(data_iterator) == 1, "one model chunk only"
        data_iterator = data_iterator[0]
    return getattr(data_iterator, "iterable", data_iterator)
