"""New processes are started by the elected one, in a thread, while all others train.

A spawned process first connects with its parent alone (the bridge). There it is told for which slot
to build, and only when it has built and waits is it taken into the world, at a step boundary:
``World.admit``. Until then it is in nobody's way: no repair waits for it, and if it dies nobody
else needs to know.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from megatron_ft.rejoin.attempt import HERE_TAG, ORDER_TAG, READY_TAG, Attempt
from megatron_ft.topology import Topology
from megatron_ft.world.comms import AGREEING, quiet
from megatron_ft.world.errors import is_failure

logger = logging.getLogger("megatron_ft.rejoin")

HELLO_TAG, BOOT_TAG, IN_TAG, OUT_TAG = 7201, 7202, 7206, 7207
HELLO_PATIENCE_S = 5.0
OUT_PATIENCE_S = 1.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 60.0


class NotWanted(Exception):
    """In a spawned process: nobody takes it in, so that it may go."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a new process prepares, outside of the world."""

    process: int
    """The id that is kept for it."""
    slot: int | None
    """The slot for which it builds; None if for none."""
    topology: Topology
    iteration: int
    """The step at which it was told."""
    run_dir: str
    job: str
    """What the ids of this start's events begin with."""
    watch: tuple[str, str] | None
    """Where the processes of its parent's host watch each other."""
    made: int = 0
    """How many communicators its parent has made."""


class Spawner:
    """Starts processes one after another.

    Args:
        limit: How many at the most in the life of this process's job.
        reserve: Gives the id of a process that is about to be started.
        order: From that id to what it prepares; called from a thread when it has imported.
    """

    def __init__(
        self, limit: int, reserve: Callable[[], int], order: Callable[[int], Order]
    ) -> None:
        self.limit = limit
        self.order: Order | None = None
        """Of the process that prepares itself or waits to be taken in."""
        self.failed: list[int] = []
        """Slots for which one died while it built; emptied by who has told the others."""
        self._reserve = reserve
        self._make_order = order
        self.started = 0
        self.bridge: MPI.Intracomm | None = None
        """To a process that waits to be taken in; None while none does."""
        self._wanted = 0
        self._said = False
        self._backoff = 0.0
        self._attempt: Attempt | None = None
        quiet(MPI.COMM_SELF)

    @property
    def pending(self) -> int:
        """Processes that are being started or wait to be taken in."""
        return self._wanted + (self.bridge is not None)

    @property
    def exhausted(self) -> bool:
        """Whether it may start no more, and none is on its way."""
        return self.started >= self.limit and not self.pending

    def want(self, count: int) -> None:
        """From the next ``go_on``, ``count`` processes are to be on their way."""
        # One that is being started is counted in both.
        room = self.limit - self.started - max(0, self._wanted - self._busy)
        missing = min(count - self.pending, room)
        if count > self.pending and room <= 0 and not self._said:
            self._said = True
            logger.warning("--ft-respawn-limit of %d is reached: no more processes", self.limit)
        if missing > 0:
            self._wanted += missing

    def cancel(self) -> None:
        """Start no more; what is on its way stays."""
        self._wanted = min(self._wanted, 1) if self._busy else 0

    @property
    def _busy(self) -> bool:
        return self._attempt is not None and not self._attempt.over

    def _one_less(self) -> None:
        self._wanted = max(0, self._wanted - 1)

    def ready(self) -> bool:
        """Whether a process waits to be taken in, and still lives."""
        if self.bridge is None:
            return False
        try:
            self.bridge.send(None, dest=1, tag=HELLO_TAG)
            end = time.monotonic() + HELLO_PATIENCE_S
            while not self.bridge.Iprobe(source=1, tag=HELLO_TAG):
                if time.monotonic() > end:
                    logger.warning("a process that was started does not answer: given up")
                    self._forget()
                    return False
                time.sleep(0.001)
            self.bridge.recv(source=1, tag=HELLO_TAG)
            return True
        except MPI.Exception as error:
            if not is_failure(error):
                raise
            logger.warning("a process that was started died before it was taken in")
            self._forget()
            return False

    def tell(self, tag: int, what: object) -> None:
        """Send something to the process at the bridge; if it has died, that is found out later."""
        assert self.bridge is not None
        try:
            self.bridge.send(what, dest=1, tag=tag)
        except MPI.Exception as error:
            if not is_failure(error):
                raise

    def parted(self, is_in: bool) -> None:
        """The process at the bridge is one of the world now, or could not be taken in."""
        assert self.bridge is not None
        if is_in:
            self.bridge.Free()
            self._backoff = 0.0
        else:  # whoever died: if it is this one each time, it is not started again at once
            self._back_off()
        self.bridge = self.order = None

    def discard(self) -> None:
        """Send the process at the bridge away: others have come in its place."""
        self.tell(BOOT_TAG, None)
        self.bridge = self.order = None

    def _forget(self) -> None:
        """The process that was on its way, or at the bridge, has come to nothing."""
        if self.order is not None and self.order.slot is not None:
            self.failed.append(self.order.slot)
        self.bridge = self.order = None
        self._back_off()

    def _back_off(self) -> None:
        self._backoff = min(max(2 * self._backoff, FIRST_BACKOFF_S), LAST_BACKOFF_S)

    def go_on(self) -> None:
        """Start the next process that is wanted; not in a repair, which it would slow down."""
        room = self.started < self.limit
        if self._wanted and room and self.bridge is None and not self._busy:
            self.started += 1
            process = self._reserve()
            give = functools.partial(self._give_order, process)
            self._attempt = Attempt(self._backoff, give, self._ended)

    def _give_order(self, process: int) -> Order:
        self.order = self._make_order(process)
        return self.order

    def _ended(self, bridge: MPI.Intracomm | None) -> None:
        if bridge is None:
            self._forget()
        # In this order: who looks in between must not miss one.
        self.bridge = bridge
        self._one_less()


def parent() -> MPI.Intracomm | None:
    """In a spawned process, the bridge to the one that spawned it; None in any other.

    Raises:
        NotWanted: The parent is gone.
    """
    inter = MPI.Comm.Get_parent()
    if inter == MPI.COMM_NULL:
        return None
    quiet(inter)
    with _or_leave():
        bridge = quiet(inter.Merge(True))
        inter.Free()
    return bridge


def wait_for_order(bridge: MPI.Intracomm, patience_s: float) -> Order:
    """Tell the parent that this process is there; returns what it is to prepare.

    Raises:
        NotWanted: The parent is gone.
    """
    with _or_leave():
        bridge.send(None, dest=0, tag=HERE_TAG)
        order: Order = _first(bridge, (ORDER_TAG,), patience_s)[1]
    return order


def parent_lives(bridge: MPI.Intracomm) -> None:
    """Look whether there is still somebody for whom to prepare.

    Raises:
        NotWanted: There is not.
    """
    with _or_leave():
        bridge.Iprobe(source=0, tag=BOOT_TAG)


def wait_for_boot(bridge: MPI.Intracomm, patience_s: float) -> Any:
    """Wait at the bridge, ready and answering hellos; returns what the parent says of the world.

    Raises:
        NotWanted: The parent is gone or has no use for this process.
    """
    with _or_leave():
        bridge.send(None, dest=0, tag=READY_TAG)
        while True:
            tag, boot = _first(bridge, (HELLO_TAG, BOOT_TAG), patience_s)
            if tag == BOOT_TAG:
                break
            bridge.send(None, dest=0, tag=HELLO_TAG)
    if boot is None:
        raise NotWanted("others have come in its place")
    return boot


def wait_until_in(bridge: MPI.Intracomm, patience_s: float) -> bool:
    """Wait until the parent says that all have taken this process in; True.

    Raises:
        NotWanted: The parent is gone.
    """
    with _or_leave():
        _first(bridge, (IN_TAG,), patience_s)
    return True


def is_out(bridge: MPI.Intracomm) -> bool:
    """Whether the parent has said that this process could not be taken in.

    Raises:
        NotWanted: The parent is gone.
    """
    # The main thread may be in an agreement, and stay there when nobody else comes to it.
    mine = AGREEING.acquire(timeout=OUT_PATIENCE_S)
    try:
        with _or_leave():
            return bridge.Iprobe(source=0, tag=OUT_TAG)
    finally:
        if mine:
            AGREEING.release()


def _first(bridge: MPI.Intracomm, tags: tuple[int, ...], patience_s: float) -> tuple[int, Any]:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        for tag in tags:
            if bridge.Iprobe(source=0, tag=tag):
                return tag, bridge.recv(source=0, tag=tag)
        time.sleep(0.005)
    raise NotWanted(f"not taken into the job within {patience_s:g} s")


@contextlib.contextmanager
def _or_leave() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        raise NotWanted("the process that started this one has died") from error
