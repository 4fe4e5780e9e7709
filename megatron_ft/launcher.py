"""``megatron-ft-run``: start a job of several ranks that can lose some of them.

    megatron-ft-run -n 8 pretrain_llama_ft.py <flags>

Runs the script in N processes under mpirun with every flag that fault tolerance needs, on this
host, on the hosts of ``--hostfile``, or in a Slurm allocation. Exit code: the job's own when it
has written one (0 finished, 65 finished without a fault that was asked for, 75 no way to go on),
whatever died on the way; 64 for a launch that cannot work; 128 + N when signal N ended the job;
else mpirun's, or that of the last dead rank.

With ``--max-restarts R``, a job that ended badly is started again from its newest valid checkpoint,
in the same run directory; 76 when that brought it no further three times in a row.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_ft.observe.rundir import default_path
from megatron_ft.restarts import (
    EXIT_NO_PROGRESS,
    LAST_CODE,
    RUN_DIR,
    SKIP,
    START,
    Ended,
    Restarts,
)
from megatron_ft.world.environment import (
    LAUNCHED,
    PRRTE_VERSION,
    RANKS,
    STATUS_FILE,
    count_ended,
    read_checkpoint,
    read_deaths,
    read_exit_code,
    read_loading,
)
from megatron_ft.world.mpirun import Job, LaunchError, find_mpirun, mpirun_command
from megatron_ft.world.supervise import supervise

EXIT_USAGE = 64
TOLD = (RUN_DIR, START, SKIP, LAST_CODE)
EXAMPLE = "megatron-ft-run -n 8 pretrain_llama_ft.py ..."


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a start of the job needs."""

    command: Sequence[str]
    environment: Mapping[str, str]
    grace: float
    several_hosts: bool
    num_ranks: int


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns the exit code."""
    options = _Parser().parse_args(argv)
    try:
        launch = plan_launch(options, os.environ)
    except LaunchError as error:
        print(f"megatron-ft-run: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.dry_run:
        ours = {k: v for k, v in launch.environment.items() if os.environ.get(k) != v}
        print(
            " ".join(
                [*(f"{k}={shlex.quote(v)}" for k, v in ours.items()), shlex.join(launch.command)]
            )
        )
        return 0
    return run_again_and_again(launch, Restarts(options.max_restarts))


def run_again_and_again(launch: Launch, restarts: Restarts) -> int:
    """Run the job, and again while ``restarts`` says so; its exit code, or 76."""
    # All starts share one directory, also when no flag names it.
    fixed = {RUN_DIR: launch.environment.get(RUN_DIR) or str(default_path())}
    while True:
        end = run(launch, {**fixed, **restarts.environment})
        if not restarts.again(end):
            break
        print(
            f"megatron-ft-run: the job ended with code {end.code}; restart {restarts.done} of "
            f"{restarts.limit} in {restarts.pause_s:g} s",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(restarts.pause_s)
    if restarts.message:
        print(f"megatron-ft-run: {restarts.message}", file=sys.stderr, flush=True)
    return EXIT_NO_PROGRESS if restarts.gave_up else end.code


def run(launch: Launch, environment: Mapping[str, str]) -> Ended:
    """Start the job once, with ``environment`` added, and say how it has ended."""
    # The process that reports may be on any host; several hosts share the working directory.
    folder = Path(
        tempfile.mkdtemp(prefix=".megatron-ft-", dir="." if launch.several_hosts else None)
    )
    status_file = folder.absolute() / "status.json"
    try:
        end = supervise(
            launch.command,
            {**launch.environment, **environment, STATUS_FILE: str(status_file)},
            grace=launch.grace,
            ends_with_ranks=lambda: (
                not launch.several_hosts or read_exit_code(status_file) is not None
            ),
        )
        heard = count_ended(status_file)
        unheard = launch.num_ranks - heard
        if launch.several_hosts and heard:
            unheard = 0  # several hosts that append to one file may lose a line, not all of them
        code = exit_code(
            read_exit_code(status_file),
            end.returncode,
            end.stopped_by,
            read_deaths(status_file),
            unheard,
        )
        ended = Ended(code, end.stopped_by, read_checkpoint(status_file), read_loading(status_file))
    finally:
        shutil.rmtree(folder)
    if code != 0:
        sys.stderr.buffer.write(end.death_notices)
        sys.stderr.flush()
    return ended


def exit_code(
    written: int | None,
    mpirun: int,
    stopped_by: signal.Signals | None,
    deaths: Sequence[int],
    unheard: int,
) -> int:
    """The launcher's exit code.

    Args:
        written: What the job wrote; it alone knows whether the deaths were survived.
        mpirun: mpirun's code, negative for the signal that killed it; it is 0 if all ranks died.
        stopped_by: The signal that was passed on to the ranks.
        deaths: The exit codes of the ranks that died.
        unheard: How many ranks died together with the guard that would have told.
    """
    if written is not None:
        return written
    if stopped_by is not None:
        return 128 + stopped_by
    if mpirun != 0:
        return 128 - mpirun if mpirun < 0 else mpirun
    if deaths:
        return deaths[-1]
    return 128 + signal.SIGKILL if unheard else 0


def plan_launch(options: argparse.Namespace, environ: Mapping[str, str]) -> Launch:
    """Turn the command line and the surroundings into the mpirun command.

    Raises:
        LaunchError: the job cannot be started like this; the message says what to do.
    """
    num_ranks = _num_ranks(options.num_ranks, environ)
    hosts = _hosts(options.hostfile) if options.hostfile is not None else None
    num_hosts = len(hosts) if hosts else int(environ.get("SLURM_JOB_NUM_NODES", 1))
    several_hosts = hosts is not None or num_hosts > 1
    # In a batch script of several hosts, this is the first of them.
    first_host = hosts[0] if hosts else socket.gethostname() if several_hosts else "127.0.0.1"
    mpirun = find_mpirun(options.mpirun)
    variables = {
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_free_port()),
        "PYTHONUNBUFFERED": "1",
        # mpirun gives each rank a terminal; whether the job's output is one is known only here.
        "TTY_COMPATIBLE": environ.get("TTY_COMPATIBLE") or str(int(sys.stdout.isatty())),
        **dict(_variable(text, environ) for text in options.env),
        LAUNCHED: "1",
        RANKS: f"{num_ranks}/{math.ceil(num_ranks / num_hosts)}",
        PRRTE_VERSION: mpirun.prrte_version,
    }
    job = Job(
        num_ranks=num_ranks,
        program=_program(options),
        hostfile=options.hostfile,
        mca=dict(options.mca),
        # This host's ranks inherit everything.
        exported=[*variables, STATUS_FILE, *TOLD] if several_hosts else [],
    )
    return Launch(
        command=mpirun_command(mpirun.path, job),
        environment={**environ, **variables},
        grace=options.grace,
        several_hosts=several_hosts,
        num_ranks=num_ranks,
    )


def _num_ranks(asked: int | None, environ: Mapping[str, str]) -> int:
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise LaunchError(
            "srun started this launcher once per task, but one launcher starts all ranks, and "
            "ranks that srun starts itself have no fault tolerance: call megatron-ft-run in the "
            "batch script (sbatch) or in the shell of salloc, without srun"
        )
    if asked is None:
        if "SLURM_NTASKS" not in environ:
            raise LaunchError(
                f"how many ranks? Say it with -n, as in: {EXAMPLE}\n"
                "  (tensor x pipeline x data parallel size, plus spare processes)"
            )
        return int(environ["SLURM_NTASKS"])
    if asked < 1:
        raise LaunchError(f"-n {asked}: at least one rank is needed")
    return asked


def _program(options: argparse.Namespace) -> list[str]:
    """The command that each rank runs."""
    if options.module:
        return [sys.executable, "-m", options.script, *options.arguments]
    script = Path(options.script)
    if script.suffix == ".py":
        if not script.is_file():
            raise LaunchError(f"no script at {script}")
        return [sys.executable, str(script), *options.arguments]
    if shutil.which(options.script) is None:
        raise LaunchError(f"{script} is neither a .py file nor a program that can be run")
    return [options.script, *options.arguments]


def _variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given:
        if name not in environ:
            raise LaunchError(f"--env {name}: it is not set here; give a value: --env {name}=VALUE")
        value = environ[name]
    return name, value


def _hosts(hostfile: Path) -> list[str]:
    """The hosts that a hostfile names, in order, each once."""
    if not hostfile.is_file():
        raise LaunchError(f"no hostfile at {hostfile}")
    lines = (line.partition("#")[0].split() for line in hostfile.read_text().splitlines())
    names = list(dict.fromkeys(words[0] for words in lines if words))
    if not names:
        raise LaunchError(f"{hostfile} names no host; write one 'name slots=N' a line")
    return names


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count: give a number from 0")
    return int(text)


class _Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(
            prog="megatron-ft-run",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add = self.add_argument
        add("-n", dest="num_ranks", type=int, metavar="N", help="ranks (in Slurm: its task count)")
        add("--hostfile", type=Path, metavar="FILE", help="one 'host slots=N' a line")
        add(
            "--mca",
            nargs=2,
            action="append",
            default=[],
            metavar=("KEY", "VALUE"),
            help="an Open MPI setting, repeatable",
        )
        add("--mpirun", metavar="PATH", help="another Open MPI's mpirun")
        add(
            "--env",
            action="append",
            default=[],
            metavar="NAME[=VALUE]",
            help="a variable for the ranks on every host, repeatable (this host's ranks get all)",
        )
        add(
            "--grace",
            type=float,
            default=30.0,
            metavar="SECONDS",
            help="between a stop signal and the end of the ranks (default: %(default)g)",
        )
        add(
            "--max-restarts",
            type=_count,
            default=0,
            metavar="R",
            help="start a job that ended badly again from its newest checkpoint, so many times",
        )
        add("--dry-run", action="store_true", help="print the command and start nothing")
        add("-m", dest="module", action="store_true", help="SCRIPT is a module name")
        add("script", metavar="SCRIPT", help="a .py file, or a program")
        add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="for the script")

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"megatron-ft-run: {message}\n  {EXAMPLE}\n")


if __name__ == "__main__":
    raise SystemExit(main())
