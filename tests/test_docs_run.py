"""Every command of README and docs is run by a test; a new one without a test fails here.

`RUN_BY` names the test of each command, `NOT_RUN` the reason where there can be none. Those without
a test elsewhere are run in this file, in a copy of the repository, as they are written but for
their length: `shortened` says what is changed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from harness import ROOT, _one_at_a_time, data_prefix
from report_runs import eventful
from test_docs import ALL, QUICK, Command, shell
from test_examples import copy_of_the_repository

from megatron_ft.campaign.job import model_flags
from megatron_ft.campaign.spec import Model
from megatron_ft.world.mpirun import find_mpirun

HERE = Path(__file__).name
LAUNCHED, ON_A_RUN = f"{HERE}::test_launches", f"{HERE}::test_commands_on_a_run"
HARMLESS = f"{HERE}::test_words_of_the_shell"

RUN_BY = {
    # make
    "make": "test_docs.py::test_quick_commands_run",
    "make demo": "test_examples.py::test_the_demo_twice_in_a_folder_with_a_space",
    "make env": "test_packaging.py::test_make_env_installs_once_and_again_when_the_versions_change",
    "PYTHON=/usr/bin/python3.12 make env": (
        "test_packaging.py::test_make_env_finishes_what_was_interrupted"
    ),
    "make campaign": "test_campaign_live.py::test_the_sample",
    "make test": f"{HERE}::test_what_make_would_run",
    "make test-slow": f"{HERE}::test_what_make_would_run",
    "make lint": f"{HERE}::test_what_make_would_run",
    # looking at a run, and at the installation
    "python -m megatron_ft.observe.summary *": ON_A_RUN,
    "tail -f runs/mine/events.jsonl": ON_A_RUN,
    "python tools/report.py runs/mine": ON_A_RUN,
    "python tools/report.py runs/mine runs/other --output comparison.html": ON_A_RUN,
    "python tools/ft_ctl.py runs/mine incidents": ON_A_RUN,
    "python tools/ft_ctl.py runs/mine status": (
        "test_control.py::test_a_replica_leaves_and_comes_back_by_hand"
    ),
    "python tools/ft_ctl.py runs/mine drain 2": (
        "test_control.py::test_a_replica_leaves_and_comes_back_by_hand"
    ),
    "python tools/ft_ctl.py runs/mine respawn": (
        "test_control.py::test_a_replica_leaves_and_comes_back_by_hand"
    ),
    "python -m megatron_ft.patches": "test_docs.py::test_quick_commands_run",
    "python -c import torch; *": HARMLESS,
    "source .venv/bin/activate": HARMLESS,
    "export DATA_PATH=*": HARMLESS,
    # data
    "python tools/preprocess_data.py --corpus stdlib *": f"{HERE}::test_the_corpus_of_the_page",
    "python tools/preprocess_data.py --input my_texts/ *": (
        "test_docs.py::test_the_quick_start_of_the_readme_runs"
    ),
    # launches
    "megatron-ft-run -n 4 pretrain_llama_ft.py --tensor-model-parallel-size 1 *": (
        "test_docs.py::test_the_quick_start_of_the_readme_runs"
    ),
    "megatron-ft-run -n 2 -m megatron_ft.world.preflight": (
        "test_docs.py::test_quick_commands_run"
    ),
    "megatron-ft-run --mpirun PATH": f"{HERE}::test_another_mpirun",
    "megatron-ft-run -n 4 pretrain_llama_ft.py ... --pipeline-model-parallel-size 4 "
    "--ft-checkfree-plus --ft-respawn": LAUNCHED,
    "megatron-ft-run -n 9 pretrain_llama_ft.py ... --ft-recover --ft-spares 1 --ft-spare-warm": (
        LAUNCHED
    ),
    "megatron-ft-run -n 8 pretrain_llama_ft.py ... --ft-recover --ft-respawn": LAUNCHED,
    "megatron-ft-run -n 8 pretrain_llama_ft.py --ft-recover": LAUNCHED,
    "megatron-ft-run -n 8 pretrain_llama_ft.py ... --pipeline-model-parallel-size 4 --ft-recover "
    "--ft-mecefo --ft-fault *": LAUNCHED,
    "python tools/show_run.py run.log --every 10": f"{HERE}::test_the_output_that_is_kept",
    "megatron-ft-run -n 8 --max-restarts 20 pretrain_llama_ft.py --ft-recover "
    "--save checkpoints/mine --save-interval 100 --ft-run-dir runs/mine": LAUNCHED,
    "megatron-ft-run -n 4 pretrain_llama_ft.py ... --ft-recover --wandb-project llama "
    "--wandb-exp-name a-run": LAUNCHED,
    "DP=4 PP=2 ITERS=20 examples/tiny_llama.sh --ft-recover *": LAUNCHED,
    "TP=1 PP=1 DP=2 ITERS=20 RUN_DIR=runs/ulfm examples/tiny_llama.sh *": LAUNCHED,
    "TP=1 PP=1 DP=2 ITERS=20 RUN_DIR=runs/gpu-* examples/tiny_llama.sh *": LAUNCHED,
    "examples/all_strategies.sh": "test_all_strategies.py::test_the_script",
    "python tools/campaign.py examples/campaigns/sample.yaml --out runs/sample": (
        "test_campaign_live.py::test_the_sample"
    ),
    "python tools/campaign.py examples/campaigns/ladder.yaml --out runs/ladder": LAUNCHED,
    "DRY_RUN=1 * examples/llama_7b.sh": (
        "test_docs.py::test_the_dry_run_of_the_cluster_example_runs"
    ),
    # studies and benchmarks
    "python tools/convergence.py strategies --plan": f"{HERE}::test_the_plan_of_a_study",
    "python tools/convergence.py ablation": "test_convergence.py::test_jobs_of_the_studies",
    "python tools/convergence.py swap-share": "test_convergence.py::test_jobs_of_the_studies",
    "python tools/convergence.py mecefo": "test_convergence.py::test_jobs_of_the_studies",
    "python tools/convergence.py strategies": "test_convergence.py::test_jobs_of_the_studies",
    "python tools/convergence.py iteration-time": "test_convergence.py::test_jobs_of_the_studies",
    "python tools/convergence.py ablation --seeds 1 --budget-minutes 20": (
        "test_convergence.py::test_jobs_of_the_studies"
    ),
    "python tools/bench_overhead.py --compare *": LAUNCHED,
    "python tools/bench_rebuild.py": LAUNCHED,
    "python tools/bench_collectives.py -n 2 4": LAUNCHED,
    "python tools/bench_mecefo.py": "test_mecefo_bench.py::test_a_tiny_stage",
    "python tools/rounds.py *": "test_rounds.py::test_two_rounds",
}

NOT_RUN = {
    "sbatch examples/llama_7b.sh": "needs Slurm and GPUs; its dry run is run",
    "TP=1 PP=1 DP=2 ITERS=20 RUN_DIR=runs/nccl *--distributed-backend nccl": "needs GPUs",
    "pip install --constraint constraints.txt --editable .[[]gpu]": "needs CUDA and a compiler",
    "pip install --constraint constraints.txt --editable .": (
        "several GB; tools/make_env.sh runs the same line, and test_packaging.py that"
    ),
    "python tools/bench_mecefo.py --what choice --rank 64": (
        "trains for half an hour; its checks are those of test_mecefo_bench.py"
    ),
}


def text_of(command: Command) -> str:
    return " ".join((*command.environment, *command.words))


def rules_of(command: Command) -> list[str]:
    return [glob for glob in (*RUN_BY, *NOT_RUN) if fnmatch.fnmatchcase(text_of(command), glob)]


def commands(test: str) -> dict[str, Command]:
    """The commands, each once, that a test of this file runs."""
    globs = [glob for glob, name in RUN_BY.items() if name == test]
    return {
        text_of(command): command
        for command in ALL
        if any(fnmatch.fnmatchcase(text_of(command), glob) for glob in globs)
    }


# --- nothing is left out -------------------------------------------------------------------------


def test_every_command_has_a_test() -> None:
    found = [command for command in ALL if command.words]
    assert len(found) > 50
    assert [str(command) for command in found if not rules_of(command)] == []


def test_every_rule_is_of_a_command_and_names_a_test_that_there_is() -> None:
    used = {glob for command in ALL for glob in rules_of(command)}
    assert used == {*RUN_BY, *NOT_RUN}, "a page no longer has these"
    for test in set(RUN_BY.values()):
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test
    quick = [glob for glob, test in RUN_BY.items() if test.endswith("::test_quick_commands_run")]
    assert set(quick) == set(QUICK)


@pytest.mark.parametrize(
    "new",
    [
        "python tools/report.py runs/mine --new",
        "megatron-ft-run -n 16 pretrain_llama_ft.py ... --ft-recover --ft-respawn",
        "make moon",
        "examples/tiny_llama.sh --ft-recover",
        "pip install --constraint constraints.txt --editable .[new]",
    ],
)
def test_a_new_command_without_a_test_is_noticed(new: str) -> None:
    assert rules_of(Command("here", 1, (), tuple(new.split()))) == []


# --- quick ones ----------------------------------------------------------------------------------


def test_commands_on_a_run(tmp_path: Path) -> None:
    """Those that read a run directory, on one in which everything has happened."""
    asked = commands(ON_A_RUN)
    copy = copy_of_the_repository(tmp_path, with_venv=False)
    for text in asked:
        for name in re.findall(r"runs/[\w-]+|\bDIR\b", text):
            if not (copy / name).exists():
                eventful(copy / name)
    assert len(asked) >= 7
    for text, command in asked.items():
        script = shlex.join(command.words)
        if command.words[0] == "tail":  # which goes on until it is stopped
            script = f"timeout 2 {script} || [ $? -eq 124 ]"
        done = shell(script, copy, PYTHONPATH=str(copy))
        assert done.returncode == 0, (text, done.stderr)
        assert len(done.stdout.splitlines()) >= 3, (text, done.stdout)
    assert (copy / "comparison.html").exists() and (copy / "runs/mine/report.html").exists()


def test_the_corpus_of_the_page(tmp_path: Path) -> None:
    (command,) = commands(f"{HERE}::test_the_corpus_of_the_page").values()
    copy = copy_of_the_repository(tmp_path, with_venv=False)
    done = shell(shlex.join(command.words), copy, PYTHONPATH=str(copy))
    assert done.returncode == 0, done.stderr
    assert "--data-path data/stdlib_byte_text_document" in done.stdout
    assert (copy / "data" / "stdlib_byte_text_document.bin").stat().st_size > 1_000_000


def test_words_of_the_shell(tmp_path: Path) -> None:
    copy = copy_of_the_repository(tmp_path, with_venv=True)
    for text, command in commands(HARMLESS).items():
        done = shell(shlex.join(command.words), copy)
        assert done.returncode == 0, (text, done.stderr)


def test_what_make_would_run() -> None:
    """These run the tests and the checks themselves: that they start what they should."""
    wanted = {
        "make test": "-m pytest",
        "make test-slow": "-m pytest -m slow",
        "make lint": "-m mypy",
    }
    assert set(commands(f"{HERE}::test_what_make_would_run")) == set(wanted)
    for text, starts in wanted.items():
        done = shell(text.replace("make", "make -n", 1), ROOT)
        assert done.returncode == 0 and starts in done.stdout, done.stderr


def test_another_mpirun() -> None:
    (command,) = commands(f"{HERE}::test_another_mpirun").values()
    words = [str(find_mpirun().path) if word == "PATH" else word for word in command.words]
    done = shell(shlex.join([*words, "--dry-run", "-n", "2", "true"]), ROOT)
    assert done.returncode == 0 and str(find_mpirun().path) in done.stdout, done.stderr


def test_the_plan_of_a_study(tmp_path: Path) -> None:
    (command,) = commands(f"{HERE}::test_the_plan_of_a_study").values()
    copy = copy_of_the_repository(tmp_path, with_venv=False)
    done = shell(shlex.join(command.words), copy, PYTHONPATH=str(copy))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 10


# --- launches ------------------------------------------------------------------------------------

SMALL_BENCH = ("--pairs", "1", "--topology", "1,1,2", "--iters", "8", "--warmup", "2")


def shortened(command: Command, prefix: str) -> list[str]:
    """A command's words with what the page leaves out, and shorter: four iterations, or less.

    Args:
        prefix: Of the data, as ``--data-path`` takes it.
    """
    words = list(command.words)
    if words[:2] == ["python", "tools/bench_overhead.py"]:
        return [*words[: words.index("--compare") + 2], *SMALL_BENCH, "--hidden-size", "64"]
    if words[:2] == ["python", "tools/bench_collectives.py"]:
        return [*words[:2], "-n", "2", "--sizes", "1024", "--rounds", "3"]
    if words[0] != "megatron-ft-run":
        return words

    def number(flag: str, default: int) -> int:
        return int(words[words.index(flag) + 1]) if flag in words else default

    slots = number("-n", 0) - number("--ft-spares", 0)
    replicas = slots // number("--pipeline-model-parallel-size", 1)
    at = words.index("pretrain_llama_ft.py") + 1
    # Faults of later iterations strike in the second.
    given = [re.sub(r"^(kill|degrade)@\d+", r"\1@2", word) for word in words[at:] if word != "..."]
    given = [re.sub(r":for=\d+", ":for=1", word) for word in given]
    if "--save-interval" in given:
        given[given.index("--save-interval") + 1] = "2"
    ours = ["--data-path", prefix, "--train-iters", "4", "--seed", "1", *model_flags(Model())]
    return [*words[:at], *ours, "--global-batch-size", str(2 * replicas), *given]


def test_shortened_commands_are_the_commands_of_the_pages() -> None:
    found = commands(LAUNCHED)
    assert len(found) >= 12
    for text, command in found.items():
        short = shortened(command, "data/x")
        assert short[:2] == list(command.words[:2]), text
        if command.words[0] == "megatron-ft-run":
            strategies = [word for word in command.words if word.startswith("--ft-")]
            assert [word for word in short if word.startswith("--ft-")] == strategies


@pytest.mark.slow
@pytest.mark.parametrize("text", commands(LAUNCHED))
def test_launches(text: str, tmp_path: Path) -> None:
    command = commands(LAUNCHED)[text]
    copy = copy_of_the_repository(tmp_path, with_venv=True)
    words = shortened(command, data_prefix())
    script = " ".join((*command.environment, shlex.join(words)))
    # A campaign takes the lock of all launches itself, for each of its own.
    done = shell_in(copy, script, alone="tools/campaign.py" not in words)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    for summary in copy.glob("runs/*/summary.json"):
        found = json.loads(summary.read_text())
        assert found["exit_code"] == 0 and found["steps_with_wrong_microbatches"] == 0


@pytest.mark.slow
def test_the_output_that_is_kept(tmp_path: Path) -> None:
    """docs/operating.md: a launch whose output goes through tools/show_run.py."""
    (show,) = commands(f"{HERE}::test_the_output_that_is_kept").values()
    (launch,) = (c for c in ALL if c.page == show.page and c.line == show.line and c != show)
    copy = copy_of_the_repository(tmp_path, with_venv=True)
    words = shortened(launch, data_prefix())
    done = shell_in(copy, f"{shlex.join(words)} 2>&1 | {shlex.join(show.words)}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    assert "4/4 | loss" in done.stdout and len(done.stdout.splitlines()) < 30
    assert "arguments" in (copy / "run.log").read_text(), "Megatron's hundreds of lines"


def shell_in(copy: Path, script: str, *, alone: bool = True) -> subprocess.CompletedProcess[str]:
    with _one_at_a_time() if alone else contextlib.nullcontext():
        return shell(
            script,
            copy,
            timeout=400 if alone else 1200,
            PYTHONPATH=str(copy),
            WANDB_MODE="offline",
            WANDB_SILENT="true",
        )
