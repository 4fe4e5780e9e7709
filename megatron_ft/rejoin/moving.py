"""The state part of a repair: everybody who is to hold a slot's state gets it, or all try again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpi4py import MPI

from megatron_ft.recovery_plan import Adopt, Fill, Rebuild
from megatron_ft.world.errors import is_failure

if TYPE_CHECKING:
    from megatron_ft.rejoin.transfer import Moved
    from megatron_ft.session import Session
    from megatron_ft.world.repaired import Repaired

logger = logging.getLogger("megatron_ft.rejoin")

Move = Fill | Rebuild | Adopt


def needs_state(move: Move) -> bool:
    """Whether who takes this slot does not hold its state yet."""
    return isinstance(move, Rebuild) or move.is_copy


def move_state(session: Session, moves: Sequence[Move], repaired: Repaired) -> bool:
    """Copy or rebuild what the moves ask for; whether everybody got what he needs.

    Collective over the active processes of the repaired world, which all have the same moves.
    """
    world = session.world
    assert world is not None
    moved: dict[int, Moved] = {}
    ok = True
    try:
        for move in moves:
            cost = _take_or_give(session, move, repaired)
            if cost is not None:
                moved[move.slot] = cost
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        ok = False
    except Exception:
        logger.exception("state could not be moved")
        ok = False
    if not ok:
        # Whoever waits for this process in its own copy must not wait for ever.
        with contextlib.suppress(MPI.Exception):
            world.comm.Revoke()
    if not world.agree(ok):
        return False
    for move in moves:
        if move.process != world.process:
            continue
        if isinstance(move, Adopt):
            session.adopted(move, moved.get(move.slot))
        else:
            session.filled(move, moved.get(move.slot))
    return True


def give_state(session: Session, moves: Sequence[Move]) -> None:
    """A pool process's part: it sends what the plan asks of it, and has no vote.

    If a copy comes to nothing, those who serve find that and call all to another repair.
    """
    from megatron_ft.checkfree import lr_scale

    world = session.world
    assert world is not None
    try:
        for move in moves:
            if isinstance(move, Rebuild):
                if session.args is None:
                    continue  # it has built nothing, and what is noted comes with its state
                # It may hold its own stage's last state and take a slot again without a copy.
                lr_scale.note_rebuilt(
                    session, world.topology.stage_of(move.slot), session.committed
                )
            elif move.source_process == world.process:
                copy_state(session, move)
    except MPI.Exception as error:
        if not is_failure(error):
            raise


def _take_or_give(session: Session, move: Move, repaired: Repaired) -> Moved | None:
    """This process's part in one move; None where it has none."""
    world = session.world
    assert world is not None
    if isinstance(move, Rebuild):
        from megatron_ft.checkfree import live

        return live.take_part(session, move, repaired)
    if isinstance(move, Adopt) and move.process == world.process:
        return session.hosting.adopt(move)  # also where it holds the state already
    if move.is_copy and world.process in (move.source_process, move.process):
        return copy_state(session, move)
    return None


def copy_state(session: Session, fill: Fill | Adopt) -> Moved | None:
    """This process's side of one copy."""
    from megatron_ft.rejoin import transfer

    world = session.world
    assert world is not None
    with world.watch.waiting():
        if fill.process == world.process:
            return transfer.receive(session, world.comm, world.rank_of(fill.source_process))
        rank = world.rank_of(fill.process)
        shard = world.topology.shard_of(fill.slot)
        if shard in session.membership.held_beside:
            return session.hosting.holding(shard).send(world.comm, rank)
        return transfer.send(session, world.comm, rank)
