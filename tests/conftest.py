"""What every test needs: the environment as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _environment_comes_back() -> Iterator[None]:
    """Megatron sets variables when it builds a model; a job that a later test starts has none."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
