"""What ``checkfree_worker`` runs on each rank."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args, get_timers, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.initialize import _set_random_seed
from mpi4py import MPI

from megatron_ft import arguments, llama
from megatron_ft.checkfree import lr_scale, norms, options, parts, rebuild, twins
from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.patches import checkfree as patches
from megatron_ft.patches.registry import registry
from megatron_ft.schedule.executor import Executor
from megatron_ft.schedule.passage import innermost
from megatron_ft.schedule.routes import routes
from megatron_ft.world.backend import PlainPolicy, register

MICROBATCHES = 8
HALF = Fraction(1, 2)


def extra_flags(parser: Any) -> Any:
    parser = arguments.provider(has_gpu=False, default_backend="ulfm")(parser)
    if "--ft-checkfree" not in parser._option_string_actions:
        options.add_flags(parser)
    return parser


class Job:
    """Megatron, set up for one stage of one replica on each rank."""

    def __init__(self, comm: MPI.Intracomm, folder: Path) -> None:
        self.comm, self.folder = comm, folder
        self.args = parse_and_validate_args(extra_args_provider=extra_flags)
        self.options = options.from_namespace(self.args)
        options.validate(self.args)
        register(PlainPolicy())
        training.initialize_megatron(store=dist.HashStore())
        self.stage = mpu.get_pipeline_model_parallel_rank()
        self.stages = mpu.get_pipeline_model_parallel_world_size()
        self.tp = mpu.get_tensor_model_parallel_rank()
        self.tps = mpu.get_tensor_model_parallel_world_size()
        self.session: Any = None
        self.seen: list[dict[str, float]] = []

    # -- building ----------------------------------------------------------------------------------

    def build(self, kind: type | None = None, load: Path | None = None) -> Any:
        """A session with a fresh model, with twins unless ``kind`` is another configuration."""
        args = get_args()
        args.load = str(load) if load else None
        setattr(args, lr_scale.RECORD, {})
        _set_random_seed(args.seed, args.data_parallel_random_init)
        kind = kind or twins.model_config_class(self.options)
        config = pretrain_cfg_container_from_args(
            args, gpt_config_from_args(args, model_config_cls=kind)
        )
        model, optimizer, scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=config,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        settings = innermost(model[0]).config
        settings.grad_scale_func = optimizer.scale_loss
        settings.timers = get_timers()
        settings.finalize_model_grads_func = finalize_model_grads
        if args.overlap_grad_reduce:
            settings.no_sync_func = model[0].no_sync
        self.session = SimpleNamespace(
            args=args, model=model, optimizer=optimizer, scheduler=scheduler, committed=0,
            evaluations=0, evaluates_from=None, saved=None, grad_squares={}, mecefo=None,
            transaction=SimpleNamespace(eval_starts={}),
        )  # fmt: skip
        lr_scale.install(self.session, self.options)
        return self.session

    # -- training ----------------------------------------------------------------------------------

    def batches(self, iteration: int) -> Any:
        """The microbatches of a step where microbatches begin or end."""
        if self.tp != 0 or (self.stages > 3 and 1 < self.stage < self.stages - 2):
            return None
        generator = torch.Generator().manual_seed(iteration)
        shape = (self.args.micro_batch_size, self.args.seq_length)
        made = []
        for _ in range(MICROBATCHES):
            tokens = torch.randint(0, 380, (shape[0], shape[1] + 1), generator=generator)
            made.append({
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": torch.ones(shape),
                "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
                "attention_mask": None,
            })  # fmt: skip
        return iter(made)

    def train(self, count: int, share: Fraction = HALF) -> list[float]:
        """So many steps; the gradient norms that Megatron reports."""
        session, reported = self.session, []
        for _ in range(count):
            iteration = session.committed + 1
            schedule = self._schedule(iteration, share)
            result = training.train_step(
                llama.forward_step,
                self.batches(iteration),
                session.model,
                session.optimizer,
                session.scheduler,
                innermost(session.model[0]).config,
                schedule,
                iteration=iteration - 1,
            )
            reported.append(float(result[5]))
        return reported

    def _schedule(self, iteration: int, share: Fraction) -> Callable[..., Any]:
        start = (iteration - 1) * MICROBATCHES
        executor = Executor(
            lambda count, forward_only: routes(self.stages, share, range(count), start=start)
        )

        def run(**call: Any) -> Any:
            reports = executor(**call)
            self.session.optimizer.prepare_grads()
            self.seen.append(self._sums())
            self.session.committed = iteration  # as the step transaction does
            return reports

        return run

    def _sums(self) -> dict[str, float]:
        """Sums of squared gradients here, of what Megatron counts once in the model."""
        scale = self.session.optimizer.get_loss_scale().item()
        own = with_twins = of_layers = 0.0
        layers = parts.layers(self.session.model)
        for name, p in innermost(self.session.model[0]).named_parameters():
            split = getattr(p, "tensor_model_parallel", False)
            if not split and self.tp != 0:
                continue
            square = (p.main_grad.double() / scale).square().sum().item()
            with_twins += square
            own += 0.0 if twins.is_twin(p) else square
            of_layers += square if name in layers else 0.0
        share = norms.shard_grad_square(self.session.optimizer, self.session.model)
        return {"own": own, "with_twins": with_twins, "layers": of_layers, "share": share}

    # -- state -------------------------------------------------------------------------------------

    def named(self) -> dict[str, torch.nn.Parameter]:
        return dict(innermost(self.session.model[0]).named_parameters())

    def state_of(self, p: torch.nn.Parameter) -> dict[str, Any]:
        copy_ = parts.master(p)
        single, _ = parts.owners(self.session.optimizer)[id(copy_)]
        return single.optimizer.state.get(copy_, {})

    def snapshot(self) -> dict[str, Any]:
        """Weights, masters and optimizer state, by name."""
        return {
            name: {
                "weight": p.detach().clone(),
                "master": parts.master(p).detach().clone(),
                "state": {
                    k: v.clone() if torch.is_tensor(v) else v for k, v in self.state_of(p).items()
                },
            }
            for name, p in self.named().items()
        }

    def put_back(self, kept: dict[str, Any], committed: int) -> None:
        owners = parts.owners(self.session.optimizer)
        for name, p in self.named().items():
            p.data.copy_(kept[name]["weight"])
            copy_ = parts.master(p)
            copy_.data.copy_(kept[name]["master"])
            state = owners[id(copy_)][0].optimizer.state
            state[copy_] = copy.deepcopy(kept[name]["state"])
        self.session.committed = committed
        self.session.scheduler.num_steps = committed * MICROBATCHES * self.args.micro_batch_size
        self.session.scheduler.step(0)
        setattr(self.session.args, lr_scale.RECORD, {})

    def rank_of(self, stage: int) -> int:
        """The rank of a stage with this tensor-parallel index."""
        return stage * self.tps + self.tp

    def digest(self, *prefixes: str, gradient: bool = True) -> dict[str, str]:
        """Hashes of gradient, weight, master and moments of the parameters so named."""
        out = {}
        for name, p in self.named().items():
            if name.startswith(prefixes):
                state = self.state_of(p)
                tensors = [p.data, parts.master(p), *(state[key] for key in sorted(state))]
                tensors += [p.main_grad] if gradient else []
                sha = hashlib.sha256()
                for t in tensors:
                    whole = torch.as_tensor(t).detach().contiguous().reshape(-1)
                    sha.update(whole.view(torch.uint8).numpy().tobytes())
                out[name] = sha.hexdigest()
        return out


# -- cases -----------------------------------------------------------------------------------------


def same_start(job: Job) -> dict[str, Any]:
    """Twins leave all other weights as Megatron draws them."""
    from megatron.training.models.gpt import GPTModelConfig

    job.build(GPTModelConfig)
    stock = {name: p.detach().clone() for name, p in job.named().items()}
    session = job.build()
    ours = job.named()
    own = {name: p for name, p in ours.items() if not twins.is_twin(p)}
    return {
        "same_names": list(own) == list(stock),
        "equal": all(torch.equal(p.data, stock[name]) for name, p in own.items()),
        "twins": sorted(set(ours) - set(stock)),
        "marked": sorted(name for name, p in ours.items() if twins.is_twin(p)),
        "counted": sum(p.numel() for p in parts.ends(session.model).values()),
    }


def equal_twins(job: Job) -> dict[str, Any]:
    """Steps with swapped microbatches; both of each pair to the last bit."""
    job.build()
    job.seen.clear()
    reported = job.train(3)
    ends = job.digest(*twins.EMBEDDING, *twins.HEAD)
    grads = {
        name: float(p.main_grad.abs().max()) for name, p in job.named().items() if name in ends
    }
    return {"reported": reported, "sums": list(job.seen), "ends": ends, "largest": grads}


def unequal_without(job: Job) -> dict[str, Any]:
    """Control: without the sum over each pair twins part."""
    job.build()
    broken = [p for p in patches.PATCHES if p.name == "checkfree.twin_grads"]
    registry.remove(broken)
    job.train(1)
    registry.install(broken)
    return {"ends": job.digest(*twins.EMBEDDING, *twins.HEAD)}


def scaled(job: Job) -> dict[str, Any]:
    """One step from the same state with and without a factor of stage 1's learning rate."""
    session = job.build()
    job.train(2)
    kept, results = job.snapshot(), {}
    for name, factor in (("plain", None), ("scaled", 1.25)):
        job.put_back(kept, 2)
        if factor is not None:
            lr_scale.note_rebuilt(session, 1, 2)
            for single in parts.optimizers(session.optimizer):
                getattr(single, lr_scale.RATE).scale = lambda: lr_scale.scale_at(
                    session.committed,
                    lr_scale.record(session.args).get(job.stage, (None, 0))[0],
                    CheckfreeOptions(enabled=True, lr_scale=1.25, lr_decay_iters=4),
                )
        job.train(1)
        now = job.snapshot()
        results[name] = {n: now[n]["master"] - kept[n]["master"] for n in kept}
        results[f"{name} lr"] = [group["lr"] for group in session.optimizer.param_groups]
    ratio = {}
    for n, plain in results["plain"].items():
        moved = plain.abs() > 1e-6
        quotient = (results["scaled"][n][moved] / plain[moved]).double()
        ratio[n] = [quotient.min().item(), quotient.median().item(), quotient.max().item()]
    return {"ratio": ratio, "lr": [results["plain lr"], results["scaled lr"]]}


def rebuilt(job: Job) -> dict[str, Any]:
    """Each stage lost in turn, and what it became against a formula of its own."""
    job.build()
    job.train(3)
    kept, results = job.snapshot(), {}
    everyone = job.comm.allgather((job.stage, job.tp, kept))
    held = {stage: state for stage, tp, state in everyone if tp == job.tp}
    for how in ("reset", "average"):
        chosen = CheckfreeOptions(enabled=True, plus=True, optimizer=how)  # type: ignore[arg-type]
        for lost in range(job.stages):
            neighbours = [s for s in (lost - 1, lost + 1) if 0 <= s < job.stages]
            weights = [1.0] if len(neighbours) == 1 else [0.3, 0.7]
            job.put_back(kept, 3)
            results[f"{how} {lost}"] = _lose(job, lost, neighbours, weights, held, chosen)
            after = job.train(2)
            results[f"{how} {lost}"]["norms"] = after
            results[f"{how} {lost}"]["ends"] = job.digest(*twins.EMBEDDING, *twins.HEAD)
    return results


def _lose(
    job: Job,
    lost: int,
    neighbours: list[int],
    weights: list[float],
    held: dict[int, Any],
    chosen: CheckfreeOptions,
) -> dict[str, Any]:
    session = job.session
    if job.stage != lost:
        if job.stage in neighbours:
            moved = rebuild.send_stage(session, job.comm, job.rank_of(lost))
            return {"sent": moved.nbytes}
        return {}
    generator = torch.Generator().manual_seed(5)
    for p in job.named().values():  # what the newcomer has before: anything
        p.data.copy_(torch.randn(p.shape, generator=generator))
        parts.master(p).data.copy_(torch.randn(p.shape, generator=generator))
        job.state_of(p).clear()
    session.scheduler.num_steps, session.committed = 0, 0
    sources = [rebuild.From(job.rank_of(s), s, w) for s, w in zip(neighbours, weights, strict=True)]
    moved = rebuild.rebuild(session, job.comm, sources, chosen)
    worst = moments = firsts = masters = 0.0
    steps = set()
    exact = True
    for name, p in job.named().items():
        state = job.state_of(p)
        if name.startswith(parts.LAYERS):
            want = sum(
                w * held[s][name]["master"].double()
                for s, w in zip(neighbours, weights, strict=True)
            )
            scale = want.abs().max().item()
            worst = max(worst, (parts.master(p).double() - want).abs().max().item() / scale)
            rounded = parts.master(p).to(p.dtype)
            masters = max(masters, (rounded.float() - p.float()).abs().max().item())
            second = sum(
                w * held[s][name]["state"]["exp_avg_sq"].double()
                for s, w in zip(neighbours, weights, strict=True)
            )
            if chosen.optimizer == "reset":
                second = torch.zeros_like(second)
            scale = max(second.abs().max().item(), 1e-30)
            moments = max(
                moments, (state["exp_avg_sq"].double() - second).abs().max().item() / scale
            )
            firsts = max(firsts, state["exp_avg"].abs().max().item())
            steps.add(float(state["step"]))
        else:
            partner = next(s for s in neighbours if name in held[s])
            other = held[partner][name]
            exact &= torch.equal(p.data, other["weight"])
            exact &= torch.equal(parts.master(p).data, other["master"])
            exact &= set(state) == set(other["state"])
            exact &= all(torch.equal(state[k], v) for k, v in other["state"].items())
    return {
        "received": moved.nbytes, "worst": worst, "moments": moments, "first_moments": firsts,
        "masters": masters, "steps": sorted(steps), "exact_ends": exact,
        "committed": session.committed, "scheduler": session.scheduler.num_steps,
        "record": {str(k): v for k, v in lr_scale.record(session.args).items()},
    }  # fmt: skip


def saved(job: Job) -> dict[str, Any]:
    """A checkpoint after a rebuild, loaded by a model with twins and by Megatron's own."""
    return {kind: _save_and_load(job, kind) for kind in ("torch_dist", "torch")}


def _save_and_load(job: Job, kind: str) -> dict[str, Any]:
    from megatron.training.models.gpt import GPTModelConfig

    args = get_args()
    args.ckpt_format, args.use_dist_ckpt = kind, kind != "torch"
    args.save = str(job.folder / kind)
    session = job.build()
    job.train(3)
    chosen = CheckfreeOptions(enabled=True, plus=True)
    if job.stage == 1:
        sources = [(0, 1.0)] if job.stages == 2 else [(0, 0.5), (2, 0.5)]
        froms = [rebuild.From(job.rank_of(s), s, w) for s, w in sources]
        rebuild.rebuild(session, job.comm, froms, chosen)
    elif job.stage in (0, 2):
        rebuild.send_stage(session, job.comm, job.rank_of(1))
    lr_scale.note_rebuilt(session, 1, 3)
    job.train(2)
    before, hats = job.snapshot(), _hats(job)
    live = {str(k): v for k, v in lr_scale.record(args).items()}
    args.consumed_train_samples, args.iteration = 5 * MICROBATCHES, 5
    save_checkpoint(5, session.model, session.optimizer, session.scheduler, 0)
    same_state = all(
        torch.equal(v, job.state_of(p)[k])
        for n, p in job.named().items()
        for k, v in before[n]["state"].items()
    )
    session = job.build(load=Path(args.save))
    session.committed = args.iteration
    after, loaded_hats = job.snapshot(), _hats(job)
    found: dict[str, Any] = {
        "unchanged": same_state,
        "iteration": args.iteration,
        "weights": all(torch.equal(before[n]["master"], after[n]["master"]) for n in before),
        "live_record": live,
        "record": {str(k): v for k, v in lr_scale.record(args).items()},
        "hats": max(_apart(hats[n], loaded_hats[n]) for n in hats),
        "steps": sorted({int(job.state_of(p)["step"]) for p in job.named().values()}),
        "ends": job.digest(*twins.EMBEDDING, *twins.HEAD, gradient=False),
    }
    job.train(1)
    found["ends_later"] = job.digest(*twins.EMBEDDING, *twins.HEAD)
    registry.remove(patches.PATCHES)
    args.iteration = 0
    job.build(GPTModelConfig, load=Path(args.save))
    stock = job.snapshot()
    found["stock_names"] = sorted(set(before) - set(stock))
    found["stock_weights"] = all(
        torch.equal(stock[n]["master"], before[n]["master"]) for n in stock
    )
    found["stock_hats"] = max(_apart(hats[n], hat) for n, hat in _hats(job).items())
    registry.install(patches.PATCHES)
    args.load = args.save = None
    return found


def _hats(job: Job) -> dict[str, list[torch.Tensor]]:
    """Adam's bias-corrected moments, whatever its step counts say."""
    out = {}
    owners = parts.owners(job.session.optimizer)
    for name, p in job.named().items():
        state, group = job.state_of(p), owners[id(parts.master(p))][1]
        step = int(state["step"])
        out[name] = [
            (state[key] / (1 - group["betas"][i] ** step)).clone()
            for i, key in enumerate(("exp_avg", "exp_avg_sq"))
        ]
    return out


def _apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(
        ((x - y).abs().max() / x.abs().max().clamp_min(1e-30)).item()
        for x, y in zip(a, b, strict=True)
    )


CASES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "same_start": same_start,
    "equal_twins": equal_twins,
    "unequal_without": unequal_without,
    "scaled": scaled,
    "rebuilt": rebuilt,
    "saved": saved,
}
