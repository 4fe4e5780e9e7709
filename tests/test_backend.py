"""The ulfm backend against gloo, under real deaths, and with messages beyond 2 GiB."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi_job import WORKERS, run_ranks

sys.path.insert(0, str(WORKERS))

from backend_cases import BOTH, ULFM_ONLY

CASES = [*BOTH, *ULFM_ONLY]
BROKEN = ["sum", "reduce_scatter", "all_gather", "all_to_all"]


def findings(directory: Path, ranks: list[int]) -> dict[int, dict[str, Any]]:
    return {r: json.loads((directory / f"found-{r}.json").read_text()) for r in ranks}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str | None]]:
    """What each rank found wrong with each case; None is nothing."""
    directory = tmp_path_factory.mktemp("backend")
    ended = run_ranks(4, "backend_worker.py", directory, timeout_s=200)
    assert ended.code == 0, ended.output[-5000:]
    return findings(directory, [0, 1, 2, 3])


def wrong_with(compared: dict[int, dict[str, str | None]], name: str) -> dict[int, str]:
    return {rank: what for rank, found in compared.items() if (what := found[name]) is not None}


@pytest.mark.parametrize("name", CASES)
def test_same_as_gloo(compared: dict[int, dict[str, str | None]], name: str) -> None:
    assert wrong_with(compared, name) == {}


@pytest.mark.parametrize("name", CASES)
def test_same_through_host_buffers(compared: dict[int, dict[str, str | None]], name: str) -> None:
    assert wrong_with(compared, f"staged_{name}") == {}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_result_is_noticed(compared: dict[int, dict[str, str | None]], name: str) -> None:
    assert wrong_with(compared, f"broken_{name}") == {}


@pytest.mark.parametrize("attempt", range(3))
def test_default_group_without_a_common_store(
    compared: dict[int, dict[str, str | None]], attempt: int
) -> None:
    assert wrong_with(compared, f"default_group_{attempt}") == {}


def test_destroyed_groups_leave_nothing(compared: dict[int, dict[str, str | None]]) -> None:
    assert wrong_with(compared, "groups_are_freed") == {}


def test_vacant_slots(tmp_path: Path) -> None:
    ended = run_ranks(4, "vacant_worker.py", tmp_path, timeout_s=150)
    assert ended.code == 0, ended.output[-5000:]
    for found in findings(tmp_path, [1, 3]).values():
        assert len(found) > 50
        assert {name: what for name, what in found.items() if what is not None} == {}
    assert not (tmp_path / "found-0.json").exists(), "slot 0 was to die"


@pytest.mark.slow
def test_messages_beyond_2_gib(tmp_path: Path) -> None:
    ended = run_ranks(2, "large_worker.py", tmp_path, timeout_s=300)
    assert ended.code == 0, ended.output[-5000:]
    for found in findings(tmp_path, [0, 1]).values():
        assert len(found) == 9
        assert found == dict.fromkeys(found, True)
