"""megatron-ft-run with real mpirun jobs: environment, output, exit codes, signals, leftovers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ft.launcher import exit_code
from megatron_ft.world import supervise as supervision
from megatron_ft.world.environment import FROM_OPEN_MPI, local_rank_of, rank_environment

LAUNCHER = [sys.executable, "-m", "megatron_ft.launcher"]
RANK = str(Path(__file__).with_name("launch_rank.py"))
TIMEOUT = 60.0


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without a batch system's or torchrun's words."""
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k not in names},
        **more,
    }


def launch(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCHER, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT,
        env=clean_environment(**env),
    )


def dry_run(*arguments: str, **env: str) -> list[str]:
    done = launch("--dry-run", *arguments, **env)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def contains(command: list[str], *part: str) -> bool:
    return any(tuple(command[i : i + len(part)]) == part for i in range(len(command)))


# --- the command ---------------------------------------------------------------------------------


def test_the_command_has_every_flag_that_fault_tolerance_needs() -> None:
    command = dry_run("-n", "3", RANK, "--some", "flag with space")
    assert contains(command, "--with-ft", "ulfm")
    assert contains(command, "--mca", "pml", "ob1")
    assert contains(command, "--mca", "mpi_ft_detector", "0")
    assert contains(command, "--bind-to", "none")
    assert "--oversubscribe" in command
    assert ("--allow-run-as-root" in command) == (os.geteuid() == 0)
    excluded = command[command.index("coll") + 1]
    assert excluded.startswith("^")
    assert {"han", "sm", "inter", "sync"} <= set(excluded[1:].split(","))
    assert command[-4:] == [sys.executable, RANK, "--some", "flag with space"]
    assert command[-10:-6] == ["-n", "3", "/bin/sh", "-c"]
    assert "-x" not in command


def test_a_setting_by_the_user_replaces_ours(tmp_path: Path) -> None:
    hosts = tmp_path / "my hosts"
    hosts.write_text("# comment\n\nnode1 slots=4\nnode2 slots=4\n")
    command = dry_run(
        "-n", "2", "--mca", "coll", "^han", "--hostfile", str(hosts), "--env", "A=b=c", "-m", "x.y"
    )
    assert command.count("coll") == 1 and contains(command, "--mca", "coll", "^han")
    assert contains(command, "--hostfile", str(hosts))
    assert "MASTER_ADDR=node1" in command and "A=b=c" in command
    assert "MEGATRON_FT_RANKS=2/1" in command
    assert contains(command, "-x", "A") and contains(command, "-x", "MEGATRON_FT_STATUS_FILE")
    assert command[-3:] == [sys.executable, "-m", "x.y"]


def test_in_a_slurm_allocation_its_task_count_is_the_default() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
    assert contains(dry_run(RANK, **slurm), "-n", "4")
    assert contains(dry_run("-n", "3", RANK, **slurm), "-n", "3")


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        ([RANK], {}, "Say it with -n, as in: megatron-ft-run -n 8"),
        (["-n", "0", RANK], {}, "at least one rank"),
        (["-n", "2"], {}, "SCRIPT"),
        (["-n", "2", "/nowhere/train.py"], {}, "no script at /nowhere/train.py"),
        (["-n", "2", "no-such-program"], {}, "no-such-program is neither"),
        (["-n", "2", "--env", "NOT_SET_HERE", RANK], {}, "--env NOT_SET_HERE=VALUE"),
        (["-n", "2", "--hostfile", "/nowhere/hosts", RANK], {}, "no hostfile at /nowhere/hosts"),
        (["-n", "2", "--hostfile", os.devnull, RANK], {}, "no hostfile"),
        (["-n", "2", "--mpirun", "/nowhere/mpirun", RANK], {}, "no mpirun at '/nowhere/mpirun'"),
        (["-n", "2", "--mpirun", "true", RANK], {}, "not Open MPI 5 or later"),
        (["-n", "2", RANK], {"SLURM_STEP_NUM_TASKS": "4"}, "without srun"),
    ],
)
def test_a_launch_that_cannot_work_says_what_to_do(
    arguments: list[str], env: dict[str, str], says: str
) -> None:
    done = launch(*arguments, **env)
    assert done.returncode == 64
    assert says in done.stderr
    assert done.stdout == ""


# --- rules without a job -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "mpirun", "stopped_by", "deaths", "unheard", "expected"),
    [
        (0, 137, None, [137], 1, 0),  # deaths were survived
        (75, 0, None, [], 0, 75),
        (0, 1, signal.SIGTERM, [], 0, 0),  # saved and finished when asked to
        (None, 0, None, [], 0, 0),
        (None, 3, None, [], 0, 3),
        (None, -9, None, [], 2, 137),  # mpirun itself was killed
        (None, 1, signal.SIGINT, [130], 0, 130),
        (None, 0, None, [137, 1], 0, 1),  # mpirun takes the death of all for survived
        (None, 0, None, [], 1, 137),
    ],
)
def test_exit_code(
    written: int | None,
    mpirun: int,
    stopped_by: signal.Signals | None,
    deaths: list[int],
    unheard: int,
    expected: int,
) -> None:
    assert exit_code(written, mpirun, stopped_by, deaths, unheard) == expected


def test_rank_environment_under_mpirun_overrides_what_was_there() -> None:
    environ = {
        "RANK": "99",
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMP_NUM_THREADS": "6",
    }
    rank_environment(environ)
    assert environ["RANK"] == "5" and environ["WORLD_SIZE"] == "8"
    assert environ["LOCAL_RANK"] == "1" and environ["LOCAL_WORLD_SIZE"] == "4"
    assert environ["OMP_NUM_THREADS"] == "6"


def test_a_process_that_another_one_starts_is_not_alone_on_its_host() -> None:
    """Open MPI counts it as a job of its own; it has threads and a GPU as the one it replaces."""
    alone = dict.fromkeys(FROM_OPEN_MPI.values(), "0")
    alone |= {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    spawned = {**alone, "MEGATRON_FT_RANKS": "8/4"}
    rank_environment(spawned)
    assert spawned["LOCAL_WORLD_SIZE"] == "4" and spawned["OMP_NUM_THREADS"] == "1"
    assert local_rank_of(6, spawned) == 2
    one = {**alone, "MEGATRON_FT_RANKS": "1/1"}
    rank_environment(one)
    assert one["LOCAL_WORLD_SIZE"] == "1" and "OMP_NUM_THREADS" not in one


def test_rank_environment_without_mpirun_keeps_what_another_launcher_said() -> None:
    alone: dict[str, str] = {}
    rank_environment(alone)
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["LOCAL_RANK"]) == ("0", "1", "0")
    by_torchrun = {"RANK": "3", "WORLD_SIZE": "4"}
    rank_environment(by_torchrun)
    assert (by_torchrun["RANK"], by_torchrun["WORLD_SIZE"]) == ("3", "4")


# --- jobs ----------------------------------------------------------------------------------------


def reported(folder: Path, name: str) -> dict[str, Any]:
    """What a rank reported under this name, as soon as it has."""
    until = time.monotonic() + TIMEOUT
    while not (folder / name).exists():
        assert time.monotonic() < until, f"no rank reported {name}"
        time.sleep(0.05)
    report: dict[str, Any] = json.loads((folder / name).read_text())
    return report


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def assert_gone(pids: list[int], within: float) -> None:
    until = time.monotonic() + within
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []


class Waiting:
    """A started job of two ranks that wait, each with a helper process."""

    def __init__(self, case: str, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [*LAUNCHER, "-n", "2", *options, RANK, case, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_environment(),
        )
        reports = [reported(folder, str(rank)) for rank in range(2)]
        self.mpirun: int = reports[0]["mpirun"]
        self.ranks_and_mpirun: list[int] = [self.mpirun, *(report["pid"] for report in reports)]
        self.pids = self.ranks_and_mpirun + [report["helper"] for report in reports]

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, output

    def close(self) -> None:
        for pid in [self.process.pid, *self.pids]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Waiting] = []

    def start(case: str, *options: str) -> Waiting:
        jobs.append(Waiting(case, tmp_path, *options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_a_rank_is_killed_and_the_job_ends_well(tmp_path: Path) -> None:
    done = launch("-n", "3", "--env", "GREETING=a b;c,d", RANK, "lose-one", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        env = reported(tmp_path, str(rank))["env"]
        assert env.pop("MASTER_PORT").isdigit()
        assert env == {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "GREETING": "a b;c,d",
        }
    lines = done.stdout.splitlines()
    for line in ("[0] hello", "[1] hello", "[2] hello", "[0] 2 survivors", "[2] 2 survivors"):
        assert line in lines
    # Survived deaths are not reported by mpirun's boxes. On a busy machine libevent, inside
    # prterun, may remark on the dead rank's closed pipe.
    said = [line for line in done.stderr.splitlines() if not line.startswith("[warn] Epoll")]
    assert sorted(said) == ["[0] to stderr", "[2] to stderr"]


def test_the_job_says_that_it_gave_up(tmp_path: Path) -> None:
    done = launch("-n", "3", RANK, "give-up", str(tmp_path))
    assert done.returncode == 75, done.stderr


def test_a_job_that_says_nothing_and_lost_its_ranks_has_failed(tmp_path: Path) -> None:
    assert launch("-n", "2", RANK, "exit-without-word", str(tmp_path)).returncode == 3
    crashed = launch("-n", "2", RANK, "no-such-case", str(tmp_path))
    assert crashed.returncode == 1
    assert "KeyError: 'no-such-case'" in crashed.stderr
    assert launch("-n", "2", "sh", "-c", "exit 64").returncode == 64
    assert launch("-n", "2", "true").returncode == 0
    # Each with its guard, whose word would be missing: they are one process group.
    assert launch("-n", "2", "sh", "-c", "kill -KILL 0").returncode == 128 + signal.SIGKILL


def test_signals_reach_the_ranks_and_nothing_stays(tmp_path: Path, waiting: Any) -> None:
    job = waiting("wait-for-sigterm")
    job.process.send_signal(signal.SIGUSR1)
    for rank in range(2):
        reported(tmp_path, f"SIGUSR1-{rank}")
    assert job.process.poll() is None
    start = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 0, output
    assert time.monotonic() - start < 20  # long before the grace ends, when mpirun kills
    assert "SIGTERM passed to the ranks" in output
    assert_gone(job.pids, within=0)


def test_ranks_that_ignore_a_stop_are_killed_after_the_grace(waiting: Any) -> None:
    job = waiting("wait", "--grace", "1")
    start = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 128 + signal.SIGTERM, output
    assert 1 <= time.monotonic() - start < 20
    assert_gone(job.pids, within=0)


def test_the_second_interrupt_kills_at_once(tmp_path: Path, waiting: Any) -> None:
    job = waiting("wait", "--grace", "50")
    job.process.send_signal(signal.SIGINT)
    for rank in range(2):
        reported(tmp_path, f"SIGINT-{rank}")
    assert job.process.poll() is None
    start = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    code, output = job.end()
    assert code == 128 + signal.SIGINT, output
    assert time.monotonic() - start < 20
    assert_gone(job.pids, within=0)


def test_a_killed_mpirun_leaves_nothing(waiting: Any) -> None:
    job = waiting("wait")
    os.kill(job.mpirun, signal.SIGKILL)
    code, output = job.end()
    assert code == 128 + signal.SIGKILL, output
    assert_gone(job.pids, within=0)


def test_a_killed_launcher_takes_the_ranks_with_it(waiting: Any) -> None:
    job = waiting("wait")
    job.process.kill()
    job.end()
    # The helper processes are orphans that no one is left to find.
    assert_gone(job.ranks_and_mpirun, within=20)


def test_output_goes_on_when_the_reader_has_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*LAUNCHER, "-n", "2", RANK, "lose-one", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=clean_environment(),
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=TIMEOUT) == 0


def test_an_mpirun_that_does_not_notice_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program that stays when its one rank has ended stands for mpirun here."""
    monkeypatch.setattr(supervision, "LEFTOVER_SECONDS", 0.5)
    monkeypatch.setattr(supervision, "FORGOTTEN_SECONDS", 1.0)
    stays = ["/bin/sh", "-c", "OMPI_COMM_WORLD_RANK=0 sleep 2.5 & exec sleep 60"]
    started = time.monotonic()
    end = supervision.supervise(stays, os.environ, grace=1.0, ends_with_ranks=lambda: True)
    assert end.returncode == -signal.SIGKILL
    assert 2.5 < time.monotonic() - started < 40
    assert "has not noticed" in capfd.readouterr().err


def test_a_signal_before_there_are_ranks_reaches_them() -> None:
    """A program that starts its rank late stands for mpirun here."""
    late = (
        "trap : TERM; kill -TERM $PPID; sleep 1.5; "
        "OMPI_COMM_WORLD_RANK=0 setsid -w sh -c 'sleep 60; exit 3'; exit 5"
    )
    started = time.monotonic()
    end = supervision.supervise(["/bin/sh", "-c", late], os.environ, grace=40.0)
    assert time.monotonic() - started < 30, "before the grace ends"
    assert end.returncode == 5 and end.stopped_by == signal.SIGTERM


def test_a_signal_after_the_end_is_heard() -> None:
    """It comes while what the ranks have left running gets its time."""
    leaves = "p=$PPID; (sleep 1; kill -TERM $p; exec sleep 30) & exit 3"
    end = supervision.supervise(["/bin/sh", "-c", leaves], os.environ, grace=1.0)
    assert end.returncode == 3 and end.stopped_by == signal.SIGTERM


def test_the_ranks_of_one_that_has_ended_are_none() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert supervision._local_ranks(done.pid) == []
