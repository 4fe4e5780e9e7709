"""Launches real jobs for the tests and reads what they left.

One launch of eight ranks takes fifteen seconds to start on two cores, so a test puts many cases
into one. Every launch has a hard timeout and ends its own processes by group id.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.campaign import compare
from megatron_ft.campaign.job import model_flags
from megatron_ft.campaign.launching import Launcher
from megatron_ft.campaign.launching import one_at_a_time as _one_at_a_time
from megatron_ft.campaign.recorded import Run as Run
from megatron_ft.campaign.recorded import relative as relative
from megatron_ft.campaign.spec import EXACT, End, Model

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = float(os.environ.get("FT_TEST_TIMEOUT_S", "420"))

MODEL = (*model_flags(Model()), "--seed", "1234")


@functools.cache
def data_prefix() -> str:
    """The default corpus, made once per test session."""
    from megatron_ft.data import prepare_default

    return prepare_default(ROOT / "data")


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


def _run(command: list[str], directory: Path, timeout: float, env: dict[str, str] | None) -> Run:
    done = Launcher().run(command, timeout=timeout, env=env, cwd=ROOT)
    assert not done.timed_out, f"no end after {timeout} s:\n{done.output[-6000:]}"
    return Run(done.returncode, done.output, directory)


def assert_same_training(run: Run, reference: Run, bound: float = EXACT) -> None:
    """Every step of ``run`` is that of ``reference``: samples, count, loss; validation too."""
    assert run.steps.keys() == reference.steps.keys()
    microbatches = reference.of_kind("run_started")[0]["global_microbatches"]
    end = End(bound=bound)
    problems = [
        *compare.microbatch_problems(run, microbatches),
        *compare.sample_problems(run, reference),
        *compare.loss_problems(run, reference, end),
        *compare.validation_problems(run, reference, end),
    ]
    assert problems == []


def assert_faults_fired(run: Run, count: int) -> None:
    fired = {event["fault"] for event in run.of_kind("fault_injected")}
    assert len(fired) == count, fired
    assert run.summary["faults_unfired"] == []
