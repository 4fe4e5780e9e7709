"""One wandb run for the whole job: real wandb in offline mode, with a writer that is killed."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.observe.events import EventLog
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.wandb_log import WandbLog
from megatron_ft.observe.wandb_megatron import MegatronWriter, settings_from_megatron

wandb = pytest.importorskip("wandb")
ROOT = Path(__file__).parents[1]
CHILD = Path(__file__).with_name("observe_child.py")


def child(*arguments: object, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CHILD, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "WANDB_SILENT": "true", **env},
    )


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    position, payload = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, position)
        if part == 0 or position + 7 + length > len(data):
            return
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    rows = [r.history for r in records(path) if r.WhichOneof("record_type") == "history"]
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for row in rows
    ]


@pytest.fixture(scope="module")
def two_writers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose writer is killed after step 150; process 2 goes on to step 170."""
    path = tmp_path_factory.mktemp("wandb") / "run"
    first = child("wandb_writer", path, 3, 1, 150, "kill")
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = child("wandb_writer", path, 2, 151, 170, "finish")
    assert second.returncode == 0, second.stderr
    assert first.stdout.split()[0] == second.stdout.split()[0] == RunDirectory(path).wandb_id()
    return path


def test_two_writers_one_run(two_writers: Path) -> None:
    """Two offline folders with one run id; together they hold every step with its loss."""
    run_id = RunDirectory(two_writers).wandb_id()
    files = sorted(two_writers.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    assert [file.parent.name[-3:] for file in files] == ["-p3", "-p2"]
    for file in files:
        (run,) = (r.run for r in records(file) if r.WhichOneof("record_type") == "run")
        assert run.run_id == run_id

    losses = {}
    for row in (row for file in files for row in history(file) if "train/lm_loss" in row):
        assert losses.setdefault(row["iteration"], row["train/lm_loss"]) == row["train/lm_loss"]
    assert losses == {iteration: 1 / iteration for iteration in range(1, 171)}
    # The end of the first writer was lost with it; its successor supplied it from the events.
    assert max(row["iteration"] for row in history(files[0])) < 150

    rows = history(files[1])
    assert any(row.get("ft/count/repaired") == 1 and row["ft/repair_s"] == 0.02 for row in rows)
    dark = {row["ft/count/replica_dark"] for row in rows if "ft/count/replica_dark" in row}
    assert dark == {1, 2}, "each writer's event counts once"
    assert any(row.get("ft/incidents.nrows") == 1 for row in rows)
    summary = json.loads((two_writers / "summary.json").read_text())
    final = {}
    for record in records(files[1]):
        if record.WhichOneof("record_type") == "summary":
            final |= {i.key or ".".join(i.nested_key): i.value_json for i in record.summary.update}
    assert json.loads(final["ft/goodput"]) == summary["goodput"]


def test_every_row_has_the_iteration_as_its_step(two_writers: Path) -> None:
    for file in two_writers.glob("wandb/offline-run-*/*.wandb"):
        metrics = [r.metric for r in records(file) if r.WhichOneof("record_type") == "metric"]
        assert {m.glob_name for m in metrics if m.step_metric == "iteration"} >= {"*", "ft/*"}
        assert all("iteration" in row for row in history(file))


def test_megatrons_numbers_are_in_the_same_rows(two_writers: Path) -> None:
    (file,) = two_writers.glob("wandb/offline-run-*-p2/*.wandb")
    rates = {
        row["iteration"]: row["learning-rate"] for row in history(file) if "learning-rate" in row
    }
    assert rates == {iteration: iteration * 1e-3 for iteration in range(151, 171)}
    # While the run is open, Megatron's numbers join the row of their step.
    together = [
        r["iteration"] for r in history(file) if {"learning-rate", "train/lm_loss"} <= r.keys()
    ]
    assert together[-5:] == list(range(166, 171))


def test_wandb_itself_finds_both_folders(two_writers: Path) -> None:
    folders = sorted(map(str, two_writers.glob("wandb/offline-run-*")))
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--dry-run", *folders],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Would sync 2 run(s)" in done.stdout + done.stderr


NO_WANDB = """
import sys
sys.path.insert(0, sys.argv[2])
from megatron_ft.observe.events import EventLog
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.wandb_log import WandbLog, WandbSettings
from megatron_ft.observe.wandb_megatron import MegatronWriter
log = EventLog(RunDirectory(sys.argv[1]), 0, elected=True)
wandb_log = WandbLog(log.run_dir, WandbSettings("p"), history=log.read, process=0)
log.add_listener(wandb_log)
wandb_log.start()
log.emit("replica_dark", iteration=1, epoch=0, replica=2)
wandb_log.log({"loss": 1.0}, 1)
print(wandb_log.active, bool(MegatronWriter(wandb_log)))
wandb_log.close()
"""


def test_without_the_package(tmp_path: Path) -> None:
    """`-S` leaves site-packages, and so wandb, out of reach."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", NO_WANDB, tmp_path / "run", ROOT],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr.count("not installed; going on without it") == 1


@pytest.mark.parametrize(
    ("mode", "directory", "active"),
    [
        ("disabled", "wandb", True),
        ("online", "wandb", False),  # There is no key, and no terminal to ask for one.
        ("offline", "file", False),
    ],
)
def test_training_goes_on_without_a_run(
    mode: str, directory: str, active: bool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    env = {"WANDB_MODE": mode, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    done = child(
        "wandb_in_trouble", tmp_path / "run", tmp_path / directory, WANDB_API_KEY="", **env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(active)]
    assert ("going on without it" in done.stderr) != active


def megatron_args(**changes: Any) -> SimpleNamespace:
    args = {
        "wandb_project": "p",
        "wandb_exp_name": "n",
        "wandb_entity": "",
        "wandb_save_dir": "",
        "seq_length": 8,
    }
    return SimpleNamespace(**{**args, **changes})


def test_settings_are_megatrons_flags() -> None:
    assert settings_from_megatron(megatron_args(wandb_project="")) is None
    with pytest.raises(ValueError, match="--wandb-exp-name"):
        settings_from_megatron(megatron_args(wandb_exp_name=""))
    settings = settings_from_megatron(megatron_args())
    assert settings is not None
    assert (settings.project, settings.name, settings.entity) == ("p", "n", None)
    assert settings.config["seq_length"] == 8


def test_the_writer_passes_for_the_module(tmp_path: Path) -> None:
    """Megatron's timers choose the writer's kind by comparing it with the module."""
    log = EventLog(RunDirectory(tmp_path), 0)
    writer = MegatronWriter(
        WandbLog(log.run_dir, settings_from_megatron(megatron_args()), history=log.read, process=0)
    )
    assert writer == wandb
    assert writer != json
    assert writer is not None
    assert not writer
    assert writer.Artifact is wandb.Artifact
    writer.log({"loss": 1.0}, 1)
    writer.finish()


def test_megatrons_own_functions_log_to_the_run(tmp_path: Path) -> None:
    done = child("wandb_megatron", tmp_path, TORCHDYNAMO_DISABLE="1")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = history(file)
    assert [row["lm loss"] for row in rows if row["iteration"] == 3] == [2.5]
    assert [row["after"] for row in rows if row["iteration"] == 4] == [1.0]
    assert any(r.WhichOneof("record_type") == "artifact" for r in records(file))
