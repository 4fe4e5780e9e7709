"""What a rank and its launcher tell each other through the environment.

mpirun cannot give each rank its own variables, so a rank derives torchrun's from Open MPI's.
The other way, mpirun's exit code says whether any process died, which a job that survives deaths
does not mean by "failed": so the job writes its own exit code to a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

STATUS_FILE = "MEGATRON_FT_STATUS_FILE"
"""Path of the file through which the job tells the launcher its exit code."""
DEATHS_SUFFIX = ".deaths"
"""Beside the status file: the exit code of each rank that died, one a line, oldest first."""
GONE_SUFFIX = ".gone"
"""Beside the status file: the name of each rank that has ended, however it did."""
LAUNCHED_NAME = "rank"
"""The name of all ranks that are started together; later ones have names of their own."""
CHECKPOINT_SUFFIX, LOADING_SUFFIX = ".checkpoint", ".loading"
"""Beside the status file: the newest complete checkpoint, and the one that is being loaded."""
LAUNCHED = "MEGATRON_FT_LAUNCHED"
"""Set by the launcher: mpirun has every flag that fault tolerance needs."""
PRRTE_VERSION = "MEGATRON_FT_PRRTE_VERSION"
"""Set by the launcher: the version of the runtime below mpirun."""

RANKS = "MEGATRON_FT_RANKS"
"""Set by the launcher: ranks of the launch, and at the most on one host, as ``8/4``."""

FROM_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def rank_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what torchrun would set, from Open MPI's variables. Call before torch is imported.

    RANK and WORLD_SIZE are those of the process in its own MPI world as it was started. A process
    that takes over a slot later gets its slot's number from the runtime, not from here.

    A process that another one starts is alone in its MPI world and on its host, as Open MPI counts;
    it shares the host with as many as those of the launch do.
    """
    if FROM_OPEN_MPI["RANK"] in environ:
        for name, source in FROM_OPEN_MPI.items():
            environ[name] = environ[source]
        launched, _, on_host = environ.get(RANKS, "").partition("/")
        if on_host and environ["WORLD_SIZE"] != launched:
            environ["LOCAL_WORLD_SIZE"] = on_host
        if int(environ["LOCAL_WORLD_SIZE"]) > 1:
            environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        # Not under mpirun: what another launcher has set stays, for preflight to find.
        for name, value in ONE_PROCESS.items():
            environ.setdefault(name, value)
    environ.setdefault("MASTER_ADDR", "127.0.0.1")
    environ.setdefault("MASTER_PORT", "29500")


def local_rank_of(slot: int, environ: Mapping[str, str] = os.environ) -> int:
    """The local rank, and with it the GPU, of the process that first served a slot.

    mpirun fills one host after the other, and slots go to processes in their order. Who takes the
    slot later takes the place of that process, on the same host if it can.
    """
    on_host = environ.get(RANKS, "").partition("/")[2] or environ.get("LOCAL_WORLD_SIZE", "1")
    return slot % int(on_host)


def write_exit_code(code: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell the launcher how the job ended; the last word counts. One elected process calls this.

    Does nothing in a process that was not started by the launcher.
    """
    if STATUS_FILE not in environ:
        return
    _replace(Path(environ[STATUS_FILE]), json.dumps({"exit_code": code}))


def read_exit_code(path: Path) -> int | None:
    """The exit code that the job wrote, or None when it wrote none."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    return int(json.loads(text)["exit_code"])


def read_deaths(status_file: Path) -> list[int]:
    """Exit codes of the ranks that died, 128 + N for signal N, oldest first."""
    try:
        text = status_file.with_name(status_file.name + DEATHS_SUFFIX).read_text()
    except FileNotFoundError:
        return []
    return [int(line) for line in text.split()]


def count_ended(status_file: Path) -> int:
    """How many of the ranks that were started together have ended while their guard lived."""
    try:
        text = status_file.with_name(status_file.name + GONE_SUFFIX).read_text()
    except FileNotFoundError:
        return 0
    return text.split().count(LAUNCHED_NAME)


def is_gone(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the rank of this name, which was given to its guard, is known to have ended."""
    if STATUS_FILE not in environ:
        return False
    try:
        text = Path(environ[STATUS_FILE] + GONE_SUFFIX).read_text()
    except FileNotFoundError:
        return False
    return name in text.split()


def note_checkpoint(iteration: int, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher that the checkpoint of this iteration is complete; one process calls it."""
    if STATUS_FILE in environ:
        _replace(Path(environ[STATUS_FILE] + CHECKPOINT_SUFFIX), str(iteration))


def note_loading(iteration: int | None, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher which checkpoint is being loaded, None when that is done."""
    if STATUS_FILE not in environ:
        return
    path = Path(environ[STATUS_FILE] + LOADING_SUFFIX)
    if iteration is None:
        path.unlink(missing_ok=True)
    else:
        _replace(path, str(iteration))


def read_checkpoint(status_file: Path) -> int | None:
    """What ``note_checkpoint`` said last."""
    return _read_int(Path(f"{status_file}{CHECKPOINT_SUFFIX}"))


def read_loading(status_file: Path) -> int | None:
    """What ``note_loading`` said last, None if it was done."""
    return _read_int(Path(f"{status_file}{LOADING_SUFFIX}"))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
