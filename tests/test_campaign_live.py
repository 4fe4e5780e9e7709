"""The smallest campaign with real jobs, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness import ROOT


def test_the_sample(tmp_path: Path) -> None:
    """Two launches of two ranks; the second time its results are kept."""
    command = [sys.executable, "tools/campaign.py", "examples/campaigns/sample.yaml"]
    arguments = ["--out", str(tmp_path)]
    for kept in (False, True):
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)
        result = json.loads((tmp_path / "campaign.json").read_text())
        assert result["passed"] and result["faults"] == 1
        (case,) = result["results"]
        assert case["kept"] is kept
        assert case["repairs"] == 1 and case["steps"] == 6 and case["status"] == "degraded"
        assert case["difference"] <= 1e-6
        assert case["doctorings"] >= 6, "each falsification was noticed"
