"""Puts ReCoVer together once Megatron has built its model and optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_ft.recover.policy_workload import PolicyWorkload
from megatron_ft.rng import KeyedRng
from megatron_ft.transaction import StepTransaction

if TYPE_CHECKING:
    from megatron_ft.session import Session


def build_transaction(session: Session) -> None:
    """Make the session's step transaction."""
    args, world = session.args, session.world
    assert world is not None
    rank = dist.get_rank()
    session.loss_group = dist.new_group([rank], use_local_synchronization=True)
    micro = args.micro_batch_size
    keyed = None
    if args.hidden_dropout > 0 or args.attention_dropout > 0:
        keyed = KeyedRng(
            args.seed, mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()
        )
    transaction = StepTransaction(
        world=world,
        policy=session.policy,
        workload=PolicyWorkload(
            world.topology.data,
            args.global_batch_size // micro // world.topology.data,
            args.ft_recover_policy,
            args.ft_recover_replay,
        ),
        eval_workload=PolicyWorkload(
            world.topology.data,
            args.eval_global_batch_size // args.eval_micro_batch_size // world.topology.data,
            "balanced",
            "exact",
        ),
        replica=mpu.get_data_parallel_rank(),
        loss_group=mpu.get_data_parallel_group(with_context_parallel=True),
        is_last_stage=mpu.is_pipeline_last_stage(),
        # After an evaluation all enter training again together with who came back.
        repair=lambda how, facts, training: session.mend(how, facts, refills=training),
        at_boundary=session.boundary,
        wants_boundary=session.membership.wants_boundary,
        keyed_rng=keyed,
    )
    transaction.reports.counts_ids = mpu.get_context_parallel_rank() == 0
    transaction.kind_of_evaluation = lambda: session.kind_of_data(training=False)
    transaction.on_commit = session.committed_step
    transaction.eval_starts["valid"] = args.consumed_valid_samples
    transaction.eval_batch = args.eval_global_batch_size
    transaction.optimizer = session.optimizer
    transaction.alone = session.loss_group
    session.transaction = transaction
