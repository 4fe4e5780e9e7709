"""What ``executor_worker`` runs on each rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    get_rerun_state_machine,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training import get_args

from megatron_ft.schedule.executor import Executor
from megatron_ft.schedule.passage import Passage, passage_of
from megatron_ft.schedule.placement import Placement, adopted, normal, stages_of
from megatron_ft.schedule.routes import Route, identity, routes

ITERS = 3


class Megatron:
    """What Megatron gives its training step, and how it was before the first."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        forward_step: Callable[..., Any],
        data_iterator: Any,
        model: list[Any],
        optimizer: Any,
        scheduler: Any,
        config: Any,
    ) -> None:
        self.train_step = train_step
        self.forward_step = forward_step
        self.data_iterator = data_iterator
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.config = config
        self.reads = getattr(data_iterator, "iterable", data_iterator) is not None
        self.batches = [next(data_iterator) for _ in range(24)] if self.reads else []
        self.params = [p.detach().clone() for chunk in model for p in chunk.parameters()]
        self.rng = torch.get_rng_state()
        self.tracker = {k: v.clone() for k, v in get_cuda_rng_tracker().get_states().items()}

    def restore(self) -> None:
        """As before the first step."""
        now = [p for chunk in self.model for p in chunk.parameters()]
        for param, then in zip(now, self.params, strict=True):
            param.data.copy_(then)
        for chained in self.optimizer.chained_optimizers:
            chained.optimizer.state.clear()
            chained.reload_model_params()
        self.scheduler.num_steps = 0
        self.scheduler.step(0)
        torch.set_rng_state(self.rng)
        get_cuda_rng_tracker().set_states({k: v.clone() for k, v in self.tracker.items()})
        for chunk in self.model:
            for group in chunk.bucket_groups:
                group.is_first_batch = True
                group.golden_per_param_grad_ready_counts = {}

    def iterator(self) -> Any:
        return RerunDataIterator(iter(self.batches)) if self.reads else self.data_iterator

    def digest(self) -> str:
        """Of all weights here, to the last bit."""
        sha = hashlib.sha256()
        for chunk in self.model:
            for param in chunk.parameters():
                sha.update(param.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """The forward and backward steps that run, in order."""
    done: list[str] = []
    originals = schedules.forward_step, schedules.backward_step

    @functools.wraps(originals[0])
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        done.append(f"F{kwargs['current_microbatch']}")
        return originals[0](*args, **kwargs)

    @functools.wraps(originals[1])
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        done.append("B")
        return originals[1](*args, **kwargs)

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    try:
        yield done
    finally:
        schedules.forward_step, schedules.backward_step = originals


def peak_live(done: Sequence[str]) -> int:
    live = peak = 0
    for step in done:
        live += -1 if step == "B" else 1
        peak = max(peak, live)
    return peak


# -- identity routes: stock training ---------------------------------------------------------------


def train(megatron: Megatron, schedule: Callable[..., Any], count: int) -> dict[str, Any]:
    """Some steps from the beginning, and an evaluation batch after them."""
    megatron.restore()
    iterator = megatron.iterator()

    def counted(**call: Any) -> Any:
        return schedule(**(call | {"num_microbatches": count}))

    losses, norms = [], []
    with watched() as done:
        for iteration in range(ITERS):
            result = megatron.train_step(
                megatron.forward_step,
                iterator,
                megatron.model,
                megatron.optimizer,
                megatron.scheduler,
                megatron.config,
                counted,
                iteration=iteration,
            )
            losses.append({key: value.item() for key, value in result[0].items()})
            norms.append(float(result[5]))
    with torch.no_grad(), watched() as evaluated:
        args = get_args()
        machine = get_rerun_state_machine()
        mode = machine.get_mode()
        machine.set_mode(RerunMode.DISABLED)  # as Megatron's evaluation does
        for chunk in megatron.model:
            chunk.eval()
        reports = counted(
            forward_step_func=megatron.forward_step,
            data_iterator=megatron.iterator(),
            model=megatron.model,
            num_microbatches=count,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=True,
            first_val_step=True,
        )
        for chunk in megatron.model:
            chunk.train()
        machine.set_mode(mode)
    return {
        "losses": losses,
        "norms": norms,
        "weights": megatron.digest(),
        "steps": done,
        "peak": peak_live(done),
        "evaluated": evaluated,
        "evaluation": [report["lm loss"].tolist() for report in reports],
    }


def against_stock(megatron: Megatron) -> dict[str, Any]:
    """Below, equal to and above the number of stages, and one alone."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    results = {}
    for count in sorted({1, max(1, stages - 1), stages, stages + 3}):
        results[str(count)] = {
            "stock": train(megatron, get_forward_backward_func(), count),
            "executor": train(megatron, Executor(), count),
        }
    megatron.restore()
    return results


def unaligned(megatron: Megatron) -> dict[str, Any]:
    """Every stage reduces in its last backward pass, as with --no-align-grad-reduce."""
    config = megatron.config
    kept, config.grad_sync_func = config.grad_sync_func, None
    assert kept is not None and config.no_sync_func is not None
    try:
        return against_stock(megatron)
    finally:
        config.grad_sync_func = kept


# -- other routes and placements, on models with an embedding and a head on each stage -------------


class TwinModel(GPTModel):
    """For tests: a stage that can embed and compute the loss, whichever stage it is."""

    takes_passage = True
    passage: Passage | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.passage is not None
        self.pre_process = self.decoder.pre_process = self.passage.enters
        self.post_process = self.passage.leaves
        norm = self.decoder.final_layernorm
        if not self.passage.leaves:
            self.decoder.final_layernorm = None
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.decoder.final_layernorm = norm


def twin(config: Any, stage: int) -> TwinModel:
    """The model of a stage, the same wherever it is built."""
    args = get_args()
    model = TwinModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
    )
    generator = torch.Generator().manual_seed(stage)
    for name, param in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        param.data.copy_(mean + 0.05 * torch.randn(param.shape, generator=generator))
    return model


def twin_forward(iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Reads a batch at the ends of a route only, and reports which microbatch it was."""
    at = passage_of(model)
    assert at is not None
    batch = next(iterator) if at.enters or at.leaves else {}
    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    if not at.leaves:
        output = model_output(output)

    def loss(output: torch.Tensor) -> Any:
        losses = output.view(-1)
        return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {
            "loss": (losses.sum().item() / losses.numel()), "index": at.microbatch,
        }  # fmt: skip

    return output, loss


def model_output(output: torch.Tensor) -> torch.Tensor:
    assert output.dim() == 3, "a stage in the middle of a route gives hidden states"
    return output


def twin_batches(count: int) -> list[dict[str, torch.Tensor]]:
    args = get_args()
    generator = torch.Generator().manual_seed(99)
    shape = (args.micro_batch_size, args.seq_length)
    return [
        {
            "tokens": torch.randint(0, 257, shape, generator=generator),
            "labels": torch.randint(0, 257, shape, generator=generator),
            "position_ids": torch.arange(args.seq_length).expand(shape),
        }
        for _ in range(count)
    ]


def bare_config(config: Any) -> Any:
    """Megatron's configuration without what it does around a step."""
    bare = copy.copy(config)
    bare.timers = bare.grad_scale_func = bare.finalize_model_grads_func = None
    bare.no_sync_func = bare.grad_sync_func = None
    return bare


def directly(
    config: Any, chosen: Sequence[Route], batches: Sequence[dict[str, torch.Tensor]]
) -> tuple[list[float], list[list[torch.Tensor]]]:
    """Losses and gradients of each stage, one microbatch after another on this rank alone."""
    models = [twin(config, stage) for stage in range(len(chosen[0]))]
    losses = []
    for index, (route, batch) in enumerate(zip(chosen, batches, strict=True)):
        hidden = None
        for place, stage in enumerate(route):
            model = models[stage]
            model.passage = Passage(index, stage, place == 0, place == len(route) - 1)
            model.set_input_tensor([hidden])
            hidden = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        assert hidden is not None
        mean = hidden.view(-1).sum() / hidden.numel()
        losses.append(hidden.view(-1).sum().item() / hidden.numel())
        (mean / len(chosen)).backward()
    grads = [
        [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        for model in models
    ]
    return losses, grads


def through_executor(
    config: Any,
    group: dist.ProcessGroup,
    chosen: Sequence[Route],
    placement: Placement,
    batches: Sequence[dict[str, torch.Tensor]],
    reduction: str,
) -> dict[str, Any]:
    """The same through the pipeline: reports here, gradients of the stages here, steps."""
    config = bare_config(config)
    stages = stages_of(placement, group.rank())
    overlap = reduction != "at the end"
    chunks = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                overlap_grad_reduce=overlap, bucket_size=5000 if overlap else None
            ),
            twin(config, stage),
        )
        for stage in stages
    ]
    if overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
    if reduction == "aligned":
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    tokens: list[int] = []

    def finalize(models: list[Any], count: Any, **_: Any) -> None:
        assert models == chunks
        for chunk in models:
            chunk.finish_grad_sync()
        if count is not None:
            tokens.append(int(count))
            for chunk in models:
                chunk.scale_gradients(1.0 / int(count))

    config.finalize_model_grads_func = finalize
    config.calculate_per_token_loss = reduction == "per token"
    for chunk in chunks:
        chunk.module.config = config
        chunk.zero_grad_buffer()
    collection = ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        pp=group,
    )
    args = get_args()
    executor = Executor(lambda count, forward_only: chosen, placement)
    call = {
        "forward_step_func": twin_forward,
        "model": chunks,
        "num_microbatches": len(chosen),
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "pg_collection": collection,
    }
    with watched() as done:
        reports = executor(data_iterator=[iter(batches) for _ in stages], **call)
    with torch.no_grad():
        iterators = [iter(batches) for _ in stages]
        evaluated = executor(data_iterator=iterators, forward_only=True, **call)
    return {
        "stages": stages,
        "reports": reports,
        "evaluated": evaluated,
        "grads": [[p.main_grad for p in chunk.parameters()] for chunk in chunks],
        "tokens": tokens,
        "steps": done,
    }


def compare(
    config: Any,
    group: Any,
    chosen: Sequence[Route],
    placement: Placement,
    reduction: str,
) -> dict[str, Any]:
    """How far the executor is from the direct computation, on this rank."""
    batches = twin_batches(len(chosen))
    got = through_executor(config, group, chosen, placement, batches, reduction)
    losses, grads = directly(bare_config(config), chosen, batches)
    straight, _ = directly(bare_config(config), (identity(len(placement)),) * len(chosen), batches)
    worst = 0.0
    for stage, mine in zip(got["stages"], got["grads"], strict=True):
        for grad, want in zip(mine, grads[stage], strict=True):
            scale = max(want.abs().max().item(), 1e-6)
            worst = max(worst, (grad - want).abs().max().item() / scale)
    last = {stage for route in chosen for stage in route[-1:]}
    return {
        "reports": [[r["index"], r["loss"], losses[r["index"]]] for r in got["reports"]],
        "evaluated": [[r["index"], r["loss"], losses[r["index"]]] for r in got["evaluated"]],
        "straight": straight,
        "worst_gradient": worst,
        "ends_here": sorted(last & set(got["stages"])),
        "tokens": got["tokens"],
        "expected_tokens": len(chosen) * get_args().micro_batch_size * get_args().seq_length,
        "steps": got["steps"],
        "stages": got["stages"],
    }


def pipelines(megatron: Megatron) -> dict[str, Any]:
    """Swapped routes and adopted stages with two, three and four stages of the ranks here."""
    results: dict[str, Any] = {}
    half, all_of_them = Fraction(1, 2), Fraction(1)
    for stages in (2, 3, 4):
        group = dist.new_group(list(range(stages)))
        placements: dict[str, Placement] = {"normal": normal(stages)}
        if stages == 4:
            placements["middle adopted"] = adopted(4, {2: 1})
            placements["ends adopted"] = adopted(4, {0: 1, 3: 2})
        else:
            placements["first adopted"] = adopted(stages, {0: 1})
        for name, placement in placements.items():
            if dist.get_rank() not in placement:
                continue
            for share in (Fraction(0), half, all_of_them):
                for count, reduction in ((1, "at the end"), (2 * stages + 1, "unaligned")):
                    chosen = routes(stages, share, range(count))
                    key = f"{stages} {name} {share} {count}"
                    results[key] = compare(megatron.config, group, chosen, placement, reduction)
        if dist.get_rank() < stages:
            chosen = routes(stages, half, range(2 * stages))
            for reduction in ("aligned", "per token"):
                results[f"{stages} {reduction}"] = compare(
                    megatron.config, group, chosen, normal(stages), reduction
                )
    return results


def refused(megatron: Megatron) -> dict[str, Any]:
    """Messages of what is refused before anything is sent."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    args = get_args()
    call = {
        "forward_step_func": megatron.forward_step,
        "data_iterator": None,
        "model": megatron.model,
        "num_microbatches": 2,
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
    }
    messages = {}

    def attempt(name: str, executor: Executor, **changes: Any) -> None:
        try:
            executor(**(call | changes))
        except ValueError as error:
            messages[name] = str(error)

    attempt("swapped", Executor(lambda n, _: routes(stages, Fraction(1), range(n))))
    attempt("shapes", Executor(), adjust_tensor_shapes_fn=lambda a, b: (a, b))
    attempt("chunks", Executor(), model=megatron.model * 2)
    attempt("placement", Executor(placement=(0,)))
    megatron.config.variable_seq_lengths = True
    attempt("lengths", Executor())
    megatron.config.variable_seq_lengths = False
    return messages


CASES: dict[str, Callable[[Megatron], Any]] = {
    "stock": against_stock,
    "unaligned": unaligned,
    "pipelines": pipelines,
    "refused": refused,
}
