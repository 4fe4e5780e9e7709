"""What cannot work is refused before any training, in words, and with exit code 64."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import MODEL, ROOT, data_prefix

from megatron_ft.world.mpirun import find_mpirun

TIMEOUT_S = 180
"""Within which a job of two ranks has given up, on a busy machine; nobody waits for anybody."""
WORKER = Path(__file__).parent / "workers" / "flags_worker.py"
RECOVER = ("--ft-recover",)
DEGRADE = ("--ft-fault", "degrade@3:slot=0")
WHOLE = ("--full-validation", "--multiple-validation-sets")
ASYNC = ("--async-save", "--use-persistent-ckpt-worker")

# -- flags, as Megatron's own parser and ours see them ---------------------------------------------


def flags(*more: str, tp: int = 1, pp: int = 2, data: tuple[str, ...] | None = None) -> list[str]:
    return [
        *("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)),
        *("--global-batch-size", "8", "--train-iters", "8", *MODEL),
        *(("--data-path", data_prefix()) if data is None else data),
        *more,
    ]


def cases(folder: Path) -> dict[str, tuple[int, list[str], str | None]]:
    """Name: (processes, flags, what the refusal says, None if there must be none)."""
    half, prefix, nowhere = folder / "half", data_prefix(), "/no/such/data"
    half.with_suffix(".bin").touch()
    blend = ("--data-path", "0.3", prefix, "0.7", prefix)
    interleaved = ("--num-layers-per-virtual-pipeline-stage", "1")
    by_split = ("--train-data-path", prefix, "--valid-data-path", nowhere)
    return {
        "stock": (4, flags(), None),
        "recover": (4, flags(*RECOVER), None),
        "stock with what recover refuses": (
            4,
            flags("--use-distributed-optimizer", "--dataloader-type", "single", *interleaved),
            None,
        ),
        "a blend": (4, flags(data=blend), None),
        "mock data": (4, flags(data=("--mock-data",)), None),
        "layers": (4, flags("--num-layers", "3"), "divisible by the pipeline-model-parallel size"),
        "processes": (3, flags(), "world size (3) is not divisible by"),
        "heads": (
            2,
            flags("--num-attention-heads", "3", tp=2, pp=1),
            "attention_heads (3) must be",
        ),
        "an unknown flag": (4, flags("--no-such-flag"), "unrecognized arguments: --no-such-flag"),
        "an unknown policy": (4, flags("--ft-recover-policy", "x"), "invalid choice: 'x'"),
        "no number": (4, flags("--seq-length", "many"), "invalid int value: 'many'"),
        "one replica": (2, flags(*RECOVER), "at least two replicas"),
        "learning rates of their own": (
            8,
            flags(*RECOVER, "--ft-respawn", "--decoupled-lr", "1e-3", "--num-layers", "4", pp=4),
            "or have two stages at most",
        ),
        "skipped iterations": (
            4,
            flags(*RECOVER, "--iterations-to-skip", "3"),
            "leave out --iterations-to-skip",
        ),
        "interleaved": (4, flags(*RECOVER, *interleaved), "leave out the interleaved schedule"),
        "distributed optimizer": (
            4,
            flags(*RECOVER, "--use-distributed-optimizer"),
            "--use-distributed-optimizer a lost process takes its shard along",
        ),
        "experts": (4, flags(*RECOVER, "--num-experts", "2"), "mixture of experts"),
        "async save": (
            4,
            flags(*RECOVER, "--save", str(folder), "--save-interval", "4", *ASYNC),
            "does not support --async-save",
        ),
        "a checkpoint's structure kept": (
            4,
            flags(*RECOVER, "--ckpt-assume-constant-structure"),
            "leave out --ckpt-assume-constant-structure",
        ),
        "gloo": (4, flags(*RECOVER, "--distributed-backend", "gloo"), "collectives that survive"),
        "Megatron's sampler": (4, flags(*RECOVER, "--dataloader-type", "single"), "by microbatch"),
        "a growing batch": (
            4,
            flags("--rampup-batch-size", "4", "4", "64"),
            "Megatron-Core ignores --rampup-batch-size",
        ),
        "validation of a whole set": (4, flags("--full-validation"), "need a loader of Megatron"),
        "validation of one whole set": (
            4,
            flags("--full-validation", "--dataloader-type", "single"),
            "give both or none",
        ),
        "validation of whole sets": (
            4,
            flags(*WHOLE, "--dataloader-type", "single"),
            None,
        ),
        "masks between documents": (
            4,
            flags("--dataloader-inter-document-masking"),
            "--dataloader-inter-document-masking does not reach",
        ),
        "respawn alone": (4, flags("--ft-respawn"), "--ft-respawn does nothing without a strategy"),
        "less than no spares": (4, flags(*RECOVER, "--ft-spares", "-1"), "--ft-spares is a number"),
        "mecefo": (4, flags(*RECOVER, "--ft-mecefo"), None),
        "mecefo's simulation": (1, flags("--ft-mecefo", *DEGRADE, pp=1), None),
        "mecefo alone": (4, flags("--ft-mecefo"), "--ft-mecefo needs --ft-recover"),
        "mecefo with a norm outside of steps": (
            4,
            flags(*RECOVER, "--ft-mecefo", "--log-params-norm"),
            "leave out --log-params-norm",
        ),
        "mecefo with learning rates of their own": (
            8,
            flags(*RECOVER, "--ft-mecefo", "--decoupled-lr", "1e-3", "--num-layers", "4", pp=4),
            "or have two stages at most",
        ),
        "mecefo of one stage": (
            2,
            flags(*RECOVER, "--ft-mecefo", pp=1),
            "--pipeline-model-parallel-size of at least 2",
        ),
        "mecefo with a sharded optimizer": (
            4,
            flags("--ft-mecefo", *DEGRADE, "--use-distributed-optimizer"),
            "--ft-mecefo needs the whole optimizer state",
        ),
        "degraded by what": (4, flags(*RECOVER, *DEGRADE), "simulation: add --ft-mecefo"),
        "two ways with attention": (
            4,
            flags("--ft-mecefo", "--ft-mecefo-budget", "1", "--ft-mecefo-no-skip-attention"),
            "give one of them",
        ),
        "quotas for nobody": (4, flags("--ft-mecefo-quotas"), "degraded nodes: add --ft-mecefo"),
        "quotas of two kinds": (
            4,
            flags(
                *RECOVER, "--ft-recover-policy", "versatile", "--ft-mecefo", "--ft-mecefo-quotas"
            ),
            "leave out --ft-recover-policy",
        ),
        "a scenario without time": (
            4,
            flags("--ft-mecefo", "--ft-mecefo-scenario", "high"),
            "give --ft-iteration-seconds",
        ),
        "timeouts": (
            4,
            flags(*RECOVER, "--ft-watch-timeout", "200"),
            "--ft-watch-timeout (200 s) < --ft-progress-timeout (120 s)",
        ),
        "no data": (4, flags(data=("--data-path", nowhere)), f"no data at {nowhere}: "),
        "half of the data": (
            4,
            flags(data=("--data-path", str(half))),
            f"no data at {half}: {half}.idx missing",
        ),
        "no data in a blend": (
            4,
            flags(data=(*blend, "0.1", nowhere)),
            f"{nowhere}.idx and {nowhere}.bin missing",
        ),
        "no data for validation": (4, flags(data=by_split), f"no data at {nowhere}: "),
        "no list of data": (
            4,
            flags(data=("--data-args-path", nowhere)),
            "list of data paths cannot be read",
        ),
    }


def test_flags_that_cannot_work(tmp_path: Path) -> None:
    """All in one process, so that Megatron is imported once."""
    wanted = cases(tmp_path)
    asked, answers = tmp_path / "cases.json", tmp_path / "answers.json"
    asked.write_text(json.dumps([case[:2] for case in wanted.values()]))
    done = subprocess.run(
        [sys.executable, str(WORKER), str(asked), str(answers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    wrong = {
        name: (message, said)
        for (name, (_, _, message)), said in zip(
            wanted.items(), json.loads(answers.read_text()), strict=True
        )
        if (message is None) != (said is None)
        or (message or "") not in (said or "")
        or (said or "").startswith("NO REFUSAL")
    }
    assert not wrong


# -- whole jobs ------------------------------------------------------------------------------------

SCRIPT = "pretrain_llama_ft.py"
LAUNCHER = (sys.executable, "-m", "megatron_ft.launcher", "-n", "2")
BY_ROOT = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
PLAIN_MPIRUN = (str(find_mpirun().path), "--oversubscribe", *BY_ROOT, "-n", "2", sys.executable)

JOBS: dict[str, tuple[tuple[str, ...], list[str], dict[str, str], str]] = {
    # name: (command before the script, flags, environment, what the refusal says)
    # Before Megatron is imported:
    "slots": (LAUNCHER, flags(pp=3), {}, "2 slots are no multiple of a replica of 3"),
    "timeouts": (
        LAUNCHER,
        flags(*RECOVER, "--ft-progress-timeout", "5", pp=1),
        {},
        "--ft-watch-timeout (10 s) < --ft-progress-timeout (5 s)",
    ),
    "a fault for nobody": (
        LAUNCHER,
        flags(*RECOVER, "--ft-fault", "kill@3", pp=1),
        {},
        "a fault spec that names no slot; kill needs slot=N",
    ),
    "gloo": (
        LAUNCHER,
        flags(*RECOVER, "--distributed-backend", "gloo", pp=1),
        {},
        "start with megatron-ft-run",
    ),
    "mpirun without fault tolerance": (
        PLAIN_MPIRUN,
        flags(*RECOVER, pp=1),
        {},
        f"start it by: megatron-ft-run -n 2 {SCRIPT} --tensor-model-parallel-size 1",
    ),
    "torchrun": (
        (sys.executable,),
        flags(*RECOVER),
        {"RANK": "0", "WORLD_SIZE": "4"},
        "start with megatron-ft-run",
    ),
    "torchrun with ulfm": (
        (sys.executable,),
        flags("--distributed-backend", "ulfm"),
        {"RANK": "0", "WORLD_SIZE": "4"},
        f"start it by: megatron-ft-run -n 4 {SCRIPT} --tensor-model-parallel-size 1",
    ),
    # When Megatron has parsed its flags, on all ranks:
    "layers": (
        LAUNCHER,
        flags("--num-layers", "3"),
        {},
        "Number of layers should be divisible by the pipeline-model-parallel size",
    ),
    "no data": (
        LAUNCHER,
        flags(data=("--data-path", "/no/such/data")),
        {},
        "no data at /no/such/data: ",
    ),
    "faults that cannot happen": (
        LAUNCHER,
        flags(*RECOVER, "--ft-fault", "kill@3:slot=7", "--ft-fault", "kill@9:slot=1", pp=1),
        {},
        "kill@3:slot=7: the job has slots 0 to 1",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_cannot_work(name: str, tmp_path: Path) -> None:
    command, given, environment, message = JOBS[name]
    returncode, output = start(
        [*command, SCRIPT, *given, "--ft-run-dir", str(tmp_path / "run")], environment
    )
    assert returncode == 64, output
    assert output.count(message) == 1, output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "events.jsonl").exists()
    if name == "faults that cannot happen":
        assert "kill@9:slot=1: the run ends with iteration 8" in output


def start(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command that must end by itself."""
    cleared = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**cleared, "COLUMNS": "200", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)
        output, _ = job.communicate(timeout=30)
        raise AssertionError(f"no end after {TIMEOUT_S} s:\n{output[-4000:]}") from None
    return job.returncode, output
