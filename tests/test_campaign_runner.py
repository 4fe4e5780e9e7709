"""Running campaigns: what is kept, what is run again, what is left behind, what is said.

Jobs here are small programs that leave a run directory; tests/test_campaign_live.py trains.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from harness import ROOT

from megatron_ft.campaign import job, runner
from megatron_ft.campaign.command import main
from megatron_ft.campaign.launching import Launcher
from megatron_ft.campaign.reading import read_campaign
from megatron_ft.campaign.runner import Runner, code_digest

CHILD = ROOT / "tests" / "campaign_child.py"
CAMPAIGN = """\
seed: 1
topology: {dp: 2}
iterations: 6
microbatches: 16
expect: {status: degraded}
cases:
  good:
    faults: [kill@3:slot=1]
  also-good:
    faults: [kill@4:slot=1]
controls:
  short:
    strategies: --wrong short-batch
    faults: [kill@3:slot=1]
    must_fail: [microbatches]
"""


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands start the stand-in, with the flags that the ranks would get, and wait for nobody."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the lock of all launches is
    real = job.setting_command

    def command(*args: object, **named: object) -> list[str]:
        return [sys.executable, str(CHILD), *real(*args, **named)[6:]]  # type: ignore[arg-type]

    monkeypatch.setattr(job, "setting_command", command)
    monkeypatch.chdir(ROOT)


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(CAMPAIGN)
    return path


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The run directories of all launches from now on."""
    done: list[str] = []
    real = Launcher.run

    def run(self: Launcher, command: list[str], **named: object) -> object:
        words = list(command)
        done.append(Path(words[words.index("--ft-run-dir") + 1]).parent.name)
        return real(self, command, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "run", run)
    return done


def call(campaign: Path, out: Path, *more: str) -> int:
    return main([str(campaign), "--out", str(out), "--data-path", "data/x", *more])


def test_a_campaign_passes_and_is_not_run_twice(
    campaign: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = launches(monkeypatch)
    assert call(campaign, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "red, as it must be" in said and "all passed" in said
    assert len(done) == 4 and done[1:] == ["good", "also-good", "short"], "one fault-free run"
    result = json.loads((tmp_path / "out" / "campaign.json").read_text())
    assert result["passed"] and result["cases"] == 3 and result["faults"] == 3
    good = result["results"][0]
    assert good["doctorings"] >= 5 and good["steps"] == 6 and good["difference"] == 0.0

    assert call(campaign, tmp_path / "out") == 0
    assert len(done) == 4 and "(kept)" in capsys.readouterr().out
    assert call(campaign, tmp_path / "out", "--fresh", "--only", "also") == 0
    assert done[4:] == [done[0], "also-good"]


def test_it_goes_on_where_it_was(
    campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of a case, and with one that failed: only those are run again."""
    done = launches(monkeypatch)
    assert call(campaign, tmp_path / "out") == 0
    out = tmp_path / "out" / "mine"
    (out / "good" / "result.json").unlink()  # as if it was killed before it could write this
    failed = json.loads((out / "also-good" / "result.json").read_text())
    (out / "also-good" / "result.json").write_text(json.dumps({**failed, "passed": False}))
    del done[:]
    assert call(campaign, tmp_path / "out") == 0
    assert done == ["good", "also-good"]


def test_what_was_run_by_other_code_or_from_another_file_is_run_again(
    campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launches(monkeypatch)
    assert call(campaign, tmp_path / "out") == 0
    campaign.write_text(CAMPAIGN.replace("kill@4", "kill@5"))
    assert call(campaign, tmp_path / "out") == 0
    assert done[4:] == ["also-good"]
    monkeypatch.setattr(runner, "code_digest", lambda: "of other code")
    assert call(campaign, tmp_path / "out", "--only", "/good") == 0
    assert len(done) == 7 and done[6] == "good"


def test_the_code_is_all_that_runs(tmp_path: Path) -> None:
    for name in ("megatron_ft/world", "patches", "tools"):
        (tmp_path / name).mkdir(parents=True)
    files = ["megatron_ft/world/a.py", "patches/b.py", *runner.SCRIPTS]
    for name in files:
        (tmp_path / name).write_text("1\n")
    before = code_digest(tmp_path)
    assert before == code_digest(tmp_path)
    for name in files:
        (tmp_path / name).write_text("2\n")
        assert code_digest(tmp_path) != before, name
        (tmp_path / name).write_text("1\n")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("crash", "exit: exit code 3, expected 0"),
        ("short-batch", "microbatches: 1 steps not of 32 microbatches: step 2 has 31"),
        ("silent-fault", "faults: did not fire: kill@3:slot=1"),
        ("leave", "leftovers: left behind"),
    ],
)
def test_a_case_that_goes_wrong_fails(
    wrong: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(CAMPAIGN.replace("  good:\n", f"  good:\n    strategies: --wrong {wrong}\n"))
    assert call(path, tmp_path / "out", "--only", "/good") == 1
    said = capsys.readouterr().out
    assert says in said and "FAILED" in said and "1 failed" in said
    if wrong == "leave":
        assert not [
            p
            for p in psutil.process_iter(["cmdline"])
            if str(tmp_path / "out" / "mine" / "good" / "run") in (p.info["cmdline"] or [])
            and p.status() != psutil.STATUS_ZOMBIE
        ], "it was killed"
    if wrong == "crash":
        assert "badly wrong" in (tmp_path / "out" / "mine" / "good" / "log").read_text()


def test_a_case_that_hangs_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    hang = "  good:\n    strategies: --wrong hang\n    timeout: 1\n"
    path.write_text(CAMPAIGN.replace("  good:\n", hang))
    started = time.monotonic()
    assert call(path, tmp_path / "out", "--only", "/good") == 1
    assert time.monotonic() - started < 30
    assert "exit: no end after 1 s" in capsys.readouterr().out


def test_without_a_fault_free_run_nothing_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        CAMPAIGN.replace("microbatches: 16\n", "microbatches: 16\nflags: --wrong crash\n")
    )
    assert call(path, tmp_path / "out", "--only", "/good") == 1
    assert "its fault-free run failed" in capsys.readouterr().out


def test_several_at_once_share_the_fault_free_run(
    campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launches(monkeypatch)
    cases = read_campaign(campaign).cases
    outcomes = Runner(tmp_path / "out", "data/x", parallel=3).run(cases)
    assert [(o.name, o.passed) for o in outcomes] == [(case.name, True) for case in cases]
    assert len(done) == 4


def test_an_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(CAMPAIGN.replace("  good:\n", "  good:\n    strategies: --wrong hang\n"))
    out = tmp_path / "out"
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from megatron_ft.campaign import job, command\n"
        "real, start = job.setting_command, [sys.executable, 'tests/campaign_child.py']\n"
        "job.setting_command = lambda *a, **n: [*start, *real(*a, **n)[6:]]\n"
        "sys.exit(command.main(sys.argv[1:]))\n"
    )
    words = [str(path), "--out", str(out), "--data-path", "data/x"]
    tool = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    log = out / "mine" / "good" / "log"
    end = time.monotonic() + 60
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.3)
    hanging = [p for p in psutil.Process(tool.pid).children() if "hang" in p.cmdline()]
    assert len(hanging) == 1
    os.kill(tool.pid, signal.SIGTERM)
    said, _ = tool.communicate(timeout=60)
    assert tool.returncode == 130 and "goes on with what is not done" in said
    assert not hanging[0].is_running()


def test_what_cannot_be_run_is_said(
    campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign.write_text(CAMPAIGN.replace("seed: 1", "sed: 1"))
    assert call(campaign, tmp_path / "out") == 64
    assert capsys.readouterr().err.startswith(f"campaign.py: {campaign}:1: sed: there is no such")
    campaign.write_text(CAMPAIGN)
    assert call(campaign, tmp_path / "out", "--only", "nothing") == 64
    assert "no case has nothing in its name; --list" in capsys.readouterr().err
    assert call(campaign, tmp_path / "out", "--list") == 0
    assert capsys.readouterr().out.splitlines() == [
        *("mine/good", "mine/also-good", "mine/short (control)")
    ]
    for arguments in ([], [str(campaign), "--parallel", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 64
    assert not (tmp_path / "out").exists()
