"""The start of a process: its place in the launch or with its parent, run directory, watch."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from megatron_ft.arguments import Early, FtArgumentError
from megatron_ft.restarts import RUN_DIR, START
from megatron_ft.world.environment import local_rank_of


class Job:
    """What a process has before Megatron is imported."""

    def __init__(self, early: Early, backend: str) -> None:
        self.early = early
        self.backend = backend
        self.world: Any = None
        self.watch: Any = None
        self.slot: int | None = int(os.environ["RANK"])
        self.session: Any = None
        self.newcomer: Any = None
        """In a process that another one started: its way into the world."""

    def decide(self, before: Any, dead: frozenset[int], reports: Any) -> Any:
        """The planner of the world: what all processes know, they decide alike."""
        return self.session.membership.decide(before, dead, reports)


def start(early: Early) -> Job:
    """Connect the processes and give each its slot.

    Raises:
        ValueError: The launch cannot carry what the flags ask for; the message says what can.
    """
    under_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    backend = early.backend or ("ulfm" if under_mpi else "gloo")
    if int(os.environ["WORLD_SIZE"]) > 1 or early.strategy:
        if backend == "ulfm":
            from megatron_ft.world.preflight import preflight

            if not _is_spawned():
                preflight()
        elif early.strategy:
            raise FtArgumentError(
                f"{early.strategy} needs collectives that survive: leave out "
                "--distributed-backend and start with megatron-ft-run"
            )
    job = Job(early, backend)
    if backend == "ulfm":
        _connect(job)
    return job


def _is_spawned() -> bool:
    """Whether another process of the job started this one, with what preflight asks for."""
    from mpi4py import MPI

    return bool(MPI.Comm.Get_parent() != MPI.COMM_NULL)


def _connect(job: Job) -> None:
    """Make the world of this process: from the launch, or from the one that spawned it."""
    from mpi4py import MPI

    from megatron_ft.rejoin import priority, spawn
    from megatron_ft.rejoin.newcomer import Newcomer, leave
    from megatron_ft.topology import Topology, initial_assignment
    from megatron_ft.world import mpi_fix, mpi_fix_send, numbers
    from megatron_ft.world.world import World

    early, comm = job.early, MPI.COMM_WORLD
    if early.strategy and not early.options.ft_no_mpi_fix:
        mpi_fix.install()
        mpi_fix_send.install()
    if early.strategy:
        numbers.made()  # while there is one thread: it finds out where the number is
    try:
        bridge = spawn.parent()
    except spawn.NotWanted as why:
        leave(why)
    if bridge is not None:
        priority.lower(early.options.ft_respawn_nice)
        import_everything(early.tokenizer)
        job.newcomer = Newcomer.arrive(bridge)
        order = job.newcomer.order
        job.world = World.outside(order.topology, order.process, job.decide)
    else:
        num_slots = early.num_slots or comm.size - early.options.ft_spares
        if num_slots < 1 or num_slots % early.replica_size:
            raise FtArgumentError(
                f"{num_slots} slots are no multiple of a replica of {early.replica_size} (tensor "
                f"{early.tensor} x pipeline {early.pipeline} x context {early.context}): change "
                "-n, --ft-spares or a parallel size"
            )
        if num_slots != comm.size and not early.strategy:
            raise FtArgumentError("more or fewer processes than slots need --ft-recover")
        topology = Topology(
            tensor=early.tensor,
            pipeline=early.pipeline,
            data=num_slots // early.replica_size,
            context=early.context,
            order=early.order,  # type: ignore[arg-type]  # one of the two by construction
        )
        assignment = initial_assignment(topology, range(comm.size))
        job.world = World(topology, assignment, comm.rank, comm, range(comm.size), job.decide)
    slots = job.world.slots
    job.slot = slots[0] if slots else None
    os.environ["RANK"] = str(job.slot if job.slot is not None else 0)
    if job.newcomer is not None and job.newcomer.order.slot is not None:
        os.environ["LOCAL_RANK"] = str(local_rank_of(job.newcomer.order.slot))
    os.environ["WORLD_SIZE"] = str(job.world.topology.num_slots)


def import_everything(tokenizer_type: str | None) -> None:
    """What takes seconds is done before the others have to wait for this process."""
    import megatron.training.training  # noqa: F401

    import megatron_ft.llama
    import megatron_ft.patches.catalogue
    import megatron_ft.session  # noqa: F401
    from megatron_ft.patches.tokenizers import import_tokenizers

    if tokenizer_type is not None:
        import_tokenizers(tokenizer_type)


def agreed_run_dir(job: Job) -> tuple[str, str]:
    """The run directory, and the name of this start in it; the same for all processes of the job.

    A start has a number above those of all that have left events in the directory, by this launcher
    or by an earlier one, so that its events are not taken for theirs.

    Raises:
        FtArgumentError: Several processes that do not know each other would each make a directory.
    """
    from megatron_ft.observe.jsonl import read_events
    from megatron_ft.observe.rundir import RunDirectory, default_path

    if job.newcomer is not None:
        return job.newcomer.order.run_dir, job.newcomer.order.job
    path = job.early.options.ft_run_dir or os.environ.get(RUN_DIR)
    if path is None and job.world is None and int(os.environ["WORLD_SIZE"]) > 1:
        raise FtArgumentError(
            "each process would make a run directory of its own: add --ft-run-dir, or start with "
            "megatron-ft-run"
        )
    path = path or str(default_path())
    agreed: tuple[str, str] | None = None
    if job.world is None or job.world.comm.rank == 0:
        events = read_events(RunDirectory(path)).events
        # An agreed event is named by the start that it is of.
        used = [int(event["id"].partition(":")[0]) for event in events if ":" in event["id"]]
        agreed = path, str(max(int(os.environ.get(START, "0")), *(n + 1 for n in used), 0))
    if job.world is not None:
        agreed = job.world.comm.bcast(agreed)
    assert agreed is not None
    return agreed


def watch_of(job: Job) -> Any:
    """Begin the fencing between the processes of this host; only where a strategy is on."""
    if job.early.strategy is None:
        return None
    from megatron_ft.rejoin.newcomer import leave
    from megatron_ft.rejoin.spawn import NotWanted
    from megatron_ft.world.watch import Timeouts, Watch

    options, world = job.early.options, job.world
    timeouts = Timeouts(
        alive=options.ft_watch_timeout,
        progress=options.ft_progress_timeout,
        collective=options.ft_collective_timeout,
        setup=60 * options.distributed_timeout_minutes,
    )
    newcomer = job.newcomer
    name = f"megatron_ft-{os.getpid()}-{time.time_ns()}"
    path = Path("/dev/shm") / (name if newcomer is not None else world.comm.bcast(name))
    if newcomer is not None:
        path = Watch.path_for(newcomer.order.watch, path)
    try:
        watch = Watch(
            path, world.process, timeouts, lambda seconds: world.revoke_groups(pipeline=True)
        )
    except FileNotFoundError:
        if newcomer is None:
            raise
        leave(NotWanted("the process that started this one has died"))  # and its file is gone
    world.watch = watch
    watch.start()
    if newcomer is None:
        world.comm.Barrier()  # everybody has the file open: it can lose its name
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return watch
