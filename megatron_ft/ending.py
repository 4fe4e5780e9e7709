"""The end of a process, with all others or while they go on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from megatron_ft.arguments import EXIT_UNFIRED
from megatron_ft.starting import Job
from megatron_ft.world.environment import STATUS_FILE, read_exit_code, write_exit_code


def write_end(job: Job, code: int, message: str) -> None:
    """Let the elected process write down how the job ended, after all others."""
    session, world = job.session, job.world
    elected = session.elect()
    if not elected:
        session.observer.finish("", code, iteration=session.iteration, epoch=session.epoch)
    session.control.close(last=elected)
    _meet(world)
    if not elected:
        return
    status = "stopped" if code else ("degraded" if _is_degraded(world) else "ok")
    if not code and (unfired := _unfired(session)):
        # Whoever asked for faults wants to see them survived, not a run that met none of them.
        code = EXIT_UNFIRED
        message = f"training has ended well, but faults never struck: {', '.join(unfired)}"
    write_exit_code(code)  # first: what follows may take a minute, and this process may die in it
    session.observer.finish(status, code, message, iteration=session.iteration, epoch=session.epoch)
    if message:
        verb = "stopped" if status == "stopped" else "finished"
        print(f"megatron_ft: {verb}: {message}", file=sys.stderr, flush=True)


def _unfired(session: Any) -> list[str]:
    """Faults on the command line that should have struck in the iterations that there were."""
    injector = session.injector
    return [] if injector is None else [str(f) for f in injector.unfired(session.iteration)]


def leave_from_thread(job: Job, code: int, message: str) -> None:
    """The job ends while this process builds in its main thread: there is nothing to unwind to."""
    write_end(job, code, message)
    sys.stdout.flush()
    sys.stderr.flush()
    # The watch stays open, for the main thread still uses it.
    _meet(job.world)
    os._exit(code)


def part(job: Job) -> None:
    """End this process, whose replica was asked to leave, while the others go on."""
    session = job.session
    print(f"megatron_ft: process {job.world.process} leaves as asked", flush=True)
    session.observer.finish("", 0, iteration=session.iteration, epoch=session.epoch)
    session.control.close(last=False)
    if session.watch is not None:
        session.watch.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _is_degraded(world: Any) -> bool:
    if world is None:
        return False
    return bool(world.assignment.vacant_slots or world.assignment.adopted)


def _meet(world: Any) -> bool:
    """Wait for the others, whatever state they are in; whether all have come."""
    if world is None:
        return True
    from mpi4py import MPI

    from megatron_ft.world.errors import is_failure

    try:
        world.comm.Barrier()
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        return False
    return True


def leave(job: Job, code: int) -> int:
    """End the process; MPI_Finalize can hang once a process has died, so it is not called."""
    if job.session is not None and job.session.watch is not None:
        job.session.watch.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if job.world is not None:
        if not _meet(job.world):
            _write_for_the_dead(job, code)
        os._exit(code)
    return code


def _write_for_the_dead(job: Job, code: int) -> None:
    """The elected process may have died before it could say how the job ended; all others know."""
    status = os.environ.get(STATUS_FILE)
    if status and read_exit_code(Path(status)) is None:
        unfired = not code and job.session is not None and _unfired(job.session)
        write_exit_code(EXIT_UNFIRED if unfired else code)
