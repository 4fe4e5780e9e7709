"""The run directory: one wandb id, the exit status, files that are old or new and never half."""

from __future__ import annotations

import concurrent.futures
import json
import time
from pathlib import Path

import pytest
from observe_runs import child, line_of

from megatron_ft.observe.rundir import RunDirectory, default_path, write_json


def test_all_processes_get_one_wandb_id(tmp_path: Path) -> None:
    def ask(number: int) -> str:
        return RunDirectory(tmp_path / "run").wandb_id()

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        ids = set(pool.map(ask, range(200)))
    assert len(ids) == 1
    assert RunDirectory(tmp_path / "run").wandb_id("from-a-checkpoint") in ids
    assert RunDirectory(tmp_path / "other").wandb_id("from-a-checkpoint") == "from-a-checkpoint"
    assert not list((tmp_path / "run").glob(".*")), "temporary files are left"


def test_two_jobs_that_start_in_one_second_have_directories_of_their_own() -> None:
    assert default_path(1e9).name[:-7] == default_path(1e9).name[:-7]
    assert len({default_path(1e9) for _ in range(3)}) > 1


def test_wandb_id_of_a_checkpoint_is_checked(run_dir: RunDirectory) -> None:
    with pytest.raises(ValueError, match="not a wandb run id"):
        run_dir.wandb_id("a/b")


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="not a directory"):
        RunDirectory(tmp_path / "run")


def test_exit_status_is_of_the_last_start(run_dir: RunDirectory) -> None:
    assert run_dir.read_exit_status() is None
    run_dir.write_exit_status(75, "no replica is whole; start with --ft-checkfree")
    status = run_dir.read_exit_status()
    assert status is not None
    assert (status.code, status.message[:10]) == (75, "no replica")
    run_dir.clear_exit_status()
    run_dir.clear_exit_status()
    assert run_dir.read_exit_status() is None


def test_a_killed_writer_leaves_the_old_or_the_new_summary(run_dir: RunDirectory) -> None:
    write_json(run_dir.summary, {"numbers": []})
    for delay in (0.0, 0.003, 0.011, 0.027):
        with child("summary", run_dir.path) as process:
            assert line_of(process) == "ready"
            time.sleep(delay)
            process.kill()
            process.wait(30)
        numbers = json.loads(run_dir.summary.read_text())["numbers"]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) % 5000 == 0
