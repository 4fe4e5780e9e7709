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
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_ft import runtime
from megatron_ft.runtime import main


def census() -> None:
    """Write down, after every step, what this process holds of things that could leak."""
    import torch.distributed as dist

    from megatron_ft.session import Session
    from megatron_ft.world import registry

    directory = Path(os.environ["RECOVER_CENSUS"])
    original = Session.step_begins

    @functools.wraps(original)
    def step_begins(self: Session) -> Any:
        process = self.world.process
        counts = {
            "epoch": self.epoch,
            "iteration": self.iteration,
            "groups": len(registry.live_groups()),
            "torch_groups": len(dist.distributed_c10d._world.pg_map),
            "threads": sorted(_threads()),
            "files": sorted(_open_files()),
            "resident": _resident(),
        }
        with open(directory / f"census-{process}.jsonl", "a") as file:
            file.write(json.dumps(counts) + "\n")
        return original(self)

    Session.step_begins = step_begins  # type: ignore[method-assign]


def _threads() -> Iterator[str]:
    """Names of Python's threads, and the numbers of those that others have started."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    for handle in os.listdir("/proc/self/task"):
        yield named.get(int(handle), handle)


def _open_files() -> Iterator[str]:
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(handle)


def _resident() -> int:
    """Bytes of memory that are this process's own and present; not the pages of files."""
    present, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (present - of_files) * resource.getpagesize()


def weights() -> None:
    """At the end of training, write down what this process's slot holds: weights and optimizer."""
    import hashlib

    import torch

    from megatron_ft.session import Session

    directory = Path(os.environ["RECOVER_CENSUS"])
    original = Session.train_ended

    def of(value: Any, into: Any) -> None:
        if isinstance(value, torch.Tensor):
            into.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                of(value[key], into)
        elif isinstance(value, list | tuple):
            for item in value:
                of(item, into)

    @functools.wraps(original)
    def train_ended(self: Session) -> None:
        original(self)
        stages = [self] if self.hosting is None else [self, self.hosting.stage]
        for slot, stage in zip(self.world.slots if self.committed else (), stages, strict=False):
            digest = hashlib.sha256()
            of([p.data for chunk in stage.model for p in chunk.parameters()], digest)
            of(stage.optimizer.state_dict(), digest)
            text = json.dumps({"committed": self.committed, "digest": digest.hexdigest()})
            (directory / f"weights-{slot}.json").write_text(text)

    Session.train_ended = train_ended  # type: ignore[method-assign]


def rebuilds() -> None:
    """Dump what a rebuild starts from and what it makes, and the norms of the last gradients."""
    import torch

    from megatron_ft.checkfree import live
    from megatron_ft.session import current
    from megatron_ft.transaction import StepTransaction

    directory = Path(os.environ["RECOVER_CENSUS"])
    send, make, rehearse = live.send_stage, live.rebuild, StepTransaction._rehearse
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

    def rehearsed(self: StepTransaction) -> None:
        rehearse(self)
        buckets = [b for group in self.snapshots.bucket_groups for b in group.buckets]
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

    live.send_stage, live.rebuild = send_stage, rebuild
    StepTransaction._rehearse, StepTransaction.vote = rehearsed, vote  # type: ignore[method-assign]


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
            # Divided by the microbatches of a fault-free step, whatever their number.
            own *= get_num_microbatches() / contributed[current().transaction.replica]
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


def no_rule() -> None:
    """Attention gradients that a replica lacks count as zeros, and nothing is held."""
    from megatron_ft.mecefo.live import Mecefo

    Mecefo.after_reduction = lambda self, contributed: None  # type: ignore[method-assign]


def leak() -> None:
    """A group and a file more at each repair."""
    import torch.distributed as dist

    from megatron_ft.world.world import World

    original = World._install
    kept = []

    @functools.wraps(original)
    def install(self: World, outcome: Any) -> None:
        original(self, outcome)
        kept.append(os.dup(0))
        kept.append(dist.new_group([self.label], use_local_synchronization=True))

    World._install = install  # type: ignore[method-assign]


def stray() -> None:
    """Slot 1 once waits in a barrier of all, in the middle of step 3, where nobody meets it."""
    import torch.distributed as dist

    from megatron_ft.transaction import StepTransaction

    original = StepTransaction._before
    strayed = []

    @functools.wraps(original)
    def before(self: StepTransaction, microbatch: int, *stage: int | None) -> None:
        original(self, microbatch, *stage)
        if self.iteration == 3 and self.world.slots == (1,) and not strayed:
            strayed.append(microbatch)
            dist.barrier()

    StepTransaction._before = before  # type: ignore[method-assign]


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


def no_restore() -> None:
    """Buckets that were reduced with the dead are taken for local gradients."""
    from megatron_ft.recover.buckets import BucketSnapshots

    def restore(self: BucketSnapshots, epoch: int) -> int:
        self.drop()
        return 0

    BucketSnapshots.restore = restore  # type: ignore[method-assign]


def no_forget() -> None:
    """A replica keeps what it has accumulated where it should begin from nothing."""
    from megatron_ft.recover.policy_workload import PolicyWorkload

    PolicyWorkload.forgets = lambda self, replica: False  # type: ignore[method-assign]


def no_scaler() -> None:
    """What a broken attempt did to the loss scale stays."""
    from megatron_ft.transaction import StepTransaction

    StepTransaction._restore_scalers = lambda self: None  # type: ignore[method-assign]


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


EXTRAS: dict[str, Callable[[], None]] = {
    "census": census,
    "full-disk": full_disk,
    "leak": leak,
    "mecefo": mecefo,
    "no-compact": no_compact,
    "no-forget": no_forget,
    "no-forgetting-of-writes": no_forgetting_of_writes,
    "no-restore": no_restore,
    "no-rule": no_rule,
    "no-scaler": no_scaler,
    "no-waits": no_waits,
    "rebuilds": rebuilds,
    "stray": stray,
    "weights": weights,
}


def _after_start(extras: list[str]) -> None:
    """Run the extras once this process is connected, before Megatron is imported."""
    original = runtime._live

    @functools.wraps(original)
    def live(*args: Any, **kwargs: Any) -> Any:
        for extra in extras:
            EXTRAS[extra]()
        return original(*args, **kwargs)

    runtime._live = live


if __name__ == "__main__":
    _after_start(os.environ["RECOVER_TEST"].split(","))
    sys.exit(main())
