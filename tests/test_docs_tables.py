"""Tables of the docs against the code: what goes with what, and the metrics of wandb."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import MODEL, ROOT, data_prefix
from report_runs import eventful

from megatron_ft.observe.event_table import KINDS
from megatron_ft.observe.jsonl import read_events
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.summary import build_summary
from megatron_ft.observe.wandb_rows import RowBuilder

COLUMNS = {
    "no strategy": (),
    "`--ft-recover`": ("--ft-recover",),
    "`--ft-checkfree`": ("--ft-recover", "--ft-checkfree"),
    "`--ft-checkfree-plus`": ("--ft-recover", "--ft-checkfree-plus"),
    "`--ft-mecefo`": ("--ft-recover", "--ft-mecefo"),
}
SLOTS = 6
FEATURES: dict[str, tuple[str, ...]] = {
    "tensor parallelism, sequence parallelism": ("--sequence-parallel",),
    "interleaved schedule": ("--num-layers-per-virtual-pipeline-stage", "1"),
    "data parallelism of one": (),
    "`--overlap-grad-reduce`": ("--overlap-grad-reduce",),
    "`--use-distributed-optimizer`": ("--use-distributed-optimizer",),
    "mixture of experts": ("--num-experts", "2"),
    "optimizers other than Adam": ("--optimizer", "sgd"),
    "learned positions": ("--position-embedding-type", "learned_absolute"),
    "layers not the same number on each stage": (
        *("--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "2"),
    ),
    "dropout": ("--hidden-dropout", "0.1"),
    "bf16, fp16 with loss scaling": ("--bf16",),
    "`--calculate-per-token-loss`": ("--calculate-per-token-loss",),
    "`--log-params-norm`": ("--log-params-norm",),
    "`--async-save`": (
        *("--save", "checkpoints", "--save-interval", "4", "--async-save"),
        "--use-persistent-ckpt-worker",
    ),
    "`--dataloader-inter-document-masking`": ("--dataloader-inter-document-masking",),
    "`--rampup-batch-size`, which Megatron-Core ignores": ("--rampup-batch-size", "6", "6", "64"),
    "`--full-validation` and `--multiple-validation-sets`, both": (
        *("--full-validation", "--multiple-validation-sets"),
    ),
    "`--dataloader-type` other than `external`": ("--dataloader-type", "single"),
    "`--rerun-mode`": ("--rerun-mode", "validate_results"),
}


def table(page: str, head: str) -> dict[str, list[str]]:
    """The rows of the table that begins with a head: name -> cells."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(head))
    rows = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


def command(feature: str, strategies: tuple[str, ...]) -> tuple[int, list[str]]:
    """Slots and flags of a job with a feature: three stages, two replicas unless it says so."""
    tensor, replicas = (2 if feature.startswith("tensor") else 1), 2
    if feature == "data parallelism of one":
        # CheckFree alone is for this; ReCoVer alone is what the column of --ft-recover is about.
        replicas, strategies = 1, strategies[-1:]
    layers = "4" if feature.startswith("layers") else "6"
    flags = [
        *("--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", "3"),
        *("--global-batch-size", "12", "--train-iters", "8", "--data-path", data_prefix()),
        *(*MODEL, "--num-layers", layers, *FEATURES[feature], *strategies),
    ]
    return 3 * tensor * replicas, flags


@pytest.mark.slow  # some sixty command lines
def test_what_is_refused_is_what_the_table_says(tmp_path: Path) -> None:
    rows = table("compatibility.md", "| | no strategy |")
    assert FEATURES.keys() <= rows.keys()
    asked, wanted = [], {}
    for feature in FEATURES:
        for column, cell in zip(COLUMNS, rows[feature], strict=True):
            if cell in ("yes", "no"):  # and not a dash
                wanted[feature, column] = cell
                asked.append(command(feature, COLUMNS[column]))
    assert len(wanted) > 45
    cases, answers = tmp_path / "cases.json", tmp_path / "answers.json"
    cases.write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/workers/flags_worker.py"), str(cases), str(answers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    said = dict(zip(wanted, json.loads(answers.read_text()), strict=True))
    wrong = {
        key: said[key] for key, cell in wanted.items() if (cell == "yes") is not (not said[key])
    }
    assert wrong == {}


def test_metrics_of_the_wandb_page_are_logged(tmp_path: Path) -> None:
    read = read_events(RunDirectory(eventful(tmp_path / "run")))
    builder = RowBuilder()
    logged = {name for event in read.events for name in builder.row(event)}
    logged |= {f"ft/{name}" for name in build_summary(read.events)} | {"ft/incidents"}
    logged |= {f"ft/count/{kind}" for kind in KINDS}
    page = (ROOT / "docs" / "wandb.md").read_text()
    named = set(re.findall(r"`((?:ft|train|validation)/[\w/]+)`", page))
    named -= {"ft/count/KIND", "ft/NAME"}
    assert named - logged - {"ft/overhead_bytes/snapshots"} == set()
    numbers = {name for name in logged if name.startswith(("ft/live_p", "train/", "validation/"))}
    assert numbers <= named, "a chart that the page does not know"
