"""``pretrain_llama_ft.py`` with something extra, for tests that must look inside or break it.

``RECOVER_TEST`` names what, separated by commas; production code knows nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.campaign import hooks
from megatron_ft.runtime import main


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


def stray() -> None:
    """Slot 1 once waits in a barrier of all, in the middle of step 3, where nobody meets it."""
    import torch.distributed as dist

    from megatron_ft.transaction import StepTransaction

    original = StepTransaction._before
    strayed = []

    @functools.wraps(original)
    def before(self: StepTransaction, microbatch: int) -> None:
        original(self, microbatch)
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

    saving.compact = lambda world: contextlib.nullcontext()  # type: ignore[assignment]


def no_forgetting_of_writes() -> None:
    """The account of what a broken save wrote stays for the next one."""
    from megatron_ft.recover import saving

    saving._forget_written = lambda: None


EXTRAS: dict[str, Callable[[], None]] = {
    **hooks.LOOKS,
    **hooks.SABOTAGE,
    "full-disk": full_disk,
    "no-compact": no_compact,
    "no-forget": no_forget,
    "no-forgetting-of-writes": no_forgetting_of_writes,
    "no-scaler": no_scaler,
    "no-waits": no_waits,
    "rebuilds": rebuilds,
    "stray": stray,
}


if __name__ == "__main__":
    if "RECOVER_CENSUS" in os.environ:
        os.environ[hooks.FOLDER] = os.environ["RECOVER_CENSUS"]
    hooks.run_after_start(os.environ["RECOVER_TEST"].split(","), EXTRAS)
    sys.exit(main())
