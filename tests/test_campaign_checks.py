"""The checks of a campaign: green on a run as it should be, red on each thing that is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from campaign_child import finished

from megatron_ft.campaign.census import MEGABYTE
from megatron_ft.campaign.checks import CHECKS, Ended, judge
from megatron_ft.campaign.doctor import DOCTORINGS, blind_spots
from megatron_ft.campaign.recorded import Run
from megatron_ft.campaign.runner import conclude
from megatron_ft.campaign.spec import (
    Case,
    Count,
    End,
    Expectation,
    Growth,
    Model,
    Punisher,
    Setting,
)
from megatron_ft.observe.event_table import Event
from megatron_ft.topology import Topology

ITERATIONS = 12
FAULT = "kill@5:slot=1"
SETTING = Setting(
    topology=Topology(tensor=1, pipeline=2, data=2),
    model=Model(),
    seed=1,
    iterations=ITERATIONS,
    microbatches=16,
    flags=(),
)
EXPECT = Expectation(
    status="degraded",
    weights_equal=True,
    events={"replica_dark": Count(least=1, most=1)},
    repair_s=0.1,
)
CASE = Case(campaign="c", name="n", setting=SETTING, faults=(FAULT,), expect=EXPECT)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    sizes: dict[str, Any] = {"data": 2, "pipeline": 2}
    return Run(0, "", finished(tmp_path / "run", ITERATIONS, [FAULT], weights=True, **sizes))


@pytest.fixture
def reference(tmp_path: Path) -> Run:
    return Run(0, "", finished(tmp_path / "reference", ITERATIONS, [], data=2, pipeline=2))


def red(case: Case, run: Run, reference: Run | None, ended: Ended | None = None) -> set[str]:
    return {problem.check for problem in judge(case, run, ended or Ended(), reference)}


def expecting(**changes: Any) -> Case:
    return dataclasses.replace(CASE, expect=dataclasses.replace(EXPECT, **changes))


def changed(run: Run, kind: str, **fields: Any) -> Run:
    """The run with the last event of a kind changed; a field given as a function is applied."""
    events: list[Event] = [dict(event) for event in run.events]
    last = [event for event in events if event["kind"] == kind][-1]
    for name, value in fields.items():
        last[name] = value(last[name]) if callable(value) else value
    return run.with_events(events)


def test_a_run_as_it_should_be_is_green(run: Run, reference: Run) -> None:
    assert judge(CASE, run, Ended(), reference) == []
    assert (
        judge(dataclasses.replace(CASE, faults=(), expect=Expectation()), reference, Ended(), None)
        == []
    )


@pytest.mark.parametrize("name", DOCTORINGS)
def test_each_falsification_is_noticed(name: str, run: Run, reference: Run) -> None:
    doctoring = DOCTORINGS[name]
    doctored = doctoring.change(CASE, run)
    assert doctored is not None
    found = judge(CASE, doctored, Ended(), reference)
    assert doctoring.check in {problem.check for problem in found}
    assert judge(CASE, run, Ended(), reference) == [], "the run itself is as it was"


def test_a_check_that_is_blind_is_noticed(
    run: Run, reference: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert blind_spots(CASE, run, Ended(), reference) == (len(DOCTORINGS), [])
    assert conclude(CASE, run, Ended(), reference, 1.0).passed
    monkeypatch.setattr("megatron_ft.campaign.compare.sample_problems", lambda *_: iter(()))
    assert blind_spots(CASE, run, Ended(), reference)[1] == ["other-samples"]
    outcome = conclude(CASE, run, Ended(), reference, 1.0)
    assert not outcome.passed and "other-samples" in outcome.problems[0]


def test_each_check_can_be_red(run: Run, reference: Run) -> None:
    """Every check of the table is in this test, alone where it can be alone."""
    cases: dict[str, set[str]] = {
        "exit": red(CASE, dataclasses.replace(run, returncode=1), reference),
        "status": red(expecting(status="ok"), run, reference),
        "leftovers": red(CASE, run, reference, Ended(left_behind=["4711 python"])),
        "faults": red(dataclasses.replace(CASE, faults=(FAULT, "kill@6:slot=0")), run, reference),
        "steps": red(
            CASE, run.with_events([e for e in run.events if e["iteration"] != 7]), reference
        ),
        "microbatches": red(CASE, changed(run, "step", microbatches=31), reference),
        "samples": red(CASE, changed(run, "step", samples_digest="0"), reference),
        "losses": red(CASE, changed(run, "step", lm_loss=lambda x: x * (1 + 2e-6)), reference),
        "validation": red(CASE, changed(run, "eval", lm_loss=lambda x: x * (1 + 2e-6)), reference),
        "weights": red(CASE, run.with_weights({0: run.weights[0]}), reference),
        "events": red(expecting(events={"slot_filled": Count(least=1)}), run, reference),
        "growth": red(
            expecting(growth=Growth(process=0, resident_mb=1)), counted(run, groups=8), reference
        ),
        "repair": red(expecting(repair_s=0.02), run, reference),
    }
    assert cases == {name: {name} for name in CHECKS}


def test_more_that_must_be_red(run: Run, reference: Run) -> None:
    assert red(CASE, run, reference, Ended(timed_out=True)) == {"exit"}
    assert red(expecting(message="--ft-checkfree"), run, reference) == {"status"}
    assert red(CASE, run.with_events([*run.events, run.of_kind("step")[-1]]), reference) == {
        "steps"
    }
    one_more = changed(run, "step", iteration=ITERATIONS + 1)
    assert red(CASE, one_more, reference) == {"steps"}
    assert red(CASE, changed(run, "step", grad_norm=lambda x: x * 1.01), reference) == {"losses"}
    assert red(CASE, changed(run, "step", grad_norm=None), reference) == {"losses"}
    assert red(CASE, changed(run, "step", lm_loss=float("nan")), reference) == {"losses"}
    no_eval = run.with_events([e for e in run.events if e["kind"] != "eval"])
    assert red(CASE, no_eval, reference) == {"validation"}
    same = {slot: {"committed": ITERATIONS, "digest": "d"} for slot in range(4)}
    assert red(CASE, run.with_weights(same), reference) == {"weights"}, "it could not fail"
    late = {slot: {**held, "committed": 3} for slot, held in run.weights.items()}
    assert red(CASE, run.with_weights(late), reference) == {"weights"}
    thrice = expecting(events={"replica_dark": Count(least=0, most=0)})
    assert red(thrice, run, reference) == {"events"}
    punished = dataclasses.replace(CASE, punisher=Punisher(mtbf=1, seconds=1, least_kills=2))
    assert red(punished, run, reference, Ended(kills=1)) == {"faults"}
    assert red(punished, run, reference, Ended(kills=2)) == set()
    drawn = dataclasses.replace(expecting(drawn_faults=1), faults=(), rates=("kill:0.1/iter",))
    assert red(drawn, run, reference) == set()
    assert red(dataclasses.replace(drawn, faults=(FAULT,)), run, reference) == {"faults"}


def test_a_run_that_left_nothing(tmp_path: Path, reference: Run) -> None:
    (tmp_path / "empty").mkdir()
    nothing = Run(1, "", tmp_path / "empty")
    assert red(CASE, nothing, reference) == {"exit", "faults", "steps"}
    assert not conclude(CASE, nothing, Ended(), reference, 1.0).passed
    # A job that never began, or hangs, does not show what a control is to show.
    stops = control("exit", "steps", expect=Expectation(status="stopped", message="no way"))
    assert not conclude(stops, nothing, Ended(), reference, 1.0).passed
    assert not conclude(stops, nothing, Ended(timed_out=True), reference, 1.0).passed


def test_a_run_that_was_killed_before_its_summary_is_judged(run: Run, reference: Run) -> None:
    (run.directory / "summary.json").unlink()
    ended = Ended(timed_out=True)
    assert {"exit", "status"} <= red(CASE, run, reference, ended)
    assert not conclude(CASE, run, ended, reference, 1.0).passed


def test_an_approximation_is_held_to_its_bound_at_the_end(run: Run, reference: Run) -> None:
    near = expecting(end=End(bound=0.1, each_step=False))
    jump = run
    for event in jump.events:  # a loss that jumps and comes back
        if event["kind"] == "step" and event["iteration"] == 6:
            event["lm_loss"] *= 1.5
    assert red(CASE, jump, reference) == {"losses"}
    assert red(near, jump, reference) == set()
    worse = jump.with_events(
        [{**e, "lm_loss": e["lm_loss"] * 1.15} if e["kind"] == "step" else e for e in run.events]
    )
    assert red(near, worse, reference) == {"losses"}
    assert red(near, changed(run, "eval", lm_loss=5.0), reference) == {"validation"}
    assert blind_spots(near, jump, Ended(), reference) == (len(DOCTORINGS), [])


def test_later_steps_may_have_a_bound_of_their_own(run: Run, reference: Run) -> None:
    off = changed(run, "step", lm_loss=lambda x: x * (1 + 1e-4))
    assert red(CASE, off, reference) == {"losses"}
    later = End(bound=1e-6, later_from=ITERATIONS, later_bound=1e-3)
    assert red(expecting(end=later), off, reference) == set()
    too_late = dataclasses.replace(later, later_from=ITERATIONS + 1)
    assert red(expecting(end=too_late), off, reference) == {"losses"}


def test_a_job_that_is_to_stop_is_held_to_what_it_did(run: Run, reference: Run) -> None:
    stopped = expecting(exit_code=75, status="stopped", message="no way", weights_equal=False)
    events = [e for e in run.events if e["iteration"] <= 8 and e["kind"] != "run_finished"]
    end = {**run.of_kind("run_finished")[0], "status": "stopped", "message": "no way on"}
    early = dataclasses.replace(run, returncode=75).with_events([*events, end])
    assert red(stopped, early, reference) == set()
    tried, unnoticed = blind_spots(stopped, early, Ended(), reference)
    assert tried >= 5 and unnoticed == []
    assert red(expecting(weights_equal=False), early, reference) >= {"exit", "status", "steps"}


def control(*must_fail: str, **changes: Any) -> Case:
    return dataclasses.replace(CASE, must_fail=must_fail, **changes)


def test_a_control_must_fail_where_it_says_and_nowhere_else(run: Run, reference: Run) -> None:
    def passed(case: Case, run: Run, ended: Ended | None = None) -> bool:
        return conclude(case, run, ended or Ended(), reference, 1.0).passed

    assert not passed(control("losses"), run), "it is green"
    short = changed(run, "step", microbatches=31, lm_loss=lambda x: 2 * x)
    assert passed(control("losses"), short), "one comparison may fail with another"
    assert passed(control("losses", "microbatches"), short)
    assert not passed(control("losses", "samples"), short)
    assert not passed(control("losses"), dataclasses.replace(short, returncode=1))
    assert not passed(control("losses"), short, Ended(left_behind=["4711 python"]))
    assert not passed(control("losses", faults=(FAULT, "kill@6:slot=0")), short)
    stops = control("exit", expect=dataclasses.replace(EXPECT, message="no way on"))
    assert not passed(stops, dataclasses.replace(run, returncode=75)), "it says something else"
    outcome = conclude(control("losses"), run, Ended(), reference, 1.0)
    assert "must fail losses, and is green there" in outcome.problems[0]


def counted(run: Run, *last: str, groups: int = 7, threads: tuple[str, ...] = ()) -> Run:
    """The run, with a census of process 0 that holds these files and threads more at the end."""
    own = ["/dev/null", "socket:[1]"]
    rows = [
        {
            **{"epoch": min(iteration // 4, 2), "iteration": iteration, "torch_groups": 5},
            "groups": groups if iteration == ITERATIONS else 7,
            "files": [*own, *last] if iteration == ITERATIONS else own,
            "threads": ["MainThread", *(threads if iteration == ITERATIONS else ())],
            "resident": 100 * MEGABYTE + iteration * 1000,
        }
        for iteration in range(1, ITERATIONS + 1)
    ]
    (run.directory / "dumps" / "census-0.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return run


def test_what_may_pile_up_and_what_may_not(run: Run, reference: Run) -> None:
    case = expecting(growth=Growth(process=0, resident_mb=1))
    assert red(case, run, reference) == {"exit"}, "what nobody has counted has not grown"
    own = ("/runs/a/events.jsonl", "socket:[2]")  # of who writes for all by then
    assert red(case, counted(run, *own, threads=("ft-control",)), reference) == set()
    assert red(case, counted(run, *own, "socket:[3]"), reference) == {"growth"}
    assert red(case, counted(run, "/dev/null"), reference) == {"growth"}
    assert red(case, counted(run, threads=("ft-spawn",)), reference) == {"growth"}
    assert red(case, counted(run, groups=8), reference) == {"growth"}
    less = expecting(growth=Growth(process=0, resident_mb=0.001))
    assert red(less, counted(run), reference) == {"growth"}
