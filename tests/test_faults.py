"""Injected faults: the grammar, the draws, and processes that really fail in each way."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_ft.faults.deeds import DEEDS, InjectedFault
from megatron_ft.faults.injector import Injector
from megatron_ft.faults.plan import FaultPlan, load, plan_from_flags
from megatron_ft.faults.rates import RateSchedule, parse_rate
from megatron_ft.faults.spec import (
    FIELDS,
    KINDS,
    POINTS,
    FaultSpec,
    FaultSpecError,
    from_mapping,
    parse,
    validate,
)
from megatron_ft.observe.event_table import Event
from megatron_ft.observe.events import EventLog
from megatron_ft.observe.rundir import RunDirectory

CHILD = Path(__file__).with_name("faults_child.py")
DOCS = Path(__file__).parents[1] / "docs" / "faults.md"

# The grammar


def test_the_forms_of_a_spec() -> None:
    assert parse("kill@7:slot=5") == FaultSpec(kind="kill", iteration=7, slot=5, point="forward")
    assert parse("kill@7:slot=5:point=reduce:n=2") == FaultSpec(
        kind="kill", iteration=7, slot=5, point="reduce", n=2
    )
    assert parse("stop@3:slot=0:cont=2.5").cont == 2.5
    assert parse("lose-stage@3:stage=1").stage == 1
    assert parse("degrade@3:stage=1").stage == parse("degrade@3:slot=1:for=5").slot
    assert parse("slow@3:slot=1:s=0.2:for=4").duration == 4
    assert parse("kill@3:process=9:point=pool").process == 9
    assert parse("exit@2:slot=1:times=2").times == 2


def test_equal_faults_have_one_name() -> None:
    assert str(parse("kill@007:n=0:slot=5")) == "kill@7:slot=5:n=0"
    assert parse("kill@7:slot=5:point=forward") == parse("kill@7:slot=5")
    assert str(parse("kill@7:slot=5:point=forward:times=1")) == "kill@7:slot=5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "must look like KIND@ITERATION"),
        ("kill@x:slot=1", "must look like"),
        ("kill@3:slot", "must look like"),
        ("kill@3:slot=1:", "must look like"),
        ("murder@3:slot=1", "unknown kind 'murder'; there are kill, stop, exception"),
        ("kill@3:slot=1:colour=2", "unknown field 'colour'; there are slot, process, stage"),
        ("kill@3:slot=1:point=lunch", "unknown point 'lunch'; there are forward, backward"),
        ("kill@3:slot=1:slot=2", "a field is given twice"),
        ("kill@3:slot=one", "slot=one must be a whole number"),
        ("stop@3:slot=1:cont=soon", "cont=soon must be a number"),
        ("kill@0:slot=1", "iterations count from 1"),
        ("kill@3", "a fault spec that names no slot; kill needs slot=N or process=N"),
        ("lose-stage@3", "names no stage; lose-stage needs stage=N"),
        ("lose-stage@3:slot=1", "lose-stage at forward takes no slot, only stage"),
        ("degrade@3", "names no slot; degrade needs slot=N or stage=N"),
        ("degrade@3:slot=1:stage=1", "slot and stage both say who"),
        ("kill@3:slot=1:process=1", "slot and process both say who"),
        ("kill@3:slot=1:cont=2", "kill at forward takes no cont, only slot, process, point, times"),
        ("kill@3:slot=1:point=voted:n=2", "kill at voted takes no n"),
        ("slow@3:slot=1", "slow needs s"),
        ("slow@3:slot=1:s=1:point=voted", "slow makes no sense at voted, only at forward, backw"),
        ("lose-stage@3:stage=1:point=save", "lose-stage makes no sense at save"),
        ("kill@3:slot=1:point=pool", "a process in the pool serves no slot; give process=N"),
        ("kill@3:slot=-1", "slot must be at least 0"),
        ("stop@3:slot=1:cont=0", "cont must be more than 0 seconds"),
        ("stop@3:slot=1:cont=nan", "cont must be more than 0 seconds"),
        ("stop@3:slot=1:cont=inf", "cont must be more than 0 seconds"),
        ("kill@3:slot=1:times=0", "times must be at least 1"),
    ],
)
def test_what_is_refused_and_what_is_said(text: str, message: str) -> None:
    with pytest.raises(FaultSpecError, match=re.escape(message)):
        parse(text)


@st.composite
def specs(draw: st.DrawFn) -> FaultSpec:
    """Any spec that the tables allow."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    info = KINDS[kind]
    point = draw(st.sampled_from(info.points))
    target = "process" if point == "pool" else draw(st.sampled_from(info.targets))
    names = [target, *info.needs]
    if POINTS[point].n_counts is not None and "slot" in info.targets and kind != "degrade":
        names += draw(st.sampled_from([[], ["n"]]))
    names += [name for name in info.fields if name not in info.needs and draw(st.booleans())]
    values: dict[type, st.SearchStrategy[Any]] = {
        int: st.integers(1, 10**6),
        float: st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False),
    }
    fields = {FIELDS[n].attribute: draw(values[FIELDS[n].type]) for n in names}
    return FaultSpec(kind=kind, iteration=draw(st.integers(1, 10**9)), point=point, **fields)


@given(specs())
def test_text_and_spec_are_the_same(spec: FaultSpec) -> None:
    assert parse(str(spec)) == spec
    kind, iteration, fields = re.split("[@:]", str(spec) + ":", maxsplit=2)
    mapping = dict(pair.split("=") for pair in fields.split(":") if pair)
    assert from_mapping({"kind": kind, "iteration": int(iteration), **mapping}) == spec


@given(specs(), st.sampled_from(sorted(FIELDS)), st.integers(1, 9))
def test_a_field_too_many_is_refused_or_has_an_effect(
    spec: FaultSpec, name: str, value: int
) -> None:
    assume(f":{name}=" not in str(spec))
    try:
        changed = parse(f"{spec}:{name}={value}")
    except FaultSpecError:
        return
    assert changed != spec or (name, value) == ("times", 1)


def test_faults_that_the_job_cannot_have_are_listed_together() -> None:
    texts = [
        "kill@3:slot=8",
        "kill@30:slot=1",
        "lose-stage@3:stage=2",
        "exit@3:process=9",
        "kill@1:slot=0",
    ]
    with pytest.raises(FaultSpecError) as caught:
        validate(
            [*map(parse, texts), parse("kill@1:slot=0:point=forward")],
            num_slots=8,
            num_stages=2,
            train_iters=20,
            num_processes=9,
        )
    assert str(caught.value).splitlines()[1:] == [
        "  kill@3:slot=8: the job has slots 0 to 7",
        "  kill@30:slot=1: the run ends with iteration 20",
        "  lose-stage@3:stage=2: the job has stages 0 to 1",
        "  exit@3:process=9: the job has processes 0 to 8",
        "  kill@1:slot=0: given twice; to strike twice it takes times=2",
    ]
    # With --train-samples and a schedule of batch sizes nobody knows the end beforehand.
    validate([parse("kill@30:slot=1")], num_slots=8, num_stages=2, train_iters=None)


# Fault files


def test_a_fault_file(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text(
        "faults:\n"
        "  - kill@7:slot=5:point=reduce\n"
        "  - {kind: stop, iteration: 9, slot: 2, cont: 1.5}\n"
        "rates: [kill:0.05/h]\n"
        "seed: 17\n"
        "iteration_seconds: 91.3\n"
    )
    plan = load(file)
    assert plan.specs == (parse("kill@7:slot=5:point=reduce"), parse("stop@9:slot=2:cont=1.5"))
    assert (plan.rates, plan.seed, plan.iteration_seconds) == (
        (parse_rate("kill:0.05/h"),),
        17,
        91.3,
    )
    both = plan_from_flags(["exit@2:slot=1"], file, ["exit:0.5/iter"], seed=3)
    assert [spec.kind for spec in both.specs] == ["kill", "stop", "exit"]
    assert (len(both.rates), both.seed, both.iteration_seconds) == (2, 3, 91.3)
    file.write_text("- kill@7:slot=5\n")
    assert load(file).specs == (parse("kill@7:slot=5"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("faults: {", "fault file"),
        ("just text", "must be a list of faults or a mapping of faults, rates"),
        ("fault: []", "unknown fault; there are faults, rates, seed"),
        ("faults: kill@7:slot=5", "faults must be a list"),
        ("faults: [kill@7]", "names no slot"),
        ("faults: [{kind: kill, slot: 1}]", "has no iteration"),
        ("faults: [{kind: kill, iteration: 1.5, slot: 1}]", "iteration=1.5 must be a whole number"),
        ("faults: [{kind: kill, iteration: 1, slot: true}]", "slot=True must be a whole number"),
        ("faults: [3]", "'3' is no fault"),
        ("seed: x", "seed=x must be a whole number"),
    ],
)
def test_wrong_fault_files(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text(text)
    with pytest.raises(FaultSpecError, match=re.escape(message)) as caught:
        load(file)
    assert str(file) in str(caught.value)


def test_a_fault_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FaultSpecError, match="No such file"):
        load(tmp_path / "faults.yaml")


# Rates


def schedule(*rates: str, seed: int = 0, seconds: float | None = None) -> RateSchedule:
    return RateSchedule(
        [parse_rate(rate) for rate in rates],
        seed=seed,
        num_slots=16,
        num_stages=4,
        iteration_seconds=seconds,
    )


def drawn(plan: RateSchedule, num_iterations: int) -> list[FaultSpec]:
    return [spec for i in range(1, num_iterations + 1) for spec in plan.specs_at(i)]


def test_a_rate_is_met() -> None:
    """20,000 draws at 2 %: 400 expected, standard deviation 20."""
    faults = drawn(schedule("kill:0.02/iter"), 1250)
    assert 320 < len(faults) < 480
    assert {fault.slot for fault in faults} == set(range(16))


def test_a_rate_per_hour_is_checkfrees() -> None:
    """16 % per hour at 91.3 s an iteration: 1 - 0.84 ** (91.3 / 3600) = 0.44 % per iteration."""
    rate = parse_rate("lose-stage:0.16/h")
    assert rate.per_iteration(91.3) == pytest.approx(0.004412, rel=1e-3)
    faults = drawn(schedule("lose-stage:0.16/h", seconds=91.3), 5000)
    assert 50 < len(faults) < 130
    assert {fault.stage for fault in faults} == set(range(4))


def test_draws_depend_on_seed_iteration_and_slot_only() -> None:
    there = schedule("kill:0.1/iter")
    back = schedule("exit:0.1/iter", "kill:0.1/iter")
    forward = [there.specs_at(i) for i in range(1, 200)]
    backward = [
        tuple(s for s in back.specs_at(i) if s.kind == "kill") for i in reversed(range(1, 200))
    ]
    assert forward == backward[::-1]
    assert forward != [schedule("kill:0.1/iter", seed=1).specs_at(i) for i in range(1, 200)]
    exits = [[s.slot for s in back.specs_at(i) if s.kind == "exit"] for i in range(1, 200)]
    assert exits != [[s.slot for s in specs] for specs in forward], "two kinds draw apart"


@given(st.integers(), st.integers(1, 10**9), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_rate_adds_faults(seed: int, iteration: int, one: float, other: float) -> None:
    low, high = (
        set(schedule(f"kill:{p!r}/iter", seed=seed).specs_at(iteration))
        for p in sorted((one, other))
    )
    assert low <= high


def test_options_of_a_rate() -> None:
    (fault,) = schedule("stop:1/iter:point=reduce:cont=2").specs_at(3)[:1]
    assert fault == parse("stop@3:slot=0:point=reduce:cont=2")
    assert parse_rate(str(parse_rate("stop:0.25/h:cont=2"))) == parse_rate("stop:0.25/h:cont=2")
    assert not drawn(schedule("kill:0/iter"), 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill:0.1", "must look like KIND:PROBABILITY/UNIT"),
        ("kill:0.1/day", "must look like"),
        ("kill:often/h", "the probability=often must be a number"),
        ("kill:1.5/h", "between 0 and 1"),
        ("kill:nan/h", "between 0 and 1"),
        ("murder:0.1/h", "unknown kind"),
        ("kill:0.1/h:slot=3", "a rate draws slot itself"),
        ("kill:0.1/h:cont=3", "kill at forward takes no cont"),
        ("slow:0.1/h", "slow needs s"),
        ("stop:0.1/h:cont=1:cont=2", "a field is given twice"),
    ],
)
def test_wrong_rates(text: str, message: str) -> None:
    with pytest.raises(FaultSpecError, match=re.escape(message)):
        parse_rate(text)


def test_a_rate_per_hour_needs_the_time_of_an_iteration() -> None:
    plan = plan_from_flags(rates=["kill:0.1/h"])
    with pytest.raises(FaultSpecError, match="needs the seconds of an iteration"):
        plan.check(num_slots=4, num_stages=2, train_iters=10)
    with pytest.raises(FaultSpecError, match="must be positive"):
        schedule("kill:0.1/h", seconds=-1.0)


# Processes that fail


@contextlib.contextmanager
def child(run_dir: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of faults_child.py, killed at the end of the block if it lives."""
    run_dir.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, CHILD, run_dir, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def finished(run_dir: Path, *arguments: object) -> tuple[int, list[str], str]:
    """Run a child to its end: exit code, lines of standard output, standard error."""
    with child(run_dir, *arguments) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out.splitlines(), err


def injected(run_dir: Path) -> list[Event]:
    events = EventLog(RunDirectory(run_dir), 99).read()
    return [event for event in events if event["kind"] == "fault_injected"]


def wait_for_fault(run_dir: Path) -> Event:
    deadline = time.monotonic() + 30
    while not (events := injected(run_dir)):
        assert time.monotonic() < deadline, "no fault struck"
        time.sleep(0.01)
    return events[0]


def beats(run_dir: Path, seconds: float) -> int:
    """How many different stamps the child's second thread leaves within this time."""
    seen = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if text := (run_dir / "beat").read_text():
            seen.add(text)
        time.sleep(0.005)
    return len(seen)


def state(pid: int) -> str:
    """The kernel's letter for the state of a process: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 30
    while state(pid) != "T":
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.005)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("kind", "code"), [("kill", -signal.SIGKILL), ("exit", 1), ("exception", 1)]
)
def test_deaths(kind: str, code: int, tmp_path: Path) -> None:
    spec = f"{kind}@2:slot=3:point=reduce:n=1"
    returncode, lines, err = finished(tmp_path, spec, "--slot", 3)
    assert (returncode, lines) == (code, ["step 1"])
    (event,) = injected(tmp_path)
    assert (event["fault"], event["fault_kind"], event["iteration"]) == (spec, kind, 2)
    assert (event["point"], event["n"], event["slot"], event["stage"]) == ("reduce", 1, 3, 1)
    assert ("InjectedFault: " + spec in err) == (kind == "exception")


def test_stop_stops_every_thread(tmp_path: Path) -> None:
    with child(tmp_path, "stop@2:slot=3", "--slot", 3) as process:
        wait_until_stopped(process.pid)
        assert len(injected(tmp_path)) == 1
        assert beats(tmp_path, 0.5) <= 1
        assert process.poll() is None


def test_stop_with_cont_goes_on_after_that_time(tmp_path: Path) -> None:
    returncode, lines, _ = finished(tmp_path, "stop@2:slot=3:cont=0.7", "--slot", 3)
    assert 0.7 <= time.time() - injected(tmp_path)[0]["time"] < 10
    assert (returncode, lines) == (0, ["step 1", "step 2", "step 3"])


def test_the_helper_of_stop_leaves_with_its_deed_done(tmp_path: Path) -> None:
    with child(tmp_path, "stop@2:slot=3:cont=0.5", "--slot", 3) as process:
        wait_until_stopped(process.pid)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (helper,) = children.read_text().split()
        assert os.getsid(int(helper)) != os.getsid(process.pid), "killed with the process's group"
        assert process.wait(30) == 0
        assert not Path(f"/proc/{helper}").exists()


def test_a_fenced_process_is_not_waited_for(tmp_path: Path) -> None:
    """Killed while stopped: it is gone at once, and its output is at its end."""
    with child(tmp_path, "stop@2:slot=3:cont=20", "--slot", 3) as process:
        wait_until_stopped(process.pid)
        process.kill()
        out, _ = process.communicate(timeout=5)
        assert (process.returncode, out) == (-signal.SIGKILL, "step 1\n")


def test_loop_keeps_the_other_threads_alive(tmp_path: Path) -> None:
    with child(tmp_path, "loop@2:slot=3", "--slot", 3) as process:
        wait_for_fault(tmp_path)
        before = cpu_seconds(process.pid)
        assert beats(tmp_path, 1.0) > 3
        assert cpu_seconds(process.pid) - before > 0.2, "an endless loop takes time"
        assert process.poll() is None


def test_hold_gil_stops_the_other_threads(tmp_path: Path) -> None:
    with child(tmp_path, "hold-gil@2:slot=3", "--slot", 3) as process:
        wait_for_fault(tmp_path)
        time.sleep(0.2)
        assert beats(tmp_path, 1.0) <= 1
        assert state(process.pid) == "S", "it is alive, and not stopped"
        assert process.poll() is None


def test_slow_sleeps_at_each_microbatch_of_its_iterations(tmp_path: Path) -> None:
    with child(tmp_path, "slow@2:slot=3:s=0.3:for=2", "--slot", 3, "--iterations", 4) as process:
        times = []
        assert process.stdout is not None
        for line, iteration in zip(process.stdout, range(1, 5), strict=True):
            assert line == f"step {iteration}\n"
            times.append(time.monotonic())
        assert process.wait(30) == 0
    second, third, fourth = (b - a for a, b in itertools.pairwise(times))
    assert second >= 0.58 and third >= 0.58
    assert fourth < 0.5
    assert len(injected(tmp_path)) == 1


def test_a_stage_is_lost_by_each_process_of_it(tmp_path: Path) -> None:
    spec = "lose-stage@2:stage=1"
    for process, slot, lost in ((0, 0, False), (1, 2, True), (2, 3, True), (3, 3, False)):
        _, lines, _ = finished(tmp_path, spec, "--slot", slot, "--process", process)
        assert ("lost stage 1" in lines) == lost, (process, slot)
    assert [event["slot"] for event in injected(tmp_path)] == [2, 3]


def test_a_pool_process_fails_at_its_next_look(tmp_path: Path) -> None:
    code, lines, _ = finished(tmp_path, "kill@2:process=6:point=pool", "--process", 6)
    assert (code, lines) == (-signal.SIGKILL, ["step 1"])
    assert injected(tmp_path)[0]["slot"] is None


def test_a_pool_process_may_miss_the_iteration_itself(tmp_path: Path) -> None:
    injector = make_injector(tmp_path, plan_from_flags(["exception@3:process=0:point=pool"]))
    injector.reach("pool", 2)
    with pytest.raises(InjectedFault):
        injector.reach("pool", 5)
    injector.reach("pool", 5)


def test_only_the_named_slot_fails(tmp_path: Path) -> None:
    code, lines, _ = finished(tmp_path, "kill@2:slot=3", "--slot", 2)
    assert (code, len(lines)) == (0, 3)
    assert not injected(tmp_path)


def test_the_process_that_takes_over_is_spared(tmp_path: Path) -> None:
    """Process 7 fills the slot of the dead process 3 and replays iteration 2."""
    spec = "kill@2:slot=3"
    assert finished(tmp_path, spec, "--slot", 3, "--process", 3)[0] == -signal.SIGKILL
    code, lines, _ = finished(tmp_path, spec, "--slot", 1, "--slot", 3, "--process", 7)
    assert (code, len(lines)) == (0, 3)
    assert len(injected(tmp_path)) == 1


def test_times_2_strikes_the_replay_too(tmp_path: Path) -> None:
    spec = "kill@2:slot=3:times=2"
    codes = [finished(tmp_path, spec, "--slot", 3, "--process", p)[0] for p in (3, 7, 8)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_drawn_faults_strike(tmp_path: Path) -> None:
    rate = "kill:0.2/iter"
    plan = plan_from_flags(rates=[rate], seed=5).schedule(num_slots=4, num_stages=2)
    first = next(s for i in range(1, 50) for s in plan.specs_at(i) if s.slot == 3)
    code, lines, _ = finished(tmp_path, "--rate", rate, "--slot", 3, "--iterations", 60)
    assert (code, len(lines)) == (-signal.SIGKILL, first.iteration - 1)
    assert injected(tmp_path)[0]["fault"] == str(first)


def make_injector(run_dir: Path, plan: FaultPlan, **actions: Any) -> Injector:
    return Injector(
        plan,
        EventLog(RunDirectory(run_dir), 0),
        slots=lambda: [0],
        stage_of=lambda slot: 0,
        epoch=lambda: 0,
        num_slots=4,
        num_stages=2,
        actions=actions,
    )


def test_unfired_counts_the_faults_of_dead_processes(tmp_path: Path) -> None:
    texts = ["kill@2:slot=3", "kill@3:slot=1", "exit@3:slot=3:times=2", "kill@9:slot=1"]
    plan = plan_from_flags(texts)
    for process in (3, 7):
        finished(tmp_path, *texts, "--slot", 3, "--process", process)
    survivor = make_injector(tmp_path, plan)
    assert list(map(str, survivor.unfired(8))) == ["kill@3:slot=1", "exit@3:slot=3:times=2"]
    assert list(map(str, survivor.unfired(9)))[-1] == "kill@9:slot=1"
    finished(tmp_path, *texts, "--slot", 3, "--process", 8)
    assert list(map(str, survivor.unfired(8))) == ["kill@3:slot=1"]


def test_kinds_that_need_the_runtime_are_refused_without_it(tmp_path: Path) -> None:
    plan = plan_from_flags(["degrade@1:slot=0"], rates=["lose-stage:0.1/iter"])
    with pytest.raises(FaultSpecError, match="cannot carry out degrade, lose-stage"):
        make_injector(tmp_path, plan)
    done: list[FaultSpec] = []
    injector = make_injector(tmp_path, plan, **{"degrade": done.append, "lose-stage": print})
    injector.reach("forward", 1, 0)
    injector.reach("forward", 1, 1)
    assert done == [parse("degrade@1:slot=0")]


def test_every_kind_has_a_deed_or_an_action() -> None:
    assert set(KINDS) - set(DEEDS) == {"lose-stage", "degrade"}
    assert set(DEEDS) <= set(KINDS)


def test_the_documentation_names_all_there_is() -> None:
    text = DOCS.read_text()
    for name in (*KINDS, *POINTS, *FIELDS):
        assert f"`{name}`" in text, name
