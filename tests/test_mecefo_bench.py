"""The benchmark of MeCeFO's layer, on a tiny stage: that it runs, and that its memory is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import torch
from mecefo_stage import LiveBytes


def test_live_bytes_are_counted_up_and_down() -> None:
    before = torch.ones(1000)
    with LiveBytes() as live:
        live.ignore(before)
        first = before + 1
        assert live.live == 4000
        view = first[:10]
        del first
        assert live.live == 4000  # the view keeps it
        second = view.double()
        assert (live.live, live.peak) == (4080, 4080)
        del view
        assert (live.live, live.peak) == (80, 4080)
        before.mul_(2)
        assert live.live == 80
    del second


def test_a_tiny_stage(tmp_path: Path) -> None:
    sizes = {
        **{"layers": 2, "hidden": 64, "ffn": 172, "heads": 4, "sequence": 128},
        **{"microbatches": 2, "rounds": 1, "rank": 8},
    }
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "bench_mecefo.py")]
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command += ["--out", str(tmp_path / "found.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert "two stages on one process" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["settings"]["hidden"] == 64 and found["command"][-1].endswith("found.json")
    assert found["versions"].keys() == {"python", "torch", "megatron-core"} and found["machine"]
    memory = {row["way"]: row["memory"] for row in found["rows"]}
    assert memory["one stage"] == 1 and 1.7 < memory["naive"] < 2
    assert memory["all FFNs recomputed"] < memory["mecefo"] <= 1.1
