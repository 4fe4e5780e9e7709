"""What is LLaMA in ``pretrain_llama_ft.py``: batches, loss, forward step and datasets.

These are the functions that Megatron's ``pretrain`` asks of every training script. Samples come
by microbatch id through the ledger's iterator (``--dataloader-type external``), in exactly the
order of Megatron's own sampler, unless the user asks for another loader.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_ft.data.loader import LedgerIterator
from megatron_ft.schedule.passage import Passage, passage_of

_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def get_batch(
    data_iterator: Any, vp_stage: int | None = None, passage: Passage | None = None
) -> dict[str, torch.Tensor | None]:
    """One microbatch on this slot, each tensor of shape (micro batch, sequence) or None.

    The first tensor-parallel peer reads it and broadcasts; stages in the middle need nothing.

    Args:
        passage: Where the microbatch begins and ends its route; None: at the first and the last
            stage.
    """
    if passage is None:
        needed = is_first_or_last_pipeline_stage(vp_stage)
        enters, leaves = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    else:
        enters, leaves = passage.enters, passage.leaves
        needed = enters or leaves
    if not needed:
        return dict.fromkeys(_KEYS)
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        data = next(data_iterator)
        batch = {
            key: data[key].cuda(non_blocking=True) if data.get(key) is not None else None
            for key in _KEYS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=enters,
        is_pipeline_last_stage=leaves,
    )
    batch = {key: batch.get(key) for key in _KEYS}
    if args.context_parallel_size > 1:
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
        )
    return batch


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the masked token losses, the number of tokens, and what is reported of both.

    Args:
        loss_mask: (micro batch, sequence), 1 where a token counts.
        output_tensor: (micro batch, sequence), the loss of each token.

    Returns:
        Scalar loss sum, scalar token count, and ``{"lm loss": (2,) tensor of sum and count}``.
    """
    losses = output_tensor.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: the model's output for the next microbatch and its loss."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"), passage_of(model))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Megatron's GPT dataset configuration from its flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def reads_data(vp_stage: int | None = None) -> bool:
    """Whether this slot reads samples: the first tensor-parallel peer of the end stages.

    With CheckFree+ microbatches also begin and end at the stages beside these.
    """
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    if get_args().ft_checkfree_plus:
        stages = mpu.get_pipeline_model_parallel_world_size()
        if mpu.get_pipeline_model_parallel_rank() in (1, stages - 2):
            return True
    return bool(is_first_or_last_pipeline_stage(vp_stage))


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Train, validation and test data of this slot.

    Args:
        num_samples: How many samples Megatron wants of each.

    Returns:
        A ``LedgerIterator`` each for ``--dataloader-type external``, else the datasets; None for
        a slot that reads nothing or an empty split.
    """
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets ...")
    datasets = BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(reads_data, vp_stage=vp_stage), dataset_config(args)
    ).build()
    print_rank_0("> finished creating datasets ...")
    if args.dataloader_type != "external":
        return tuple(datasets)
    return ledger_iterators(args, datasets)


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron asks for it


def ledger_iterators(args: Any, datasets: Any) -> tuple[LedgerIterator | None, ...]:
    """The datasets by microbatch id, starting after what a loaded checkpoint has consumed."""
    data_parallel = mpu.get_data_parallel_world_size()
    starts = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    kinds = ("train", "valid", "test")
    iterators: list[LedgerIterator | None] = []
    for dataset, start, kind in zip(datasets, starts, kinds, strict=True):
        if dataset is None:
            iterators.append(None)
            continue
        train = kind == "train"
        micro = args.micro_batch_size if train else args.eval_micro_batch_size
        batch = args.global_batch_size if train else args.eval_global_batch_size
        iterators.append(
            LedgerIterator(
                dataset=dataset,
                micro_batch_size=micro,
                global_microbatches=batch // micro,
                dp_rank=mpu.get_data_parallel_rank(),
                dp_size=data_parallel,
                consumed_samples=start,
                kind=kind,
            )
        )
    return tuple(iterators)
