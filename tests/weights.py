"""What the processes of a job held at its end, which ``RECOVER_TEST=weights`` writes down."""

from __future__ import annotations

import json
from pathlib import Path


def digests(directory: Path, iters: int) -> dict[int, str]:
    """Slot -> digest of the weights and optimizer state that its process holds at the end."""
    found = {}
    for path in directory.glob("weights-*.json"):
        held = json.loads(path.read_text())
        assert held["committed"] == iters, (path, held)
        found[int(path.stem.partition("-")[2])] = held["digest"]
    return found


def assert_equal_replicas(held: dict[int, str], pp: int, dp: int) -> None:
    """All slots are there, and replicas of a stage hold the same bytes; numbered by stage first."""
    assert sorted(held) == list(range(pp * dp))
    for stage in range(pp):
        assert len({held[stage * dp + replica] for replica in range(dp)}) == 1, f"stage {stage}"
    assert len(set(held.values())) == pp
