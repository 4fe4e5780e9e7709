"""What every test needs, the environment as it was, and what several need."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.observe.rundir import RunDirectory

# A shell that runs the tests in the background has them ignore this, and with them all their jobs.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _environment_comes_back() -> Iterator[None]:
    """Megatron sets variables when it builds a model; a job that a later test starts has none."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")
