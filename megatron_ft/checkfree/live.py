"""A rebuild in a running job: who sends, with what weights, as all processes know them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core import parallel_state as mpu

from megatron_ft.checkfree import lr_scale
from megatron_ft.checkfree.norms import shard_grad_square
from megatron_ft.checkfree.rebuild import From, rebuild, send_stage
from megatron_ft.checkfree.weights import norm_of, plan_sources
from megatron_ft.schedule.executor import Executor
from megatron_ft.schedule.routes import Route, identity, routes

if TYPE_CHECKING:
    from megatron_ft.recovery_plan import Rebuild
    from megatron_ft.rejoin.transfer import Moved
    from megatron_ft.session import Session
    from megatron_ft.topology import Shard
    from megatron_ft.world.repaired import Repaired


def install(session: Session) -> None:
    """Prepare a process that has built its stage: what a rebuild needs to know of each step."""
    lr_scale.install(session, session.early.checkfree)
    transaction = session.transaction
    transaction.measure = lambda: measure(session)
    if session.early.checkfree.plus:
        _swap_routes(session)


def measure(session: Session) -> dict[Shard, float]:
    """What the gradient norms need of this process's own stage and of one that it has adopted."""
    world = session.world
    assert world is not None and world.label is not None
    own = world.topology.shard_of(world.label)
    squares = {own: shard_grad_square(session.optimizer, session.model)}
    pair = session.transaction.pair
    if pair is not None:
        beside = pair.adopted
        squares[beside.shard] = shard_grad_square(beside.optimizer, beside.model)
    return squares


def _swap_routes(session: Session) -> None:
    """CheckFree+: a share of the microbatches of each step visits the ends in swapped order."""
    world, transaction, args = session.world, session.transaction, session.args
    assert world is not None
    topology, share = world.topology, session.early.checkfree.swap_share
    per_replica = args.global_batch_size // args.micro_batch_size // topology.data

    def choose(num_microbatches: int, forward_only: bool) -> Sequence[Route]:
        if forward_only:
            return (identity(topology.pipeline),) * num_microbatches
        return routes(
            topology.pipeline,
            share,
            transaction.attempted_ids(),
            start=(transaction.iteration - 1) * per_replica,
            data=topology.data,
        )

    transaction.executor = Executor(routes=choose)
    transaction.pipeline_group = mpu.get_pipeline_model_parallel_group()


def take_part(session: Session, action: Rebuild, repaired: Repaired) -> Moved | None:
    """This process's part in one rebuild; None where it has none.

    Args:
        action: Which slot is rebuilt by whom, from which slots.
        repaired: The repair that decided it; its reports carry each process's gradient norm.
    """
    world = session.world
    assert world is not None
    topology = world.topology
    lost = topology.stage_of(action.slot)
    # Every process keeps this, for it is saved with the checkpoint by whoever writes.
    lr_scale.note_rebuilt(session, lost, session.committed)
    processes = [world.assignment.process_of[slot] for slot in action.from_slots]
    comm = world.comm
    if action.process == world.process:
        told = [
            (report.facts["committed"], report.facts["grad_squares"])
            for _, report in sorted(repaired.reports.items())
        ]
        stages = [topology.stage_of(slot) for slot in action.from_slots]
        found = plan_sources(
            lost,
            stages,
            topology.pipeline,
            options=session.early.checkfree,
            norms={stage: norm_of(stage, topology.tensor, told) for stage in stages},
        )
        assert found is not None and len(found) == len(processes), (found, action)
        sources = []
        for source, process in zip(found, processes, strict=True):
            assert process is not None
            sources.append(From(world.rank_of(process), source.stage, source.weight))
        with world.watch.waiting():
            return rebuild(session, comm, sources, session.early.checkfree)
    if world.process in processes:
        with world.watch.waiting():
            return send_stage(session, comm, world.rank_of(action.process))
    return None
