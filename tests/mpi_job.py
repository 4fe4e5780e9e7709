"""Start MPI ranks from a test, with the project's own mpirun flags and a hard end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import _one_at_a_time

from megatron_ft.world.mpirun import Job, find_mpirun, mpirun_command

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Ended:
    code: int
    output: str


def run_ranks(
    num_ranks: int,
    worker: str,
    *arguments: str | Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``tests/workers/<worker>`` on ``num_ranks`` ranks; kill them all after ``timeout_s``."""
    program = [sys.executable, str(WORKERS / worker), *map(str, arguments)]
    with _one_at_a_time():
        return run_command(command(num_ranks, program), timeout_s, environment)


def command(num_ranks: int, program: Sequence[str]) -> list[str]:
    return mpirun_command(find_mpirun().path, Job(num_ranks=num_ranks, program=program))


def run_command(
    arguments: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> Ended:
    quiet = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    job = subprocess.Popen(
        list(arguments),
        env={**os.environ, **quiet, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        raise AssertionError(f"no end after {timeout_s} s:\n{output[-5000:]}") from None
    return Ended(job.returncode, output)
