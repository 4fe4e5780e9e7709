"""A checkpoint is saved by whoever lives, and tried again if a process dies in it.

Megatron moves its tracker file last, so an attempt that broke leaves the previous checkpoint valid;
what it wrote is removed before the next attempt.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ft.session import NoWayOn
from megatron_ft.world.compact import compact_exact, hosting_replicas
from megatron_ft.world.errors import ReplicaLost, WorldBroken

if TYPE_CHECKING:
    from megatron_ft.session import Session

logger = logging.getLogger("megatron_ft.saving")

TRACKER = "latest_checkpointed_iteration.txt"


def save(session: Session, attempt: Callable[[], object], iteration: int) -> bool:
    """Run ``attempt`` until it succeeds on all active processes.

    Returns:
        False where nothing was written, because a process runs two stages in every replica.

    Raises:
        NoWayOn: A process failed to write for a reason of its own, such as a full disk; the same
            on all processes.
    """
    world = session.world
    assert world is not None
    tracked = _tracker_time(Path(session.args.save))
    # Whoever fails in the save breaks off what others of its replica do: they must be in it, too.
    while not world.agree(True):
        session.mend(f"save of iteration {iteration}")
    while True:
        if hosting_replicas(world).issuperset(world.assignment.whole_replicas(world.topology)):
            logger.warning(
                "the checkpoint of iteration %d is left out: in every replica that is left a "
                "process runs two stages, and only exact replicas write",
                iteration,
            )
            return False
        error = _try(session, attempt)
        if world.agree(error is None):
            return True
        written = iteration if _is_written(Path(session.args.save), iteration, tracked) else None
        facts = {"save_error": error, "written": written}
        try:
            repaired = session.mend(f"save of iteration {iteration}", facts)
        except ReplicaLost:  # training is entered again, and the next save is another attempt
            _forget_written()
            raise
        errors = {r.process: r.facts.get("save_error") for r in repaired.reports.values()}
        own = {process: text for process, text in errors.items() if text}
        if own and not repaired.dead:
            session.membership.finished = True
            session.membership.repair({})  # lets the pool go
            process, text = min(own.items())
            raise NoWayOn(
                f"the checkpoint of iteration {iteration} could not be written to "
                f"{session.args.save}: process {process}: {text}. Make room there or choose "
                "another --save; earlier checkpoints are as they were"
            )
        if _is_complete(session, iteration, tracked):
            return True
        _forget_written()
        logger.warning("saving iteration %d was broken off; trying again", iteration)


def _try(session: Session, attempt: Callable[[], object]) -> str | None:
    """One attempt: None if it succeeded here, "" if others broke it off, else what failed."""
    world, policy = session.world, session.policy
    assert world is not None
    policy.in_transaction = True
    try:
        with compact_exact(world) as takes_part:
            if takes_part:
                attempt()
        return None
    except (Exception, CheckpointException) as caught:  # the latter is none of the former
        world.revoke_active()
        world.revoke_groups(pipeline=True)
        return _reason(caught)
    finally:
        policy.in_transaction = False


def _reason(error: BaseException) -> str:
    """What failed here; "" if another process did."""
    if isinstance(error, CheckpointException):  # what each process failed with, on the first one
        return "; ".join(filter(None, (_reason(inner) for inner, _ in error.failures.values())))
    link: BaseException | None = error
    while link is not None:  # Megatron and torch wrap what broke in errors of their own
        if isinstance(link, WorldBroken):
            return ""
        link = link.__cause__ or link.__context__
    return f"{type(error).__name__}: {error}"


def _is_complete(session: Session, iteration: int, tracked: int | None) -> bool:
    """Whether the broken attempt got as far as its tracker; else what it wrote is removed.

    Collective over all active processes, and resilient like every operation outside of a step.
    """
    assert session.world is not None
    complete = torch.zeros(1, dtype=torch.int, device="cuda")
    if session.world.process == session.world.elected:
        complete += int(_clear(Path(session.args.save), iteration, tracked))
    dist.all_reduce(complete)
    return bool(complete.item())


def _forget_written() -> None:
    """Drop Megatron's account of what a broken attempt wrote here.

    It passes from the writer to the metadata through a queue that all saves share: the next
    attempt's metadata would be made of it.
    """
    written = filesystem_async._results_queue
    if written is None:
        return
    with contextlib.suppress(queue.Empty):
        while True:
            written.get_nowait()


def _tracker_time(save_dir: Path) -> int | None:
    """When the tracker was written; None if there is none."""
    tracker = save_dir / TRACKER
    return tracker.stat().st_mtime_ns if tracker.exists() else None


def _is_written(save_dir: Path, iteration: int, tracked: int | None) -> bool:
    """Whether the tracker, which is moved last, has been moved to ``iteration`` since."""
    moved = _tracker_time(save_dir) != tracked
    return moved and (save_dir / TRACKER).read_text().strip() == str(iteration)


def _clear(save_dir: Path, iteration: int, tracked: int | None) -> bool:
    """Remove what an attempt left, unless the tracker says that it is complete; whether it is.

    Args:
        tracked: When the tracker was written that was there before: a job that goes on from an
            older checkpoint may find its own iteration in it.
    """
    if _is_written(save_dir, iteration, tracked):
        return True
    partial = save_dir / f"iter_{iteration:07d}"
    if partial.exists():
        try:
            shutil.rmtree(partial)
        except OSError as error:
            # It is written over then: what is valid, the tracker and the metadata say.
            logger.warning("%s cannot be removed: %s", partial, error)
    return False
