"""A checkpoint is saved by whoever lives, and tried again if a process dies in it.

Megatron moves its tracker file last, so an attempt that broke leaves the previous checkpoint valid;
what it wrote is removed before the next attempt.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.world.compact import compact
from megatron_ft.world.errors import WorldBroken

if TYPE_CHECKING:
    from megatron_ft.session import Session

logger = logging.getLogger("megatron_ft.saving")


class SaveFailed(RuntimeError):
    """A checkpoint could not be written although nobody died."""


def save(session: Session, attempt: Callable[[], object], iteration: int) -> None:
    """Run ``attempt`` until it succeeds on all active processes.

    Raises:
        SaveFailed: A process failed to write for a reason of its own, such as a full disk.
    """
    world, policy = session.world, session.policy
    assert world is not None
    while True:
        error: str | None = None
        ok = True
        policy.in_transaction = True
        try:
            with compact(world):
                attempt()
        except Exception as caught:  # Megatron and torch wrap what broke in errors of their own
            ok = False
            if not isinstance(caught, WorldBroken):
                error = f"{type(caught).__name__}: {caught}"
            world.revoke_active()
            world.revoke_groups(pipeline=True)
        finally:
            policy.in_transaction = False
        if world.agree(ok):
            return
        repaired = session.mend(f"save of iteration {iteration}", {"save_error": error})
        errors = [r.facts.get("save_error") for r in repaired.reports.values()]
        if not repaired.dead:
            raise SaveFailed("; ".join(e for e in errors if e) or "the attempt was broken off")
        logger.warning("saving iteration %d was broken off; trying again", iteration)
        if world.process == world.elected:
            _remove_partial(Path(session.args.save), iteration)
        if not world.agree(True):
            session.mend(f"save of iteration {iteration}")


def _remove_partial(save_dir: Path, iteration: int) -> None:
    """Remove what an attempt left, unless the tracker says that it is complete."""
    tracker = save_dir / "latest_checkpointed_iteration.txt"
    if tracker.exists() and tracker.read_text().strip() == str(iteration):
        return
    partial = save_dir / f"iter_{iteration:07d}"
    if partial.exists():
        shutil.rmtree(partial, ignore_errors=False)
