"""What is called or read of Megatron as it is: nothing is changed, but it must stay as it is.

Declared here for ``python -m megatron_ft.patches --check``, so that another version of Megatron
says at once what would have to change. Kept beside the patches because both are what ties this
package to Megatron.
"""

from __future__ import annotations

import re

from .registry import Reliance

_TRAINING = "megatron.training"
_STATE = "megatron.core.parallel_state"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_OPTIMIZER = "megatron.core.optimizer.optimizer:ChainedOptimizer."


def _call(name: str, target: str, reason: str, *positional: str, by_name: str = "") -> Reliance:
    return Reliance(
        name=f"calls.{name}",
        target=target,
        reason=reason,
        positional=positional,
        requires=tuple(by_name.split()),
    )


def _reads(owner: str, reason: str, names: str) -> tuple[Reliance, ...]:
    """Several attributes of a module, ``owner`` ending in ":", or of a class, ending in "."."""
    short = re.split("[.:]", owner)[-2]
    return tuple(_call(f"{short}.{name}", owner + name, reason) for name in names.split())


ENTRY: tuple[Reliance, ...] = (
    _call(
        "pretrain",
        f"{_TRAINING}:pretrain",
        "Megatron's training, from the entry point",
        *("cfg_container", "train_valid_test_dataset_provider", "model_type", "forward_step_func"),
        by_name="store",
    ),
    _call(
        "set_startup_timestamps",
        f"{_TRAINING}:set_startup_timestamps",
        "what start-up took",
        by_name="program_start main_entry",
    ),
    _call(
        "parse_and_validate_args",
        f"{_TRAINING}.arguments:parse_and_validate_args",
        "Megatron's flags and ours",
        by_name="extra_args_provider",
    ),
    _call(
        "gpt_config_from_args",
        f"{_TRAINING}.argument_utils:gpt_config_from_args",
        "the model's configuration",
        "args",
    ),
    _call(
        "pretrain_cfg_container_from_args",
        f"{_TRAINING}.argument_utils:pretrain_cfg_container_from_args",
        "the run's configuration",
        *("args", "model_cfg"),
    ),
    _call("encoder_or_decoder", "megatron.core.enums:ModelType.encoder_or_decoder", "for pretrain"),
    _call(
        "unfused", "megatron.core.transformer.enums:AttnBackend.unfused", "default without a GPU"
    ),
)

BATCHES: tuple[Reliance, ...] = (
    _call(
        "get_batch_on_this_tp_rank",
        "megatron.core.utils:get_batch_on_this_tp_rank",
        "one tensor-parallel peer reads a microbatch",
        "batch",
        by_name=(
            "has_cu_seqlens is_hybrid_cp create_attention_mask_in_dataloader broadcast_src_rank "
            "broadcast_group cp_size tp_rank micro_batch_size seq_length mtp_on_this_rank "
            "pipeline_model_parallel_size is_pipeline_first_stage is_pipeline_last_stage"
        ),
    ),
    _call(
        "get_batch_on_this_cp_rank",
        "megatron.core.utils:get_batch_on_this_cp_rank",
        "each context-parallel peer keeps its part of a sequence",
        "batch",
        by_name="is_hybrid_cp cp_group",
    ),
    _call(
        "is_first_or_last_pipeline_stage",
        f"{_TRAINING}.utils:is_first_or_last_pipeline_stage",
        "who reads data",
        "vp_stage",
    ),
    _call(
        "get_attr_wrapped_model",
        "megatron.core.utils:get_attr_wrapped_model",
        "attributes of the model below its wrappers",
        *("model", "attr"),
    ),
    _call(
        "validate_result",
        "megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
        "a loss that is no number ends the run",
        by_name="result rejection_func message tolerance fatal",
    ),
    _call(
        "get_blend_and_blend_per_split",
        f"{_TRAINING}.utils:get_blend_and_blend_per_split",
        "which data",
        "args",
    ),
    _call(
        "build_tokenizer",
        "megatron.core.tokenizers.utils.build_tokenizer:build_tokenizer",
        "the tokenizer of a dataset's configuration",
        "args",
    ),
    _call(
        "BlendedMegatronDatasetBuilder",
        "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder",
        "train, validation and test data",
        *("cls", "sizes", "is_built_on_rank", "config"),
    ),
    _call(
        "GPTDatasetConfig",
        "megatron.core.datasets.gpt_dataset:GPTDatasetConfig",
        "the datasets' configuration",
        by_name=(
            "random_seed sequence_length blend blend_per_split split multiple_validation_sets "
            "full_validation num_dataset_builder_threads path_to_cache mmap_bin_files tokenizer "
            "reset_position_ids reset_attention_mask eod_mask_loss create_attention_mask "
            "object_storage_cache_path mid_level_dataset_surplus allow_ambiguous_pad_tokens "
            "fast_cache_load defer_npy_index_mmap context_parallel_size data_parallel_size "
            "sequence_parallel_size"
        ),
    ),
    _call(
        "IndexedDatasetBuilder",
        "megatron.core.datasets.indexed_dataset:IndexedDatasetBuilder",
        "writes a corpus",
        "bin_path",
        by_name="dtype",
    ),
    _call(
        "add_document",
        "megatron.core.datasets.indexed_dataset:IndexedDatasetBuilder.add_document",
        "writes a corpus",
        *("self", "tensor", "lengths"),
    ),
    *_reads(
        f"{_STATE}:",
        "this slot's place",
        "get_tensor_model_parallel_rank get_tensor_model_parallel_group "
        "get_tensor_model_parallel_src_rank get_pipeline_model_parallel_rank "
        "get_data_parallel_rank get_data_parallel_world_size get_context_parallel_group "
        "is_pipeline_first_stage is_pipeline_last_stage",
    ),
    _call(
        "get_data_parallel_group",
        f"{_STATE}:get_data_parallel_group",
        "whose losses are summed",
        by_name="with_context_parallel",
    ),
)

STEP: tuple[Reliance, ...] = (
    *(
        _call(
            schedule,
            f"megatron.core.pipeline_parallel.schedules:{schedule}",
            "a step's attempt runs it over the microbatches that are left",
            by_name="forward_step_func data_iterator model num_microbatches forward_only "
            "collect_non_loss_data pg_collection force_all_reduce",
        )
        for schedule in (
            "forward_backward_no_pipelining",
            "forward_backward_pipelining_without_interleaving",
        )
    ),
    _call(
        "finalize_model_grads",
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "reduces the gradients of a replica that has nothing more to compute",
        *("model", "num_tokens"),
        by_name="pg_collection force_all_reduce",
    ),
    *_reads(
        "megatron.core.transformer.transformer_config:TransformerConfig.",
        "the schedule's hooks",
        "finalize_model_grads_func calculate_per_token_loss",
    ),
    *_reads(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.",
        "where the gradient buckets are",
        "bucket_groups",
    ),
    *_reads(
        f"{_BUFFER}:_ParamAndGradBucketGroup.",
        "another attempt of the same step",
        "buckets params ddp_config is_first_batch is_last_microbatch grad_reduce_handle "
        "grad_reduce_finished per_param_grad_ready_counts golden_per_param_grad_ready_counts "
        "start_grad_sync",
    ),
    *_reads(
        f"{_BUFFER}:_ParamAndGradBucket.",
        "snapshots of gradients",
        "grad_data params_list params_with_extra_main_grads",
    ),
    *_reads(
        _OPTIMIZER,
        "its collectives are run before the vote",
        "prepare_grads get_grad_norm count_zeros _compute_grad_norms_by_group "
        "step_with_ready_grads",
    ),
    *_reads(
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.",
        "dropout by microbatch id",
        "get_states set_states",
    ),
    *_reads(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.",
        "the learning rate of a process that takes a slot",
        "num_steps step",
    ),
    _call(
        "chained_optimizers",
        f"{_OPTIMIZER}chained_optimizers",
        "their loss scalers are set back with a broken attempt",
    ),
    *_reads(
        "megatron.core.optimizer.grad_scaler:MegatronGradScaler.",
        "the loss scale of a broken attempt",
        "state_dict load_state_dict",
    ),
    *_reads(
        "megatron.core.transformer.transformer_config:TransformerConfig.",
        "the schedule's timers",
        "timers",
    ),
    *_reads(
        "megatron.core.timers:Timers.",
        "which timers a broken attempt started",
        "_timers",
    ),
    *_reads(
        "megatron.core.timers:Timer.",
        "a timer of a broken attempt goes on no more",
        "_started",
    ),
    *_reads(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:",
        "what a broken save left for the metadata of the next",
        "_results_queue",
    ),
    *_reads(
        f"{_TRAINING}.global_vars:",
        "the wandb writer",
        "_GLOBAL_WANDB_WRITER",
    ),
)

RELIANCES: tuple[Reliance, ...] = (*ENTRY, *BATCHES, *STEP)
