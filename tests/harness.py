"""Launches real jobs for the tests and reads what they left.

One launch of eight ranks takes fifteen seconds to start on two cores, so a test puts many cases
into one. Every launch has a hard timeout and ends its own processes by group id.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = float(os.environ.get("FT_TEST_TIMEOUT_S", "420"))

MODEL = (
    *("--num-layers", "4", "--hidden-size", "48", "--ffn-hidden-size", "128"),
    *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1"),
    *("--lr", "2e-3", "--min-lr", "2e-4", "--lr-decay-style", "cosine", "--clip-grad", "1.0"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257", "--split", "98,1,1"),
    *("--eval-iters", "2", "--eval-interval", "1000", "--log-interval", "1", "--seed", "1234"),
)


@functools.cache
def data_prefix() -> str:
    """The default corpus, made once per test session."""
    from megatron_ft.data import prepare_default

    return prepare_default(ROOT / "data")


@dataclass(frozen=True)
class Run:
    """A finished job."""

    returncode: int
    output: str
    directory: Path

    @functools.cached_property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        return {event["iteration"]: event for event in self.of_kind("step")}

    @property
    def losses(self) -> dict[int, float]:
        return {iteration: event["lm_loss"] for iteration, event in self.steps.items()}

    @property
    def validation(self) -> list[float]:
        return [event["lm_loss"] for event in self.of_kind("eval")]


def launch(
    *flags: str,
    tp: int = 1,
    pp: int = 2,
    dp: int = 2,
    iters: int = 8,
    per_replica: int = 4,
    processes: int | None = None,
    run_dir: Path | None = None,
    timeout: float = TIMEOUT_S,
    env: dict[str, str] | None = None,
    script: str = "pretrain_llama_ft.py",
    launcher: Sequence[str] = (),
) -> Run:
    """Run ``pretrain_llama_ft.py`` on the small model and wait for it.

    Args:
        flags: Further flags, after those of the model.
        per_replica: Microbatches of a replica in a fault-free step.
        processes: If not one for each slot.
        timeout: Seconds after which the job is killed and the test fails.
        script: What the ranks run instead.
        launcher: Flags of ``megatron-ft-run``.
    """
    slots = tp * pp * dp
    directory = run_dir or Path(tempfile.mkdtemp(prefix="ft-run-"))
    command = [
        *(sys.executable, "-m", "megatron_ft.launcher", "-n", str(processes or slots)),
        *launcher,
        script,
        *("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)),
        *("--global-batch-size", str(per_replica * dp), "--train-iters", str(iters)),
        *("--data-path", data_prefix(), "--ft-run-dir", str(directory)),
        *(("--ft-world-size", str(slots)) if processes not in (None, slots) else ()),
        *MODEL,
        *flags,
    ]
    return run_alone(command, directory, timeout, env)


def run_alone(
    command: list[str],
    directory: Path,
    timeout: float = TIMEOUT_S,
    env: dict[str, str] | None = None,
) -> Run:
    """Run a command that starts several ranks, when no other launch of the tests is running."""
    with _one_at_a_time():
        return _run(command, directory, timeout, env)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two launches at once on a few cores would only time out together."""
    with open(Path(tempfile.gettempdir()) / "megatron-ft-launch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str], directory: Path, timeout: float, env: dict[str, str] | None) -> Run:
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
    )
    try:
        output, _ = job.communicate(timeout=timeout)
    except BaseException as error:  # an interrupted test run leaves nothing running either
        output = _end(job)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise AssertionError(f"no end after {timeout} s:\n{output[-6000:]}") from None
    return Run(job.returncode, output, directory)


def _end(job: subprocess.Popen[str]) -> str:
    """End a job with all its processes; what it has said."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        return job.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        return job.communicate()[0]


def relative(a: float, b: float) -> float:
    """Relative difference of two losses."""
    return abs(a - b) / abs(a)


def assert_same_training(run: Run, reference: Run, bound: float = 1e-6) -> None:
    """Every step of ``run`` is that of ``reference``: samples, count, loss; validation too."""
    assert run.steps.keys() == reference.steps.keys()
    expected = reference.of_kind("run_started")[0]["global_microbatches"]
    for iteration, step in run.steps.items():
        other = reference.steps[iteration]
        assert step["microbatches"] == expected, step
        assert step["samples_digest"] == other["samples_digest"], step
        assert relative(other["lm_loss"], step["lm_loss"]) <= bound, (step, other)
        if other["grad_norm"] is None:  # the loss scale overflowed
            assert step["grad_norm"] is None, step
        else:
            # The norm of one step amplifies what the order of summation does: up to 4e-4 was seen
            # where losses agreed to 3e-7. One microbatch too few changes it by some per cent.
            assert relative(other["grad_norm"], step["grad_norm"]) <= 1000 * bound, (step, other)
    assert len(run.validation) == len(reference.validation)
    for got, want in zip(run.validation, reference.validation, strict=True):
        assert relative(want, got) <= bound


def assert_faults_fired(run: Run, count: int) -> None:
    fired = {event["fault"] for event in run.of_kind("fault_injected")}
    assert len(fired) == count, fired
    assert run.summary["faults_unfired"] == []
