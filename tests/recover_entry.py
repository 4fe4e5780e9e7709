"""``pretrain_llama_ft.py`` with something extra, for tests that must look inside or break it.

``RECOVER_TEST`` names what, separated by commas; production code knows nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_ft.campaign import hooks
from megatron_ft.runtime import main


def rebuilds() -> None:
    """Dump what a rebuild starts from and what it makes, and the norms of the last gradients."""
    import torch

    from megatron_ft.checkfree import live
    from megatron_ft.recover import attempt
    from megatron_ft.session import current
    from megatron_ft.transaction import StepTransaction

    directory = Path(os.environ["RECOVER_CENSUS"])
    send, make, rehearse = live.send_stage, live.rebuild, attempt.rehearse
    norm = [0.0, 0.0]  # of the attempt under way, of the last committed step

    def dump(what: str, session: Any) -> None:
        model = session.model[0]
        while hasattr(model, "module"):
            model = model.module
        slot = session.world.slots[0]
        torch.save(
            {
                "norm": norm[1],
                "weights": {name: p.data.clone() for name, p in model.named_parameters()},
                "moments": session.optimizer.state_dict(),
            },
            directory / f"{what}-{session.world.epoch}-{slot}.pt",
        )

    def send_stage(session: Any, *args: Any) -> Any:
        dump("source", session)
        return send(session, *args)

    def rebuild(session: Any, *args: Any) -> Any:
        result = make(session, *args)
        dump("rebuilt", session)
        return result

    def rehearsed(transaction: StepTransaction) -> None:
        rehearse(transaction)
        assert transaction.snapshots is not None
        buckets = [b for group in transaction.snapshots.bucket_groups for b in group.buckets]
        held = {id(p): p for bucket in buckets for p in bucket.params_list}
        names = current().model[0].named_parameters()
        grads = [p.main_grad for name, p in names if "decoder.layers" in name and id(p) in held]
        assert grads
        norm[0] = float(torch.stack([g.double().square().sum() for g in grads]).sum().sqrt())

    commit = StepTransaction.vote

    def vote(self: StepTransaction, ok: bool, training: bool) -> bool:
        agreed = commit(self, ok, training)
        if agreed and training:
            norm[1] = norm[0]
        return agreed

    live.send_stage, live.rebuild, attempt.rehearse = send_stage, rebuild, rehearsed
    StepTransaction.vote = vote  # type: ignore[method-assign]


def mecefo() -> None:
    """Write down, after every step, what the gradient rule made and what this slot holds.

    Deviations are relative, of the gradient that the optimizer gets from the mean over this
    replica's own microbatches.
    """
    import hashlib

    import torch
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from megatron_ft.mecefo.gradient_rule import is_attention_parameter
    from megatron_ft.mecefo.live import Mecefo, layers_of
    from megatron_ft.session import Session, current
    from megatron_ft.transaction import StepTransaction

    directory = Path(os.environ["RECOVER_CENSUS"])
    local: dict[int, torch.Tensor] = {}
    row: dict[str, Any] = {}
    before, after = StepTransaction.before_reduction, Mecefo.after_reduction
    original = Session.step_begins

    def split(session: Any) -> dict[str, list[torch.nn.Parameter]]:
        parts: dict[str, list[torch.nn.Parameter]] = {"attention": [], "ffn": []}
        for layer in layers_of(session.model[0]):
            for name, parameter in layer.named_parameters():
                parts["attention" if is_attention_parameter(name) else "ffn"].append(parameter)
        return parts

    def before_reduction(self: StepTransaction, bucket_group: Any) -> None:
        before(self, bucket_group)
        if self.policy.in_transaction:
            for parameter in bucket_group.params:
                local[id(parameter)] = parameter.main_grad.detach().clone()

    def after_reduction(self: Mecefo, contributed: Any) -> None:
        after(self, contributed)
        for part, parameters in split(current()).items():
            got = torch.cat([p.main_grad.view(-1) for p in parameters]).double()
            own = torch.cat([local[id(p)].view(-1) for p in parameters]).double()
            mine = contributed[current().transaction.replica]
            if current().args.calculate_per_token_loss:
                own /= mine  # a sum over tokens, which were counted
            else:  # divided by the microbatches of a fault-free step, whatever their number
                own *= get_num_microbatches() / mine
            row["weights"] = dict(contributed)
            row["tokens"] = current().transaction.reports.tokens
            row[f"{part}_norm"] = float(own.norm())
            row[f"{part}_deviation"] = float((got - own).norm() / own.norm().clamp_min(1e-30))

    @contextlib.contextmanager
    def step_begins(self: Session) -> Iterator[None]:
        slot = self.world.slots[0]
        with original(self):
            yield
        row["iteration"] = self.iteration
        for part, parameters in split(self).items():
            digest = hashlib.sha256()
            for parameter in parameters:
                state = self.optimizer.chained_optimizers[0].optimizer.state.get(parameter, {})
                for tensor in (parameter.data, *(state[key] for key in sorted(state))):
                    digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
            row[part] = digest.hexdigest()
        with open(directory / f"mecefo-{slot}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    StepTransaction.before_reduction = before_reduction  # type: ignore[method-assign]
    Mecefo.after_reduction = after_reduction  # type: ignore[method-assign]
    Session.step_begins = step_begins  # type: ignore[method-assign]


def uneven_tokens() -> None:
    """Of the second replica's samples half of the tokens count."""
    from megatron_ft import llama
    from megatron_ft.session import current

    original = llama.loss_func

    @functools.wraps(original)
    def loss_func(loss_mask: Any, output_tensor: Any) -> Any:
        if current().transaction.replica == 1:
            loss_mask = loss_mask.clone()
            loss_mask[:, ::2] = 0
        return original(loss_mask, output_tensor)

    llama.loss_func = loss_func


def no_rule() -> None:
    """Attention gradients that a replica lacks count as zeros, and nothing is held."""
    from megatron_ft.mecefo.live import Mecefo

    Mecefo.after_reduction = lambda self, contributed: None  # type: ignore[method-assign]


def stray() -> None:
    """Slot 1 once waits in a barrier of all, in the middle of step 3, where nobody meets it."""
    import torch.distributed as dist

    from megatron_ft.recover.attempt import Attempt

    original = Attempt.before_microbatch
    strayed = []

    @functools.wraps(original)
    def before(self: Attempt, microbatch: int, stage: int | None) -> None:
        original(self, microbatch, stage)
        step = self.transaction
        if step.iteration == 3 and step.world.slots == (1,) and not strayed:
            strayed.append(microbatch)
            dist.barrier()

    Attempt.before_microbatch = before  # type: ignore[method-assign]


def stops_before_a_barrier() -> None:
    """Process 2 stops after step 12, where the others wait for it in a barrier already."""
    import signal

    import torch.distributed as dist

    from megatron_ft.session import current

    original = dist.barrier

    @functools.wraps(original)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        session = current()
        if session.training and session.committed == 12 and session.world.process == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **kwargs)

    dist.barrier = barrier


def dies_at_the_end() -> None:
    """Slot 0 is killed when its work is done, before all agree on the end."""
    import signal

    from megatron_ft import runtime

    original = runtime._agree_on_the_end

    def agree_on_the_end(job: Any) -> None:
        if job.world.slots == (0,):
            os.kill(os.getpid(), signal.SIGKILL)
        original(job)

    runtime._agree_on_the_end = agree_on_the_end


def elected_dies_at_the_end() -> None:
    """Who writes for all is killed when it comes to the last lines."""
    import signal

    from megatron_ft import ending

    original = ending.write_end

    def write_end(job: Any, code: int, message: str) -> None:
        if job.session.elect():
            os.kill(os.getpid(), signal.SIGKILL)
        original(job, code, message)

    ending.write_end = write_end
    from megatron_ft import runtime

    runtime.write_end = write_end


def garbled(which: int = 0) -> None:
    """Slot 1 hears another word than was agreed on in the vote on step 5, the first or second."""
    from megatron_ft.session import current
    from megatron_ft.world import comms

    original, heard = comms._agree, []

    @functools.wraps(original)
    def agree(comm: Any, word: int) -> int:
        agreed = original(comm, word)
        session = current()
        step = None if session is None else session.transaction
        if step is None or step.iteration != 5 or session.world.slots != (1,):
            return agreed
        heard.append(agreed)
        return agreed & 0xF0 if len(heard) == 1 + which else agreed

    comms._agree = agree


def garbled_second() -> None:
    garbled(1)


def full_disk() -> None:
    """From step 3 on slot 2 can write small files only, as if its disk were full."""
    from megatron_ft.session import Session

    original = Session.step_begins

    @functools.wraps(original)
    def step_begins(self: Session) -> Any:
        if self.args.curr_iteration == 2 and self.world.slots == (2,):
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        return original(self)

    Session.step_begins = step_begins  # type: ignore[method-assign]


def no_forget() -> None:
    """A replica keeps what it has accumulated where it should begin from nothing."""
    from megatron_ft.recover.policy_workload import PolicyWorkload

    PolicyWorkload.forgets = lambda self, replica: False  # type: ignore[method-assign]


def no_scaler() -> None:
    """What a broken attempt did to the loss scale stays."""
    from megatron_ft.recover.rehearsal import LossScalers

    LossScalers.restore = lambda self: None  # type: ignore[method-assign]


def no_waits() -> None:
    """A process that waits for others does not say so."""
    from megatron_ft.world.watch import NoWatch, Watch

    Watch.begin_wait = NoWatch.begin_wait  # type: ignore[method-assign]
    Watch.end_wait = NoWatch.end_wait  # type: ignore[method-assign]


def no_compact() -> None:
    """Checkpoints are written as if all slots were served."""
    from megatron_ft.recover import saving

    saving.compact_exact = lambda world: contextlib.nullcontext(True)  # type: ignore[assignment]


def no_forgetting_of_writes() -> None:
    """The account of what a broken save wrote stays for the next one."""
    from megatron_ft.recover import saving

    saving._forget_written = lambda: None


def no_adopted_rate() -> None:
    """An adopter trains a rebuilt stage as if it had not been rebuilt."""
    from megatron_ft.adopt.stage import AdoptedStage
    from megatron_ft.checkfree import lr_scale, parts

    original = AdoptedStage.__init__

    @functools.wraps(original)
    def init(self: AdoptedStage, *args: Any) -> None:
        original(self, *args)
        for single in parts.optimizers(self.optimizer):
            delattr(single, lr_scale.RATE)

    AdoptedStage.__init__ = init  # type: ignore[method-assign]


EXTRAS: dict[str, Callable[[], None]] = {
    **hooks.LOOKS,
    **hooks.SABOTAGE,
    "dies-at-the-end": dies_at_the_end,
    "elected-dies-at-the-end": elected_dies_at_the_end,
    "full-disk": full_disk,
    "garbled": garbled,
    "garbled-second": garbled_second,
    "mecefo": mecefo,
    "no-adopted-rate": no_adopted_rate,
    "no-compact": no_compact,
    "no-forget": no_forget,
    "no-forgetting-of-writes": no_forgetting_of_writes,
    "no-rule": no_rule,
    "no-scaler": no_scaler,
    "no-waits": no_waits,
    "rebuilds": rebuilds,
    "stops-before-a-barrier": stops_before_a_barrier,
    "stray": stray,
    "uneven-tokens": uneven_tokens,
}


if __name__ == "__main__":
    if "RECOVER_CENSUS" in os.environ:
        os.environ[hooks.FOLDER] = os.environ["RECOVER_CENSUS"]
    hooks.run_after_start(os.environ["RECOVER_TEST"].split(","), EXTRAS)
    sys.exit(main())
