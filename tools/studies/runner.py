"""Runs the cells of a study one at a time and keeps what is done.

A cell's directory holds what it was (cell.json), the run directory of each start, and its result. A
cell without a result is run anew, so a study that was interrupted goes on where it was. A launch
has a hard timeout, and ends with all its processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cells import STUDY_ENTRY, Cell
from .results import BrokenRun, Result, from_events, load

ROOT = Path(__file__).resolve().parent.parent.parent
UNFIRED = 65
STUDY_CODE = (STUDY_ENTRY, "tools/studies/cells.py")
"""Exit code of a job that went well without a fault that was asked for."""
TRACKER = "latest_checkpointed_iteration.txt"
START_S = 15.0
"""Guess of a launch's start-up with four processes, before there is a measured one."""
ITERATION_S = 0.2
"""Likewise of an iteration."""


class BusyError(RuntimeError):
    """Somebody else works in a study's directory."""


@dataclass
class Runner:
    """Runs cells.

    Args:
        out: Where cells are kept.
        budget_s: Seconds after which no further cell begins.
        timeout_s: Seconds after which a launch is killed.
        say: Prints a line.
    """

    out: Path
    budget_s: float
    timeout_s: float
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    ratios: list[float] = field(default_factory=list)
    """Of the cells that are done: time taken over what was guessed."""

    def run(self, cells: Sequence[Cell]) -> tuple[dict[str, Result], list[str]]:
        """The results that there are afterwards, by the cells' keys, and what failed.

        Raises:
            BusyError: Another study runs into the same directory; they would empty each other's.
        """
        with self._alone():
            return self._run(cells)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"another study runs into {self.out}: wait for its end, or give another --out"
                ) from None
            yield

    def _run(self, cells: Sequence[Cell]) -> tuple[dict[str, Result], list[str]]:
        found: dict[str, Result] = {}
        failures: list[str] = []
        todo: list[Cell] = []
        for cell in cells:
            kept = load(self.directory(cell))
            if kept is not None:
                found[cell.key] = kept
                self.ratios.append(kept.wall_s / guess_s(cell))
            elif cell.key not in {other.key for other in todo}:
                todo.append(cell)
        for number, cell in enumerate(todo, 1):
            guess = self.guess_s(cell)
            left = self.budget_s - (time.monotonic() - self.began)
            if guess > left:
                self.say(
                    f"the budget ends here: {len(todo) - number + 1} of {len(cells)} cells are "
                    "left; the same command goes on with them"
                )
                break
            self.say(f"[{number}/{len(todo)}] {cell.name}, about {guess:.0f} s")
            try:
                found[cell.key] = result = self.run_cell(cell)
            except BrokenRun as error:
                failures.append(f"{cell.name}: {error}")
                self.say(f"failed: {failures[-1]}")
                continue
            self.ratios.append(result.wall_s / guess_s(cell))
            self.say(
                f"    {result.wall_s:.0f} s; perplexity {result.perplexity:.3f}, "
                f"{result.faults_fired} faults struck, {result.rebuilt} stages rebuilt"
            )
        return found, failures

    def guess_s(self, cell: Cell) -> float:
        """How long a cell takes: the guess, corrected by how good the guesses were so far."""
        correction = sum(self.ratios) / len(self.ratios) if self.ratios else 1.0
        return guess_s(cell) * correction

    def directory(self, cell: Cell) -> Path:
        return self.out / "cells" / cell.key

    def run_cell(self, cell: Cell) -> Result:
        """Run one cell from its beginning.

        Raises:
            BrokenRun: It did not do what the cell says, or a launch took too long and was killed.
        """
        from megatron_ft.campaign.runner import code_digest
        from megatron_ft.data import prepare_default

        prefix = os.path.relpath(prepare_default(ROOT / "data"), ROOT)
        directory = self.directory(cell)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "cell.json").write_text(json.dumps(cell.describe(), indent=1) + "\n")
        code = code_digest(more=STUDY_CODE)  # before: who edits meanwhile changes later cells
        events: list[Any] = []
        commands, wall_s = [], 0.0
        for number in range(cell.num_launches()):
            command = command_of(cell, prefix, directory, number)
            commands.append(command)
            ended, seconds = self.launch(cell, command, directory / f"output-{number}.log")
            wall_s += seconds
            check_start(cell, number, ended, directory)
            events += read(directory / f"run-{number}")
        result = from_events(
            events,
            cell=cell.describe(),
            command=shown(cell, commands[0]),
            wall_s=wall_s,
            machine=machine(),
            code=code,
        )
        shutil.rmtree(directory / "save", ignore_errors=True)
        result.save(directory)
        return result

    def launch(self, cell: Cell, command: Sequence[str], log: Path) -> tuple[int, float]:
        """Exit code and seconds of a job that ran alone on this machine.

        Raises:
            BrokenRun: It took too long and was killed.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **cell.environment}
        with one_at_a_time(), log.open("wb") as output:
            started = time.monotonic()
            job = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
            try:
                return job.wait(self.timeout_s), time.monotonic() - started
            except BaseException as error:  # an interrupted study leaves nothing running either
                end(job)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise BrokenRun(f"no end after {self.timeout_s:g} s, see {log}") from None


def guess_s(cell: Cell) -> float:
    """Seconds that a cell takes on two cores, before anything is measured."""
    size = cell.setup.slots / 4
    start_s, iteration_s = START_S * max(1.0, size), ITERATION_S * max(1.0, size)
    return cell.num_launches() * start_s + cell.num_iterations() * iteration_s


def command_of(cell: Cell, data_prefix: str, directory: Path, number: int = 0) -> list[str]:
    """The command of a cell's launch."""
    faults, more = list(cell.faults), []
    if cell.starts:
        start = cell.starts[number]
        save = str(directory / "save")
        more = ["--save", save, "--save-interval", str(cell.save_interval), "--ckpt-format"]
        more += ["torch", *(("--load", save) if start.loaded else ())]
        if start.dies_at is not None:
            faults.append(f"kill@{start.dies_at}:slot={start.stage}")
    return [
        *(sys.executable, "-m", "megatron_ft.launcher", "-n", str(cell.processes), cell.entry),
        *cell.setup.flags(cell.seed, data_prefix),
        *cell.flags,
        *(word for fault in faults for word in ("--ft-fault", fault)),
        *more,
        *("--ft-run-dir", str(directory / f"run-{number}")),
    ]


def shown(cell: Cell, command: Sequence[str]) -> str:
    """A command as it can be given in a shell in the repository."""
    variables = [f"{name}={value}" for name, value in sorted(cell.environment.items())]
    words = [word.removeprefix(f"{ROOT}/") for word in command[1:]]
    return " ".join([*variables, shlex.join(["python", *words])])


def check_start(cell: Cell, number: int, code: int, directory: Path) -> None:
    """Raises BrokenRun where a start did not end as its cell says."""
    log = directory / f"output-{number}.log"
    start = cell.starts[number] if cell.starts else None
    if start is None or start.dies_at is None:
        if code not in ((0, UNFIRED) if cell.may_miss else (0,)):
            raise BrokenRun(f"exit code {code}:\n{_tail(log)}")
        return
    if code in (0, 64):
        raise BrokenRun(f"start {number} was to die and ended with {code}:\n{_tail(log)}")
    done = [e["iteration"] for e in read(directory / f"run-{number}") if e["kind"] == "step"]
    last = max(done, default=start.loaded)  # it may die in its first step
    if last != start.dies_at - 1:
        raise BrokenRun(f"start {number} died after iteration {last}, not {start.dies_at - 1}")
    tracker = directory / "save" / TRACKER
    saved = int(tracker.read_text()) if tracker.exists() else 0
    if saved != cell.starts[number + 1].loaded:
        raise BrokenRun(f"start {number} left a checkpoint of iteration {saved}")


def read(run_dir: Path) -> list[Any]:
    """The events of a run."""
    from megatron_ft.observe.jsonl import read_events
    from megatron_ft.observe.rundir import RunDirectory

    return list(read_events(RunDirectory(run_dir)).events)


def machine() -> dict[str, Any]:
    """The machine that the job ran on, as ``tools/bench_collectives.py`` describes it."""
    from bench_collectives import machine as describe

    described: dict[str, Any] = describe()
    return described


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for other launches of this machine, the tests' among them: they use the same lock."""
    with open(Path(tempfile.gettempdir()) / "megatron-ft-launch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job with all its processes."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
