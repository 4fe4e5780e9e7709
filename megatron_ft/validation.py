"""What cannot work is refused before any training, with a message that says what to do."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ft.faults.plan import plan_of
from megatron_ft.world.watch import Timeouts

type Refusals = list[tuple[bool, str]]
"""Whether it is so, and what is said then."""


class FtArgumentError(ValueError):
    """Flags that cannot work together; the message says what to do."""


def validate_early(options: argparse.Namespace) -> None:
    """Check the ``--ft-*`` flags by themselves, before torch is imported.

    Raises:
        FtArgumentError: They cannot work together.
        FaultSpecError: A fault is malformed; whether it can happen is known later.
    """
    plan_of(options)
    _refuse(
        [
            (options.ft_spares < 0, "--ft-spares is a number of processes, from 0"),
            (options.ft_respawn_limit < 0, "--ft-respawn-limit is a number of processes, from 0"),
            (
                options.ft_world_size is not None and options.ft_world_size < 1,
                "--ft-world-size is a number of slots, from 1",
            ),
        ]
    )
    try:
        Timeouts(
            alive=options.ft_watch_timeout,
            progress=options.ft_progress_timeout,
            collective=options.ft_collective_timeout,
        )
    except ValueError as error:
        raise FtArgumentError(str(error)) from error


def validate(args: Any) -> None:
    """Check Megatron's flags with those of the strategies that are on, before anything is built.

    Raises:
        FtArgumentError: They cannot work together, or name data that is not there.
    """
    from megatron_ft.checkfree import options as checkfree
    from megatron_ft.mecefo import options as mecefo

    _validate_data(args)
    checkfree.validate(args)
    simulated = "degrade" in plan_of(args).kinds
    mecefo.validate(args, simulated=simulated)
    if simulated and not args.ft_mecefo:
        raise FtArgumentError("degrade faults are MeCeFO's simulation: add --ft-mecefo")
    rebuilds = args.ft_checkfree or args.ft_checkfree_plus
    _refuse(_always(args))
    if not args.ft_recover and not rebuilds and not args.ft_mecefo:
        _refuse(_without_strategy(args))
        return
    if rebuilds and not args.ft_recover and args.data_parallel_size > 1:
        raise FtArgumentError(
            "CheckFree alone is for one replica: with several, add --ft-recover, which goes on "
            "with those that are left"
        )
    flag = "--ft-checkfree-plus" if args.ft_checkfree_plus else "--ft-checkfree"
    if args.ft_recover:
        flag = "--ft-recover"
    elif not rebuilds:
        flag = "--ft-mecefo"
    refuse: Refusals = [
        (
            # Megatron turns the one into the other for optimizers that work layer by layer.
            args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer,
            f"{flag} needs the whole optimizer state on every replica: with "
            "--use-distributed-optimizer a lost process takes its shard along. Leave out one",
        ),
        (
            args.use_torch_fsdp2 or args.use_megatron_fsdp,
            f"{flag} needs whole parameters on every replica: leave out FSDP",
        ),
        (
            args.virtual_pipeline_model_parallel_size is not None,
            f"{flag} supports 1F1B and no pipelining: leave out the interleaved schedule "
            "(--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank)",
        ),
        (
            args.qk_clip or args.log_max_attention_logit,
            f"{flag} lets the optimizer step be local arithmetic: leave out --qk-clip and "
            "--log-max-attention-logit, which sum over the replicas in it",
        ),
        (
            bool(args.mtp_num_layers) or args.experimental_attention_variant is not None,
            f"{flag} weighs losses by the microbatches of a replica, and not the additional ones "
            "inside of layers: leave out --mtp-num-layers and --experimental-attention-variant",
        ),
        (
            args.distributed_timeout_seconds_after_init is not None
            or args.gpu_sniff_test_interval is not None,
            f"{flag} lets processes come into a running job, which would wait where the others "
            "were long ago: leave out --distributed-timeout-seconds-after-init and "
            "--gpu-sniff-test-interval",
        ),
        (
            # Its layers overwrite gradients in the first backward of each pass of a step.
            any(getattr(args, name, None) for name in ("fp8", "fp4", "use_kitchen"))
            or bool(getattr(args, "quant_recipe", None)),
            f"{flag} adds up the gradients of several passes: leave out --fp8-format, "
            "--fp4-format and other quantised layers",
        ),
        (
            bool(args.num_experts),
            f"{flag} does not support mixture of experts: leave out --num-experts",
        ),
        (
            args.ft_recover and args.data_parallel_size < 2 and not rebuilds,
            "--ft-recover needs at least two replicas: start more processes, lower the "
            "tensor- or pipeline-parallel size, or let --ft-checkfree rebuild what is lost",
        ),
        (
            args.dataloader_type != "external",
            f"{flag} reads samples by microbatch id: leave out --dataloader-type",
        ),
        (
            (args.decoupled_lr is not None or getattr(args, "use_mup", False))
            and args.pipeline_model_parallel_size > 2
            and (args.ft_respawn or args.ft_spares > 0 or args.ft_mecefo),
            "a process that builds a stage alone, as with --ft-spares, --ft-respawn and "
            "--ft-mecefo, knows nothing of other stages' learning rates: leave out --decoupled-lr "
            "and MuP, or those three, or have two stages at most",
        ),
        (
            args.step_batch_size_schedule is not None,
            f"{flag} sums the same number of microbatches in every step: leave out "
            "--step-batch-size-schedule",
        ),
        (
            args.timing_log_level > 0 and args.barrier_with_L1_time,
            f"{flag} allows no barrier between the vote and the optimizer step: add "
            "--no-barrier-with-level-1-timing to --timing-log-level",
        ),
        (
            bool(args.iterations_to_skip),
            f"{flag} counts the steps that were committed: leave out --iterations-to-skip",
        ),
        (
            args.optimizer_cuda_graph,
            f"{flag} holds the optimizer step back until all have voted: leave out "
            "--optimizer-cuda-graph",
        ),
        (
            args.rerun_mode != "disabled",
            f"{flag} moves work between processes, which --rerun-mode takes for an error: leave "
            "it out",
        ),
        (
            args.check_weight_hash_across_dp_replicas_interval is not None,
            f"{flag} cannot be with --check-weight-hash-across-dp-replicas-interval: leave it out",
        ),
        (args.async_save, f"{flag} does not support --async-save: leave it out"),
        (
            args.ckpt_assume_constant_structure,
            f"{flag}: who writes what of a checkpoint changes when a replica is lost: leave "
            "out --ckpt-assume-constant-structure",
        ),
        (
            args.distributed_backend != "ulfm",
            f"{flag} needs collectives that survive: leave out --distributed-backend and "
            "start with megatron-ft-run",
        ),
    ]
    _refuse(refuse)


def _refuse(cases: Refusals) -> None:
    for wrong, message in cases:
        if wrong:
            raise FtArgumentError(message)


def _always(args: Any) -> Refusals:
    """What Megatron takes and then ignores, or dies of after the model is built."""
    return [
        (
            args.rampup_batch_size is not None,
            "Megatron-Core ignores --rampup-batch-size: leave it out, or use "
            "--step-batch-size-schedule without a strategy",
        ),
        (
            (args.full_validation or args.multiple_validation_sets)
            and args.dataloader_type == "external",
            "--full-validation and --multiple-validation-sets need a loader of Megatron's: add "
            "--dataloader-type single, without a strategy, or leave them out",
        ),
        (
            bool(args.full_validation) != bool(args.multiple_validation_sets),
            "Megatron dies in its first evaluation with one of --full-validation and "
            "--multiple-validation-sets: give both or none",
        ),
        (
            getattr(args, "dataloader_inter_document_masking", False),
            "--dataloader-inter-document-masking does not reach the dataset, so attention would "
            "cross documents: leave it out",
        ),
    ]


def _without_strategy(args: Any) -> Refusals:
    """What does nothing without a strategy, while its user thinks that the job is protected."""
    flags = {
        "--ft-respawn": args.ft_respawn,
        "--ft-spares": args.ft_spares > 0,
        "--ft-spare-warm": args.ft_spare_warm,
        "--ft-recover-policy": args.ft_recover_policy != "balanced",
        "--ft-recover-replay": args.ft_recover_replay != "exact",
    }
    return [
        (given, f"{flag} does nothing without a strategy: add --ft-recover, or another one")
        for flag, given in flags.items()
    ]


def _validate_data(args: Any) -> None:
    """Every corpus that the flags name is there.

    Megatron finds out when it builds the datasets, on the slots that read and after the model.
    """
    if args.mock_data:
        return
    try:
        prefixes = list(_prefixes(args))
    except (OSError, ValueError) as error:
        raise FtArgumentError(f"the list of data paths cannot be read: {error}") from error
    for prefix in prefixes:
        lacking = [s for s in (".idx", ".bin") if not Path(prefix + s).is_file()]
        if "://" not in prefix and lacking:
            raise FtArgumentError(
                f"no data at {prefix}: {' and '.join(prefix + s for s in lacking)} missing. A data "
                "path is the pair's path without .bin and .idx; tools/preprocess_data.py makes one"
            )


def _prefixes(args: Any) -> Iterator[str]:
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    for part in (blend, *(per_split or ())):
        if part is not None:
            yield from part[0]
