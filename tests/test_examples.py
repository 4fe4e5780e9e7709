"""The examples: what the demo shows and refuses, and the 7B command against Megatron's parser."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, _one_at_a_time
from megatron_flags import parse
from rich.console import Console

sys.path.insert(0, str(ROOT / "tools"))
import check_demo
import show_run

REQUIRED = {
    "DATA_PATH": "/data/mine_text_document",
    "TOKENIZER_MODEL": "/data/tokenizer.model",
    "CHECKPOINT_DIR": "/check points/7b",
}


def run_script(
    name: str, *arguments: str, cwd: Path = ROOT, timeout: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    ours = (*REQUIRED, "TP", "PP", "DP", "FT_FLAGS", "DRY_RUN", "RUN_DIR", "WANDB_PROJECT")
    clean = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("SLURM")}
    return subprocess.run(
        ["bash", f"examples/{name}", *arguments],
        cwd=cwd,
        env={**clean, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def copy_of_the_repository(folder: Path, *, with_venv: bool) -> Path:
    """What the examples need, in a folder with a space in its name."""
    target = folder / "a copy"
    target.mkdir()
    for name in ("examples", "megatron_ft", "patches", "tools"):
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=no_caches)
    shutil.copy(ROOT / "pretrain_llama_ft.py", target)
    if with_venv:
        (target / ".venv").symlink_to(sys.prefix)
    return target


# --- llama_7b.sh ---------------------------------------------------------------------------------


def flags_of_7b(*arguments: str, **env: str) -> tuple[list[str], list[str]]:
    """The launcher's part of the command that a dry run prints, and the training's flags."""
    done = run_script("llama_7b.sh", *arguments, **{**REQUIRED, "DRY_RUN": "1", **env})
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    at = words.index("pretrain_llama_ft.py")
    return words[:at], words[at + 1 :]


def test_llama_7b_has_the_real_shape() -> None:
    launcher, flags = flags_of_7b()
    args = parse(flags, has_gpu=True)
    assert launcher[launcher.index("-n") + 1] == "32"
    wanted = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "seq_length": 4096,
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
        "bf16": True,
        "vocab_size": 32000,
        "data_path": [REQUIRED["DATA_PATH"]],
        "tokenizer_model": REQUIRED["TOKENIZER_MODEL"],
        "save": REQUIRED["CHECKPOINT_DIR"],
        "load": REQUIRED["CHECKPOINT_DIR"],
        "ft_run_dir": REQUIRED["CHECKPOINT_DIR"] + "/run",
        "ft_recover": True,
        "sequence_parallel": True,
        "use_distributed_optimizer": False,
        "use_gloo_process_groups": False,
        "wandb_project": None,
    }
    assert {name: getattr(args, name) for name in wanted} == wanted
    # Nothing is padded: the vocabulary is a multiple of this.
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    assert args.vocab_size % multiple == 0
    # What the layers, vocabulary and norms come to.
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert 2 * 32000 * 4096 + 32 * layer + 4096 == 6_738_415_616
    assert args.global_batch_size % 2 == 0


def test_llama_7b_takes_sizes_and_flags_from_outside() -> None:
    launcher, flags = flags_of_7b(
        "--train-iters", "7", TP="1", PP="2", DP="4", FT_FLAGS="", WANDB_PROJECT="p"
    )
    args = parse(flags, has_gpu=True)
    assert launcher[launcher.index("-n") + 1] == "8"
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, 2)
    assert (args.train_iters, args.ft_recover, args.sequence_parallel) == (7, False, False)
    assert (args.wandb_project, args.wandb_exp_name) == ("p", "llama-7b")
    two = "--ft-recover --ft-recover-policy versatile"
    assert parse(flags_of_7b(FT_FLAGS=two)[1], has_gpu=True).ft_recover_policy == "versatile"


def test_llama_7b_is_a_batch_script_that_warns_the_launcher_and_not_its_ranks() -> None:
    """Without B: Slurm would signal mpirun's daemons, which kill the ranks."""
    text = (ROOT / "examples" / "llama_7b.sh").read_text()
    head = text.split("\nset -euo")[0].splitlines()
    assert head[0].startswith("#!") and all(line.startswith("#") for line in head[1:])
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == 4 * 4 * 2
    warning = re.fullmatch(r"B:TERM@(\d+)", options["signal"])
    assert warning is not None
    assert int(text.split("--grace ")[1].split()[0]) < int(warning[1])
    assert "--exit-signal-handler" in text


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"DATA_PATH": ""}, "DATA_PATH is not set"),
        ({"TOKENIZER_MODEL": ""}, "TOKENIZER_MODEL is not set"),
        ({"CHECKPOINT_DIR": ""}, "CHECKPOINT_DIR is not set"),
        ({}, "no /data/mine_text_document.bin"),
        ({"DRY_RUN": "1", "SLURM_NTASKS": "16"}, "has 16 tasks, but TP x PP x DP = 4 x 4 x 2 = 32"),
        ({"DRY_RUN": "1", "SLURM_SUBMIT_DIR": "/"}, "/ is not the repository's folder"),
    ],
)
def test_llama_7b_says_what_is_missing(env: dict[str, str], says: str) -> None:
    done = run_script("llama_7b.sh", **{**REQUIRED, **env})
    assert done.returncode == 64
    assert done.stderr.startswith("examples/llama_7b.sh: ") and says in done.stderr
    assert done.stdout == ""


# --- without an environment ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo.sh", "tiny_llama.sh", "llama_7b.sh", "all_strategies.sh"])
def test_without_venv_an_example_says_what_makes_it(name: str, tmp_path: Path) -> None:
    copy = copy_of_the_repository(tmp_path, with_venv=False)
    done = run_script(name, cwd=copy, **REQUIRED)
    assert done.returncode == 64
    assert "no .venv" in done.stderr and "make env" in done.stderr
    assert done.stdout == ""


# --- what is shown of a run ----------------------------------------------------------------------

OUTPUT = """\
[0] using world size: 8, data-parallel size: 4
[0]   fault_injector_delay_start_iteration ............ None
[7]  [2026-11-29 17:12:12.891826] iteration        2/      20 | consumed samples:           64 |
[7] iteration      0 | 8 processes serve 8 slots
[7] iteration      1/12 | loss 5.9 | 16 microbatches (4+4+4+4)
[7] iteration      2/12 | loss 5.8 | 16 microbatches (4+4+4+4)
[7] iteration      3/12 | loss 5.7 | 16 microbatches (4+4+4+4)
[7] iteration      5/12 | loss 5.6 | 16 microbatches (4+4+4+4)
[7] iteration      6 | slot 5 (replica 1, stage 1) died, noticed at attempt of step 6
[6] iteration      6/12 | loss 5.5 | 16 microbatches (6+5+5)
[6] iteration      7/12 | loss 5.4 | 16 microbatches (6+5+5)
[6] iteration     12/12 | loss 5.3 | 16 microbatches (6+5+5)
megatron-ft-run: SIGTERM passed to the ranks
pretrain_llama_ft.py: --ft-recover needs at least two replicas
"""


def test_only_what_a_person_wants_is_shown_and_all_is_kept() -> None:
    shown, log = io.StringIO(), io.StringIO()
    show_run.relay(io.StringIO(OUTPUT), log, Console(file=shown, soft_wrap=True), 5)
    assert log.getvalue() == OUTPUT
    steps = re.findall(r"^iteration +(\d+)/12", shown.getvalue(), re.MULTILINE)
    # Of the steps: the first, every fifth, the one after an incident, the last.
    assert steps == ["1", "5", "6", "12"]
    rest = [line for line in shown.getvalue().splitlines() if "/12" not in line]
    assert [line.split(" ")[0] for line in rest] == [
        "iteration",
        "iteration",
        "megatron-ft-run:",
        "pretrain_llama_ft.py:",
    ]


def summary(**changes: Any) -> Mapping[str, Any]:
    good = {
        "status": "degraded",
        "exit_code": 0,
        "iterations": 150,
        "missing_steps": [],
        "steps_with_wrong_microbatches": 0,
        "faults_fired": 1,
        "faults_unfired": [],
        "repairs": 1,
        "live_replicas": 3,
        "num_replicas": 4,
        "first_lm_loss": 5.94,
        "validation_lm_loss": 2.5,
    }
    return {**good, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"status": "stopped"}, "stopped"),
        ({"exit_code": 75}, "exit code 75"),
        ({"iterations": 149}, "149 iterations of 150"),
        ({"missing_steps": [3]}, "iterations of 150"),
        ({"steps_with_wrong_microbatches": 1}, "wrong batch"),
        ({"faults_fired": 0, "faults_unfired": ["kill@75:slot=1"]}, "did not strike"),
        ({"repairs": 0}, "0 repairs"),
        ({"live_replicas": 4}, "4 replicas live"),
        ({"validation_lm_loss": 5.0}, "5.55 is that of an untrained model"),
        ({"validation_lm_loss": None}, "validation loss None"),
        ({"validation_lm_loss": "NaN"}, "validation loss NaN"),
    ],
)
def test_the_demo_is_ok_only_if_all_went_as_it_says(
    changes: dict[str, Any], says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, iterations in (("stock", 5), ("recover", 150)):
        (tmp_path / name).mkdir()
        fields = summary(**(changes if name == "recover" else {"iterations": iterations}))
        (tmp_path / name / "summary.json").write_text(json.dumps(fields))
    arguments = [str(tmp_path), "--stock-iters", "5", "--recover-iters", "150"]
    code = check_demo.main(arguments)
    said = capsys.readouterr()
    if says is None:
        assert (code, said.err) == (0, "")
        assert "Validation loss 2.50" in said.out and f"{math.log(256):.2f}" in said.out
    else:
        assert code == 1 and says in said.err
        (tmp_path / "stock" / "summary.json").unlink()
        assert check_demo.main(arguments) == 1
        assert "stock: it left no" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_twice_in_a_folder_with_a_space(tmp_path: Path) -> None:
    copy = copy_of_the_repository(tmp_path, with_venv=True)
    for _ in range(2):
        with _one_at_a_time():
            done = run_script("demo.sh", cwd=copy, timeout=900, STOCK_ITERS="4", RECOVER_ITERS="60")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        lines = done.stdout.splitlines()
        assert lines[-1] == "demo: ok"
        assert len(lines) < 60, "it is not quiet"
        assert sum("died" in line and "3 of 4 replicas go on" in line for line in lines) == 1
        assert any("60/60 | loss" in line and "replicas 3/4" in line for line in lines)
        assert "4 microbatches computed again" in " ".join(done.stdout.split())
    runs = sorted((copy / "runs").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert "arguments" in (run / "stock.log").read_text(), "the whole output is kept"


@pytest.mark.slow
def test_a_demo_that_fails_says_where_to_look(tmp_path: Path) -> None:
    copy = copy_of_the_repository(tmp_path, with_venv=True)
    (copy / "pretrain_llama_ft.py").write_text("raise SystemExit('broken on purpose')\n")
    with _one_at_a_time():
        done = run_script("demo.sh", cwd=copy, timeout=300, RUN_ROOT="runs/mine")
    assert done.returncode == 1
    assert "The whole output: runs/mine/stock.log" in done.stderr
    assert "broken on purpose" in done.stderr
    assert "demo: ok" not in done.stdout
