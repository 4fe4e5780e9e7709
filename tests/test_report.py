"""The report: what page and terminal say of runs that the product's own event log has written."""

from __future__ import annotations

import html
import io
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_runs
from harness import ROOT
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_ft.observe.event_table import KINDS, check
from megatron_ft.observe.summary import build_summary
from megatron_ft.report.command import main
from megatron_ft.report.compare import difference
from megatron_ft.report.curves import thin
from megatron_ft.report.load import load, load_runs, names_of
from megatron_ft.report.page import build_page
from megatron_ft.report.rows import rows_of
from megatron_ft.report.shares import replica_lanes
from megatron_ft.report.terminal import print_report
from megatron_ft.report.timeline import Timeline
from megatron_ft.report.times import parts_of
from megatron_ft.report.world import MAX_LANES, shown_lanes, world_of

NOW = report_runs.BEGIN + 1000


class Page(HTMLParser):
    """What a browser finds in a page: figures by field, its text, scripts and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, list[Any]] = {}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self._script: dict[str, str | None] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        if "data-field" in named:
            value = json.loads(named["data-value"] or "")
            self.figures.setdefault(str(named["data-field"]), []).append(value)
        self.addresses += [str(named[name]) for name in ("src", "href", "srcset") if name in named]
        self._script = named if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, data))
        else:
            self.words.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def data(self) -> dict[str, Any]:
        (found,) = [text for attrs, text in self.scripts if attrs.get("id") == "data"]
        return json.loads(found)


def page_of(*paths: Path) -> Page:
    return Page(build_page(load_runs(paths), NOW))


def terminal_of(*paths: Path) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    print_report(load_runs(paths), console, NOW)
    return console.export_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    report_runs.eventful(root / "eventful")
    report_runs.restarted(root / "restarted")
    report_runs.running(root / "running")
    return root


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_runs.long(tmp_path_factory.mktemp("long") / "run")


# --- one run -------------------------------------------------------------------------------------


def test_every_kind_of_event_is_in_the_synthetic_run_and_told(runs: Path) -> None:
    run = load(runs / "eventful")
    assert {event["kind"] for event in run.events} == set(KINDS)
    assert run.notes == ()
    page = page_of(runs / "eventful")
    for words in (
        "Finished degraded with 4 of 4 replicas, exit code 0.",
        "2 deaths survived, 1 replica went dark, 2 slots filled again, 1 stage rebuilt",
        "1 stage adopted. 9 processes, 8 slots: 4 replicas of 2 stages",
        "process 1, slot 1 (replica 1, stage 0)",
        "injected: kill@20:slot=1:point=reduce",
        "injected: slow@60:slot=2",
        "replica 1 goes dark",
        "process 8 fills slot 1 (replica 1, stage 0) (5.0 MiB in 0.040 s)",
        "stage 1 rebuilt (checkfree)",
        "slot 0 does slot 4 (replica 0, stage 1) too",
        "replica 0 is now minor",
    ):
        assert words in page.text, words
    (drawn,) = page.data["runs"]
    assert [point["split"] for point in drawn["evals"]] == ["validation", "validation", "test"]
    (checkpoint,) = drawn["checkpoints"]
    assert checkpoint["text"] == "checkpoint after step 29 in 0.60 s, interval"
    marks = {mark for lane in drawn["lanes"] for _, mark, _ in lane["marks"]}
    assert {"died", "filled", "rebuilt", "adopted"} <= marks


@pytest.mark.parametrize("name", ["eventful", "restarted", "running"])
def test_numbers_on_the_page_are_those_of_the_summary(runs: Path, name: str) -> None:
    """Against summary.json where the run left one, else against what it would be."""
    run = load(runs / name)
    written = runs / name / "summary.json"
    summary = json.loads(written.read_text()) if written.exists() else build_summary(run.events)
    page = page_of(runs / name)
    assert {"final_lm_loss", "goodput", "iterations", "repairs", "wall_s"} <= page.figures.keys()
    for field, values in page.figures.items():
        assert values == [summary[field]], field
    # And all of it once more, unrounded.
    for field in ("downtime_s", "tokens", "goodput"):
        assert json.dumps(summary[field]) in page.text
    assert f"{summary['final_lm_loss']:.6f}" in page.text
    assert f"{summary['goodput']:6.1%}" in terminal_of(runs / name)


def test_who_served_a_slot_when(runs: Path) -> None:
    run = load(runs / "eventful")
    timeline = Timeline(run.events)
    world = world_of(run.events, timeline)
    story = {
        lane.slot: [
            (timeline.steps[s.begin], timeline.steps[s.end], s.state, s.process)
            for s in lane.spans
            if timeline.steps[s.end] > timeline.steps[s.begin]
        ]
        for lane in world.lanes
    }
    assert story[0] == [(0.5, 89.5, "first", 0)]
    assert story[1] == [
        *((0.5, 19.5, "first", 1), (19.5, 29.5, "dark", None), (29.5, 89.5, "other", 8))
    ]
    assert story[5] == [
        *((0.5, 19.5, "first", 5), (19.5, 29.5, "dark", None), (29.5, 89.5, "first", 5))
    ]
    assert story[4] == [(0.5, 44.5, "first", 4), (44.5, 89.5, "adopted", 0)]
    assert [epoch for _, _, epoch in world.epochs.spans] == [0, 1, 2, 3]
    lanes = replica_lanes(run.events, timeline)
    quotas = [[quota for *_, quota in lane.quotas] for lane in lanes]
    assert quotas == [[8, 11, 8], [8, -1, 8], [8, 11, 8], [8, 10, 8]]
    assert [[role for *_, role in lane.roles] for lane in lanes] == [["minor"], [], [], ["spare"]]


def test_rows_hold_what_belongs_together_and_what_it_cost(runs: Path) -> None:
    run = load(runs / "eventful")
    rows = rows_of(run, Timeline(run.events))
    first, second, third, *others = rows
    assert (first.iteration, first.tags) == (20, ["died", "dark", "fault"])
    assert (first.detect_s, first.recomputed) == (0.04, 8)
    assert first.cost["repair_s"] == 0.03 and first.cost["restore_s"] == 0.004
    assert [row.downtime_s for row in rows[:3]] == run.summary["downtime_s"]
    # The newcomers report their slots after the repair.
    assert second.tags == ["filled"] and second.deaths == []
    assert second.cost["transfer_bytes"] == 10 << 20 and second.cost["transfer_s"] == 0.04
    assert third.tags == ["died", "rebuilt", "adopted", "role"]
    assert any(row.deeds == ["replica 3 is now spare"] for row in others)
    assert any(row.faults and row.deeds == ["no repair followed"] for row in others)
    assert sum(row.repaired is not None for row in rows) == run.summary["repairs"]


def test_a_lost_stage_is_in_the_row_of_its_rebuild(tmp_path: Path) -> None:
    run = report_runs.Writer(tmp_path / "run")
    run.begin()
    run.steps(5)
    lost = {"fault_kind": "lose-stage", "point": "begin", "slot": None, "n": None}
    run.emit("fault_injected", fault="lose-stage@6:stage=1", stage=1, **lost)
    run.epoch += 1
    run.iteration += 1
    run.emit("repaired", 0.3, repair_s=0.3, live_replicas=4, live_processes=8)
    run.emit("stage_rebuilt", stage=1, method="checkfree", slot=4, replica=0, transfer_s=0.2)
    run.iteration -= 1
    run.step(1.0)
    run.end()
    loaded = load(tmp_path / "run")
    (row,) = rows_of(loaded, Timeline(loaded.events))
    assert row.when == ["injected: lose-stage@6:stage=1"]
    assert row.deeds[0].startswith("stage 1 rebuilt") and len(row.deeds) == 2


@pytest.mark.parametrize("name", ["eventful", "restarted", "running"])
def test_parts_add_up_to_the_wall_time(runs: Path, name: str) -> None:
    run = load(runs / name)
    parts = {part.key: part.seconds for part in parts_of(run.events, run.accounts)}
    assert sum(parts.values()) == pytest.approx(run.summary["wall_s"])
    assert min(parts.values()) >= 0
    assert parts["steps"] / run.summary["wall_s"] == pytest.approx(run.summary["goodput"])
    if name == "eventful":
        assert parts["checkpoint"] == pytest.approx(0.6)
        assert parts["eval"] == pytest.approx(1.2)
        assert parts["restore"] == pytest.approx(0.004)
        assert parts["recompute"] == pytest.approx(0.1)
    if name == "restarted":
        assert parts["restart"] == pytest.approx(8)
        assert parts["redone"] == pytest.approx(7 * 0.5)


def test_a_restart_shows_the_deaths_before_it_and_the_steps_done_last(runs: Path) -> None:
    run = load(runs / "restarted")
    timeline = Timeline(run.events)
    (row,) = rows_of(run, timeline)
    assert row.tags == ["died", "unrepaired"] and len(row.who) == 2
    assert timeline.place(row.first) == (10.5, pytest.approx(9.2))  # where the second start begins
    page = page_of(runs / "restarted")
    assert "2 deaths not survived, 1 new start of the job" in page.text
    assert len(page.data["runs"][0]["starts"]) == 2
    assert page.data["runs"][0]["curves"]["lm_loss"]["step"] == list(range(1, 41))


def test_a_run_that_goes_on_is_said_to(runs: Path) -> None:
    page = page_of(runs / "running")
    age = NOW - load(runs / "running").events[-1]["time"]
    assert age > 900
    assert "the run is still going, or it was killed. 25 of 1,000 steps" in page.text
    assert "the last event is 16 min 28 s old" in page.text
    assert "1 line of events.jsonl is not whole and left out" in page.text
    assert "There is no summary.json" in page.text
    assert "no end yet" in page.text and "stopped" not in page.text.split("All of summary")[0]
    assert "still going" in terminal_of(runs / "running")


def test_a_file_cut_anywhere_can_be_reported_on(runs: Path, tmp_path: Path) -> None:
    whole = (runs / "eventful" / "events.jsonl").read_bytes()
    (tmp_path / "run").mkdir()
    for size in range(700, len(whole), len(whole) // 23):
        (tmp_path / "run" / "events.jsonl").write_bytes(whole[:size])
        assert "No end was reported" in page_of(tmp_path / "run").text


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    run = report_runs.Writer(tmp_path / "run")
    run.begin(train_iters=10)
    run.log.close()
    page = page_of(tmp_path / "run")
    assert "0 of 10 steps are committed" in page.text
    assert page.data["runs"][0]["range"] == {"step": None, "time": [0, 0.0]}
    assert "nothing died" in terminal_of(tmp_path / "run")


def test_losses_that_are_not_finite_are_named(tmp_path: Path) -> None:
    run = report_runs.Writer(tmp_path / "run")
    run.begin()
    run.step()
    run.step(lm_loss=math.nan, grad_norm=None)
    run.step(lm_loss=math.inf)
    page = page_of(run.end())
    loss = page.data["runs"][0]["curves"]["lm_loss"]
    assert (loss["step"], loss["notFinite"], loss["total"]) == ([1], [2, 3], 3)
    assert page.data["runs"][0]["curves"]["grad_norm"]["step"] == [1, 3]
    assert page.figures["final_lm_loss"] == ["Infinity"]


def test_a_summary_that_says_something_else_is_noticed(tmp_path: Path) -> None:
    run = report_runs.Writer(tmp_path / "run")
    run.begin()
    run.steps(3)
    path = run.end()
    assert load(path).notes == ()
    written = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**written, "tokens": 1, "of_later": 2}))
    (note,) = load(path).notes
    assert "it differs in tokens." in note
    (path / "exit_status.json").write_text("{")
    (path / "summary.json").write_text("{")
    assert [n.split(" ")[0] for n in load(path).notes] == ["summary.json", "exit_status.json"]


def test_events_of_another_version_are_counted(tmp_path: Path) -> None:
    run = report_runs.Writer(tmp_path / "run")
    run.begin()
    run.steps(2)
    path = run.end()
    lines = (path / "events.jsonl").read_text().splitlines()
    step = json.loads(lines[-2])
    del step["lm_loss"]
    later = {**json.loads(lines[-2]), "id": "later", "of_a_later_version": 1}
    unknown = {**step, "id": "unknown", "kind": "teleported"}
    lines[-2:-1] = map(json.dumps, (step, later, unknown))
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    read = load(path)
    assert "2 events left out" in read.notes[0] and "1 step, 1 teleported" in read.notes[0]
    assert [event["id"] for event in read.events if event["kind"] == "step"][-1] == "later"


def test_many_slots_show_those_that_changed(tmp_path: Path) -> None:
    run = report_runs.Writer(tmp_path / "run", data=32, pipeline=16, pool=0)
    run.begin()
    run.steps(3)
    run.deal({3})
    run.die(3, 2, run.slot(3, 2))
    run.steps(3)
    events = load(run.end("degraded")).events
    lanes, note = shown_lanes(world_of(events, Timeline(events)).lanes)
    assert len(lanes) == 16 < MAX_LANES and {lane.replica for lane in lanes} == {3}
    assert note == "496 of 512 slots kept their process all the time."


# --- names, and what the page loads --------------------------------------------------------------

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028"


def test_names_and_messages_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "<b>run&lt;'"
    run = report_runs.Writer(path)
    run.begin(flags={"argv": [EVIL]}, versions={EVIL: EVIL}, faults=[EVIL])
    run.steps(2)
    run.emit("fault_injected", fault=EVIL, fault_kind="kill", point=EVIL, slot=1)
    run.emit("fault_detected", slot=1, how=EVIL, failed_process=1)
    run.emit("stage_rebuilt", stage=0, method=EVIL)
    run.emit("role_changed", role=EVIL, replica=0, slot=0)
    run.emit("repaired", repair_s=0.1, live_replicas=4, live_processes=8)
    run.steps(2)
    run.emit("checkpoint", path=EVIL, seconds=1.0, reason=EVIL)
    run.emit("eval", lm_loss=1.0, split=EVIL)
    run.end("stopped", 75, EVIL)
    text = build_page(load_runs([path, report_runs.running(tmp_path / EVIL[-4:])]), NOW)
    page = Page(text)
    assert page.tags.count("script") == 2 and "img" not in page.tags and "b" in page.tags
    assert "<b>run&lt;'" in page.text and EVIL.replace("\u2028", "") in page.text.replace(
        "\u2028", ""
    )
    assert html.escape(EVIL) in text and "alert(1)</script>" not in text
    assert page.data["runs"][0]["name"] == "<b>run&lt;'"
    assert EVIL in page.data["runs"][0]["incidents"][0]["text"]
    assert EVIL in terminal_of(path)


def test_the_page_loads_nothing(runs: Path) -> None:
    text = build_page(load_runs([runs / "eventful", runs / "running"]), NOW)
    page = Page(text)
    assert page.addresses and all(address.startswith("#") for address in page.addresses)
    assert "default-src 'none'" in text
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_plots_are_drawn_in_a_browser(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(build_page(load_runs([runs / "eventful", runs / "running"]), NOW))
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update")
    done = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 'data-drawn="yes"' in done.stdout, done.stderr[-2000:]
    # Two plots that compare, three for each run.
    assert done.stdout.count('role="img" aria-label="') >= 8
    assert "NaN" not in re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


# --- a long run ----------------------------------------------------------------------------------


def test_a_long_run_makes_a_page_of_a_few_megabytes_in_seconds(long_run: Path) -> None:
    started = time.monotonic()
    run = load(long_run)
    text = build_page([run], NOW)
    took = time.monotonic() - started
    assert run.summary["iterations"] == 10_000 and run.summary["repairs"] == 500
    assert len(text) < 4 << 20
    assert took < 60  # generous: about a second on an idle core
    drawn = Page(text).data["runs"][0]
    assert len(drawn["incidents"]) == 500
    norms = drawn["curves"]["grad_norm"]
    all_norms = [step["grad_norm"] for step in run.accounts.steps]
    assert len(norms["y"]) < 2500 and norms["total"] == 10_000
    assert max(norms["y"]) == pytest.approx(max(all_norms), rel=1e-8)
    assert min(norms["y"]) == pytest.approx(min(all_norms), rel=1e-8)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=300),
    st.integers(1, 20),
)
def test_thinning_keeps_ends_and_extremes_of_every_stretch(
    values: list[float], num_buckets: int
) -> None:
    kept = thin(values, num_buckets)
    assert kept == sorted(set(kept)) and len(kept) <= 4 * num_buckets
    if not values:
        assert kept == []
        return
    assert kept[0] == 0 and kept[-1] == len(values) - 1
    for bucket in range(num_buckets):
        inside = range(
            bucket * len(values) // num_buckets, (bucket + 1) * len(values) // num_buckets
        )
        if inside:
            shown = [values[index] for index in kept if index in inside]
            of_all = values[inside.start : inside.stop]
            assert (min(shown), max(shown)) == (min(of_all), max(of_all))


# --- several runs --------------------------------------------------------------------------------


def test_two_runs_side_by_side(runs: Path, tmp_path: Path) -> None:
    for name, change in (("one", {}), ("two", {"lm_loss": 2.0, "samples_digest": "other"})):
        run = report_runs.Writer(tmp_path / name)
        run.begin()
        run.steps(9)
        run.step(**change)
        run.steps(5 if name == "one" else 3)
        run.end()
    one, two = load_runs([tmp_path / "one", tmp_path / "two"])
    found = difference(two, one)
    loss = one.accounts.steps[9]["lm_loss"]
    assert (found.num_common, found.num_same_samples, found.first_difference) == (13, 12, 10)
    assert found.largest == abs(2.0 - loss) and found.largest_at == 10
    assert found.largest_relative == abs(2.0 - loss) / loss
    page = page_of(tmp_path / "one", tmp_path / "two")
    assert found.text in page.text and "12 of 13 common steps have the same samples" in page.text
    for field in ("final_lm_loss", "iterations", "goodput"):
        values = [one.summary[field], two.summary[field]]
        assert page.figures[field][:2] == values, "the table that compares"
        assert page.figures[field][2:] == values, "the tiles of each run"
    assert [one["name"] for one in page.data["comparison"]["losses"]] == ["one", "two"]
    (deltas,) = page.data["comparison"]["differences"]
    assert deltas["step"] == list(range(1, 14)) and set(deltas["y"][:9]) == {0.0}
    assert found.text in terminal_of(tmp_path / "one", tmp_path / "two")


def test_a_loss_that_is_no_number_is_not_equal_to_one(tmp_path: Path) -> None:
    for name, loss in (("one", 2.0), ("two", float("nan"))):
        run = report_runs.Writer(tmp_path / name)
        run.begin()
        run.steps(3)
        run.step(lm_loss=loss)
        run.end()
    one, two = load_runs([tmp_path / "one", tmp_path / "two"])
    assert difference(two, one).first_difference == 4
    assert "they first differ at step 4" in difference(two, one).text
    assert difference(two, two).first_difference is None


def test_equal_runs_and_runs_with_nothing_in_common(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "eventful", tmp_path / "copy")
    one, same, empty = load_runs(
        [runs / "eventful", tmp_path / "copy", _before_its_first_step(tmp_path / "empty")]
    )
    assert difference(same, one).text.endswith("all losses are equal, digit for digit")
    assert difference(empty, one).text == "no step in common"
    assert "no step in common" in Page(build_page([one, same, empty], NOW)).text


def _before_its_first_step(path: Path) -> Path:
    run = report_runs.Writer(path)
    run.begin()
    run.log.close()
    return path


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("/a/run",), ["run"]),
        (("/a/run", "/b/run"), ["a/run", "b/run"]),
        (("/1/a/x/run", "/1/b/x/run", "/1/b/y/z"), ["a/x/run", "b/x/run", "b/y/z"]),
    ],
)
def test_runs_are_told_apart(paths: Sequence[str], names: list[str]) -> None:
    assert names_of([Path(path) for path in paths]) == names


# --- the command ---------------------------------------------------------------------------------


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "report.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def test_the_command_writes_the_page_and_prints_the_summary(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "eventful", tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    done = run_command(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Finished degraded with 4 of 4 replicas" in done.stdout
    assert "committed steps" in done.stdout and str(tmp_path / "run" / "report.html") in done.stdout
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!DOCTYPE html>")
    for name, content in before.items():
        assert (tmp_path / "run" / name).read_bytes() == content, "the run was changed"
    done = run_command(tmp_path / "run", runs / "running", "--output", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    assert "2 runs compared" in (tmp_path / "both.html").read_text()


def test_what_cannot_be_reported_on_is_said(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "events.jsonl").write_text('{"id": ')
    for arguments, words in (
        ([tmp_path], f"{tmp_path} has no events.jsonl"),
        ([tmp_path], "it holds notes.txt, torn"),
        ([tmp_path / "absent"], "absent is not there"),
        ([tmp_path / "notes.txt"], "notes.txt is no directory"),
        ([tmp_path / "torn"], "events.jsonl in"),
        ([runs / "eventful", runs / "eventful"], "is given 2 times"),
        ([runs / "eventful", "--output", tmp_path / "no" / "page.html"], "No such file"),
    ):
        assert main(list(map(str, arguments))) == 64
        printed = capsys.readouterr()
        assert words in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not (tmp_path / "absent").exists()
    for wrong in ([], ["--outptu", "x"]):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 64


def test_the_examples_of_these_tests_are_events() -> None:
    """What report_runs makes up for kinds that it does not know passes the product's check."""
    for kind, entry in KINDS.items():
        if kind not in report_runs.KINDS_TOLD:
            check(kind, {name: report_runs.example(name) for name in entry.required})
