"""The convergence studies: what is lost when, what a job is, what is computed of the results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT / "tools"))

import convergence
from studies import (
    ablation,
    failures,
    iteration_time,
    mecefo,
    plots,
    statistics,
    strategies,
    swap_share,
    timing,
)
from studies.cells import Cell, Setup
from studies.failures import Loss, Outage, Start
from studies.options import Options
from studies.report import Origin, write
from studies.results import BrokenRun, Result, from_events, load
from studies.runner import Runner, command_of, shown

from megatron_ft.arguments import add_ft_flags
from megatron_ft.faults.plan import plan_of
from megatron_ft.faults.spec import parse

KNOWN = (*convergence.flags_known(), "--ft-mecefo")

# -- failures --------------------------------------------------------------------------------------


def test_the_draws_are_those_of_the_flag() -> None:
    """`--ft-stage-failure-rate-per-hour` would lose the same stages in the same iterations."""
    parser = argparse.ArgumentParser()
    add_ft_flags(parser)
    words = "--ft-stage-failure-rate-per-hour 0.16 --ft-iteration-seconds 91.3 --ft-fault-seed 7"
    schedule = plan_of(parser.parse_args(words.split())).schedule(num_slots=4, num_stages=4)
    expected = [(i, spec.stage) for i in range(1, 401) for spec in schedule.specs_at(i)]
    drawn = failures.draw(0.16, seed=7, iterations=400, num_stages=4)
    assert [(loss.iteration, loss.stage) for loss in drawn] == expected and expected
    assert drawn != failures.draw(0.16, seed=8, iterations=400, num_stages=4)


def test_more_per_hour_adds_losses_and_their_number_is_as_expected() -> None:
    few, many = (
        failures.draw(rate, seed=3, iterations=8_000, num_stages=4) for rate in (0.05, 0.16)
    )
    assert set(few) < set(many)
    expected = failures.expected(0.16, iterations=8_000, stages=4)
    # p = 1 - 0.84^(91.3/3600) = 0.00441.
    assert expected == pytest.approx(32_000 * 0.004412, rel=1e-3)
    assert abs(len(many) - expected) < 4 * math.sqrt(expected)


def test_what_checkfree_plus_cannot_lose_is_left_out() -> None:
    losses = [Loss(3, 0), Loss(3, 1), Loss(4, 1), Loss(5, 2), Loss(5, 3), Loss(6, 0), Loss(6, 3)]
    kept, left_out = failures.survivable(losses, 4)
    assert left_out == (Loss(3, 1), Loss(5, 3))
    assert sorted((*kept, *left_out)) == losses


def test_replicas_die_once_and_one_is_spared() -> None:
    losses = [Loss(2, 1), Loss(5, 1), Loss(6, 0), Loss(7, 3), Loss(8, 2)]
    assert failures.shrinking(losses, 4) == (Loss(2, 1), Loss(6, 0), Loss(7, 3))


def test_a_run_with_checkpoints() -> None:
    """Ten iterations, a checkpoint every four; the 6th, 9th and 11th attempt fail."""
    losses = [Loss(6, 1), Loss(9, 0), Loss(9, 2), Loss(11, 3)]
    plan = failures.starts(losses, drawn=100, iterations=10, save_interval=4)
    # Attempts 1-6 do 1-5 and die in 6; 7-9 do 5, 6 and die in 7; 10-11 do 5 and die in 6.
    assert plan == (Start(0, 6, 1), Start(4, 7, 0), Start(4, 6, 3), Start(4, None))
    assert [start.steps(10) for start in plan] == [5, 2, 1, 6]
    assert [failures.attempts_until(plan, i) for i in (1, 5, 6, 7, 10)] == [1, 5, 8, 14, 17]
    with pytest.raises(ValueError, match="drawn"):
        failures.starts(losses, drawn=16, iterations=10, save_interval=4)


@settings(deadline=None)
@given(
    st.sets(st.integers(1, 400), max_size=30),
    st.integers(1, 60),
    st.integers(1, 20),
)
def test_checkpoints_play_out_as_step_by_step(
    attempts: set[int], iterations: int, save_interval: int
) -> None:
    losses = [Loss(attempt, 0) for attempt in sorted(attempts)]
    plan = failures.starts(losses, drawn=10_000, iterations=iterations, save_interval=save_interval)
    at = attempt = 0
    first: dict[int, int] = {}
    while at < iterations:
        attempt += 1
        if attempt in attempts:
            at = at // save_interval * save_interval
        else:
            at += 1
            first.setdefault(at, attempt)
    assert {i: failures.attempts_until(plan, i) for i in first} == first
    assert len(plan) == 1 + sum(a <= attempt for a in attempts)


@settings(deadline=None)
@given(st.integers(0, 50), st.sampled_from(failures.SCENARIOS))
def test_outages_leave_a_neighbour_and_an_exact_replica(
    seed: int, scenario: failures.Scenario
) -> None:
    pipeline, data, iterations = 2, 4, 300
    found = failures.outages(
        scenario,
        seed=seed,
        iterations=iterations,
        pipeline=pipeline,
        data=data,
        iterations_per_hour=10,
        cluster_nodes=8,
    )
    for iteration in range(1, iterations + 1):
        out = [o.slot for o in found if o.iteration <= iteration < o.iteration + o.duration]
        assert len(out) == len(set(out)) and len({slot % data for slot in out}) < data
        assert all(slot + data not in out for slot in out), "both stages of a replica"
    for outage, fault in zip(found, failures.degrades(found), strict=True):
        spec = parse(fault)
        assert (spec.iteration, spec.slot, spec.duration) == dataclasses.astuple(outage)
        assert outage.iteration + outage.duration <= iterations + 1


def test_scenarios_come_as_often_as_they_say() -> None:
    count = {
        scenario.name: sum(
            len(
                failures.outages(
                    scenario,
                    seed=seed,
                    iterations=4000,
                    pipeline=2,
                    data=4,
                    iterations_per_hour=10,
                    cluster_nodes=32,
                )
            )
            for seed in range(5)
        )
        for scenario in failures.SCENARIOS
    }
    # 2,000 hours, a quarter of the cluster's nodes; some find nobody to strike.
    assert count["low"] == pytest.approx(250, rel=0.2)
    assert count["low"] < count["mid"] < count["high"] <= 1100


def test_outages_of_slots_that_are_out_are_left_out() -> None:
    losses = [Loss(1, 0), Loss(2, 2), Loss(3, 1), Loss(6, 2)]
    found = failures.outages_of(losses, 4, iterations=8, pipeline=2, data=2)
    # Slot 2 is the neighbour of slot 0; slot 1 belongs to the only other replica.
    assert found == (Outage(1, 0, 4), Outage(6, 2, 3))
    assert failures.degraded_share(found, iterations=8, slots=4) == 7 / 32


# -- cells -----------------------------------------------------------------------------------------


def test_a_cell_is_what_decides_its_result() -> None:
    cell = Cell(name="a", setup=Setup(), seed=0)
    assert cell.key == dataclasses.replace(cell, name="b").key
    for changed in (
        {"seed": 1},
        {"flags": ("--ft-checkfree",)},
        {"faults": ("lose-stage@3:stage=1",)},
        {"rebuild": "copy"},
        {"repetition": 1},
        {"setup": Setup(lr=1e-3)},
        {"starts": (Start(0, None),)},
    ):
        assert dataclasses.replace(cell, **changed).key != cell.key  # type: ignore[arg-type]


@pytest.mark.parametrize("study", convergence.STUDIES.values(), ids=list(convergence.STUDIES))
def test_the_cells_of_a_study(study: Any) -> None:
    grid = study.grid(Options(flags_known=KNOWN))
    again = study.grid(Options(flags_known=KNOWN))
    assert {at: cell.key for at, cell in grid.items()} == {at: c.key for at, c in again.items()}
    names: dict[str, str] = {}
    for cell in grid.values():
        assert names.setdefault(cell.name, cell.key) == cell.key, "two jobs of one name"
        for fault in cell.faults:
            assert parse(fault).iteration <= cell.setup.iterations
        setup = cell.setup
        assert setup.num_layers % setup.pipeline == 0
        assert setup.samples == setup.microbatches * setup.micro_batch * setup.data
        assert setup.eval_interval == 1000 or setup.iterations % setup.eval_interval == 0


def test_studies_share_the_runs_without_failures() -> None:
    options = Options(flags_known=KNOWN)
    keys = [
        {cell.key for cell in study.grid(options).values()}
        for study in (ablation, swap_share, strategies)
    ]
    assert len(set.intersection(*keys)) == len(options.seeds)


def test_losses_can_begin_late_and_the_rate_be_another() -> None:
    usual, late = (
        ablation.grid(Options(failures_from=first, lr=lr)) for first, lr in ((1, None), (150, 1e-3))
    )
    assert set(late["copy", 0].faults) < set(usual["copy", 0].faults)
    assert all(parse(fault).iteration >= 150 for fault in late["copy", 0].faults)
    assert (usual["copy", 0].setup.lr, late["copy", 0].setup.lr) == (2e-3, 1e-3)
    assert mecefo.grid(Options(lr=1e-3))["low", 0].setup.min_lr == pytest.approx(1e-4)


def test_all_methods_meet_the_same_losses() -> None:
    grid = ablation.grid(Options())
    faults = {method: grid[method, 1].faults for method in ablation.METHODS}
    assert len(set(faults.values())) == 1 and len(faults["average"]) >= 4
    assert {parse(fault).stage for fault in faults["average"]} <= {1, 2}
    assert grid["copy", 1].environment == {"CONVERGENCE_REBUILD": "copy"}
    assert grid["average", 1].entry == "pretrain_llama_ft.py" and not grid["average", 1].environment


def test_cells_without_their_flag_are_skipped() -> None:
    cells = list(mecefo.grid(Options(seeds=[0])).values())
    reasons = convergence.skip(cells, {"--ft-recover"})
    assert len(reasons) == len(cells) - 1
    assert "mecefo: no failure, seed 0" not in reasons
    assert "there is no --ft-mecefo yet" in reasons["mecefo: low, seed 0"]
    assert not convergence.skip(cells, KNOWN + tuple(f for c in cells for f in c.needs))


def test_commands_parse(tmp_path: Path) -> None:
    """Every job's flags are Megatron's and ours, and its starts follow from each other."""
    from megatron_flags import parse as parse_flags

    options = Options(seeds=[0], flags_known=convergence.flags_known())
    seen = set()
    for study in convergence.STUDIES.values():
        cells = list(study.grid(options).values())
        skipped = convergence.skip(cells, options.flags_known)
        for cell in cells:
            shape = (cell.setup, cell.flags)
            if cell.name in skipped or shape in seen:
                continue
            seen.add(shape)
            command = command_of(cell, "data/x", tmp_path)
            parse_flags(command[command.index(cell.entry) + 1 :])
    checkpoint = strategies.grid(options)["checkpoint and restart, 16 %", 0]
    assert len(checkpoint.starts) > 3
    first, second = (command_of(checkpoint, "data/x", tmp_path, n) for n in (0, 1))
    assert "--load" not in first
    assert ("--load" in second) == (checkpoint.starts[1].loaded > 0)
    assert f"kill@{checkpoint.starts[0].dies_at}:slot={checkpoint.starts[0].stage}" in first
    assert shown(checkpoint, first).startswith("python -m megatron_ft.launcher -n 4 ")


# -- statistics ------------------------------------------------------------------------------------


def test_orders() -> None:
    values = {"a": {0: 1.0, 1: 3.0}, "b": {0: 2.0, 1: 2.0}, "c": {0: 4.0, 1: 4.0}}
    check = statistics.check_order(values, ["a", "b", "c"])
    assert not check.holds and check.seeds == {0: True, 1: False}, "equal means are no order"
    values["b"][1] = 2.5
    check = statistics.check_order(values, ["a", "b", "c"])
    assert check.holds and check.found == ("a", "b", "c") and " reproduced" in check.text()
    check = statistics.check_order(values, ["c", "a", "b"])
    assert not check.holds and "NOT reproduced" in check.text()
    with pytest.raises(ValueError, match="no values of d"):
        statistics.check_order(values, ["a", "d"])


def test_means() -> None:
    assert statistics.spread([2.0, 4.0]) == statistics.Spread(3.0, math.sqrt(2), 2)
    assert statistics.spread([2.0]).text() == "2.000"
    assert statistics.spread([2.0, 4.0]).text(1) == "3.0 ± 1.4"
    with pytest.raises(ValueError):
        statistics.spread([])
    assert statistics.increases({0: 11.0, 1: 8.0, 2: 9.0}, {1: 10.0, 0: 10.0}) == pytest.approx(
        [0.1, -0.2]
    )


def test_when_a_curve_reaches_a_target() -> None:
    curve = [(10.0, 5.0), (20.0, 3.0), (30.0, 3.5), (40.0, 1.0)]
    assert statistics.first_below(curve, 4.0) == 15
    assert statistics.first_below(curve, 3.0) == 20
    assert statistics.first_below(curve, 6.0) == 10
    assert statistics.first_below(curve, 0.5) is None
    assert statistics.value_at(curve, 15) == 4.0 and statistics.value_at(curve, 10) == 5.0
    with pytest.raises(ValueError):
        statistics.value_at(curve, 41)


def test_how_much_higher_a_curve_is() -> None:
    base = [(10.0, 3.0), (20.0, 2.0), (30.0, 1.0)]
    curve = [(10.0, 9.0), (20.0, 2.5), (30.0, 2.0)]
    assert statistics.mean_excess(curve, base, 10) == 0.75
    assert statistics.mean_excess(curve, base) == 2.5
    with pytest.raises(ValueError, match="after 30"):
        statistics.mean_excess(curve, base, 30)


def test_time_goes_by() -> None:
    assert statistics.elapsed([1.0, 2.0, 4.0], 2.5) == 5.0
    assert statistics.elapsed([1.0, 2.0, 4.0], 3) == 7.0
    with pytest.raises(ValueError):
        statistics.elapsed([1.0], 1.5)


# -- timing ----------------------------------------------------------------------------------------


def test_costs_of_the_simulator() -> None:
    """The table of docs/schedule.md: 27, 29 with two stages; 57, 59 with four."""
    assert timing.swap_cost(2, 8, Fraction(1, 2)) == pytest.approx(29 / 27)
    assert timing.swap_cost(4, 16, Fraction(1, 2)) == pytest.approx(59 / 57)
    assert timing.swap_cost(4, 16, Fraction(0)) == 1
    # One of 32 microbatches: in most steps nothing is swapped.
    assert 1 < timing.swap_cost(2, 8, Fraction(1, 32)) < timing.swap_cost(2, 8, Fraction(1, 8))
    assert timing.bubble(4, 16, Fraction(0)) == pytest.approx(3 / 19)
    assert 1 < timing.adoption_cost(4, 16, 0, 1.29) < 1.3
    assert timing.adoption_cost(4, 16, 0, 2.0) > 1.5


def test_costs_by_counting() -> None:
    assert timing.redundant_cost(0.15, 0.05) == pytest.approx(4 / 3)
    with pytest.raises(ValueError):
        timing.redundant_cost(0, 1)
    assert timing.quota_cost(3, 2) == 1.5
    assert timing.of_degraded(6, [(2, 2, 1.2), (3, 2, 1.1), (6, 9, 1.3)]) == [
        *(1, 1.2, 1.2, 1.1, 1, 1.3)
    ]


# -- results ---------------------------------------------------------------------------------------


def events(cell: Cell, final: float = 1.0) -> list[dict[str, Any]]:
    """What a job leaves that learns towards `final`."""
    last = cell.setup.iterations
    made: list[dict[str, Any]] = [
        {"kind": "run_started", "iteration": 0, "versions": {"torch": "2"}}
    ]
    for i in range(1, last + 1):
        loss = final + 4 * math.exp(-5 * i / last)
        step = {"kind": "step", "iteration": i, "lm_loss": loss, "seconds": 0.1}
        made.append(step | {"quotas": [cell.setup.microbatches], "live_replicas": 1})
        if i % cell.setup.eval_interval == 0:
            evaluation = {"kind": "eval", "iteration": i, "lm_loss": loss, "seconds": 0.2}
            made.append(evaluation)
    made.append({"kind": "eval", "iteration": last, "lm_loss": final + 0.1, "seconds": 0.2})
    made.append({"kind": "eval", "iteration": last, "lm_loss": 9.0, "split": "test"})
    made += [
        {"kind": "fault_injected", "iteration": parse(f).iteration, "fault": f} for f in cell.faults
    ]
    return made


def result_of(cell: Cell, final: float = 1.0) -> Result:
    return from_events(
        events(cell, final),
        cell=cell.describe(),
        command="python job",
        wall_s=60.0,
        machine={"cores": 2, "cpu": "CPU", "memory_gib": 8},
    )


def test_reading_a_run(tmp_path: Path) -> None:
    cell = Cell(name="c", setup=Setup(iterations=50), seed=0, faults=("lose-stage@3:stage=1",))
    result = result_of(cell)
    end = 1 + 4 * math.exp(-5)
    assert result.final_loss == pytest.approx((end + 1.1) / 2), "both at the end, no test split"
    assert [at for at, _ in result.validation] == [25, 50] and len(result.losses) == 50
    assert result.faults_fired == 1 and result.faults_unfired == []
    assert result.forward_only_s(8) == pytest.approx(0.025)
    assert load(tmp_path) is None
    result.save(tmp_path)
    kept = load(tmp_path)
    assert kept is not None and kept.validation == result.validation
    assert kept.perplexity == result.perplexity


def test_a_run_that_is_not_whole_is_refused() -> None:
    cell = Cell(name="c", setup=Setup(iterations=50), seed=0)
    whole = events(cell)
    of_run: dict[str, Any] = {"cell": cell.describe(), "command": "", "wall_s": 1, "machine": {}}
    from_events(whole, **of_run)
    with pytest.raises(BrokenRun, match="49 of 50"):
        from_events([e for e in whole if (e["kind"], e["iteration"]) != ("step", 7)], **of_run)
    with pytest.raises(BrokenRun, match="no number"):
        from_events([e | ({"lm_loss": "NaN"} if "lm_loss" in e else {}) for e in whole], **of_run)


def test_the_chosen_share() -> None:
    without, losses = {"0": 5.0, "1/8": 5.1, "1/2": 6.0}, {"0": 6.0, "1/8": 5.5, "1/2": 6.1}
    assert swap_share.choose(without, losses) == "1/8"
    assert swap_share.choose({"1/4": 5.0, "1/8": 5.0}, {"1/4": 5.0, "1/8": 5.0}) == "1/8"
    with pytest.raises(ValueError):
        swap_share.choose({"0": 1.0}, {})


# -- reports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", convergence.STUDIES.values(), ids=list(convergence.STUDIES))
def test_a_report_of_all_cells_and_of_one(study: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = Options(seeds=[0, 1], pairs=2, flags_known=KNOWN)
    grid = study.grid(options)
    cells = {cell.key: cell for cell in grid.values()}
    results = {
        key: result_of(cell, 1 + number / 100) for number, (key, cell) in enumerate(cells.items())
    }
    origin = Origin("python tools/convergence.py x", [0, 1], len(cells), 0, [], [])
    paths = write(study.report(options, results), origin, cells, results, tmp_path)
    assert all(path.stat().st_size for path in paths)
    assert {path.suffix for path in paths} == {".md", ".json", ".png"}
    page, data = paths[0].read_text(), json.loads(paths[1].read_text())
    assert len(data["cells"]) == len(cells) and data["seeds"] == [0, 1]
    assert data["machine"]["cores"] == 2 and data["versions"] == {"torch": "2"}
    assert "```bash\npython tools/convergence.py x\n```" in page and "nan" not in page.lower()
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    # The first cell alone: what is there is shown, and nothing is made up.
    first = dict(list(results.items())[:1])
    left = dataclasses.replace(origin, cells_done=1, cells_left=len(cells) - 1)
    write(study.report(options, first), left, cells, first, tmp_path / "first")
    assert "Not complete" in (tmp_path / "first" / f"{study.NAME}.md").read_text()


def test_findings_follow_from_the_numbers() -> None:
    options = Options(seeds=[0])
    grid = ablation.grid(options)
    finals = {"no failure": 1.0, "average": 1.1, "copy": 1.2, "random": 1.3}
    results = {grid[n, 0].key: result_of(grid[n, 0], f) for n, f in finals.items()}
    assert ": reproduced" in ablation.report(options, results).findings[0]
    results[grid["copy", 0].key] = result_of(grid["copy", 0], 1.05)
    findings = ablation.report(options, results).findings
    assert len(findings) == 2 and all("NOT reproduced" in finding for finding in findings)


def test_hours_to_the_target() -> None:
    """The same losses everywhere: what differs is what an iteration costs."""
    options = Options(seeds=[0], target_loss=1.1)
    results = {cell.key: result_of(cell) for cell in strategies.grid(options).values()}
    hours = strategies.report(options, results).numbers["hours"]
    (plain,) = hours["CheckFree"][2]
    assert hours["redundant computation"][2][0] == pytest.approx(plain * 1.25)  # 0.2 s / 8 / 0.1 s
    assert hours["checkpoint and restart"][2][0] > hours["checkpoint and restart"][0][0] > plain
    assert hours["CheckFree+"][0][0] > plain and hours["ReCoVer adaptive"][0] == [plain]


def test_mean_curves_have_the_common_places() -> None:
    mean = plots.mean_curve([[(1, 2.0), (2, 4.0)], [(2, 6.0), (3, 1.0)]])
    assert mean == [(2, 5.0)]


def test_pairs_of_iteration_times() -> None:
    grid = iteration_time.grid(Options(pairs=2))
    places = list(grid)
    names = [[name for name, pair in places if pair == p] for p in (0, 1)]
    assert names[0][0] == "P=2, 1F1B" and names[1][0] == "P=2, share 1/2", "turn and turn about"
    assert len({cell.key for cell in grid.values()}) == len(grid), "each is really run"


# -- copy and random -------------------------------------------------------------------------------


def test_a_copy_is_the_stage_before(monkeypatch: pytest.MonkeyPatch) -> None:
    import convergence_entry

    from megatron_ft.checkfree import live
    from megatron_ft.checkfree.options import CheckfreeOptions

    monkeypatch.setattr(live, "plan_sources", live.plan_sources)  # it comes back afterwards
    choices: dict[str, Any] = {"options": CheckfreeOptions(enabled=True), "norms": {0: 1.0, 2: 3.0}}
    average = live.plan_sources(1, [0, 2, 3], 4, **choices)
    convergence_entry.copy()
    copied = live.plan_sources(1, [0, 2, 3], 4, **choices)
    assert [s.weight for s in average] == [0.25, 0.75]
    assert [(s.stage, s.weight) for s in copied] == [(0, 1.0), (2, 0.0)]


def test_random_is_as_megatron_draws() -> None:
    import convergence_entry
    import torch

    class Config:
        """What the rule reads of Megatron's."""

        init_method = staticmethod(lambda weight: weight.fill_(2.0))
        output_layer_init_method = staticmethod(lambda weight: weight.fill_(3.0))

    expected = {
        "self_attention.linear_qkv.weight": 2.0,
        "mlp.linear_fc1.weight": 2.0,
        "self_attention.linear_proj.weight": 3.0,
        "mlp.linear_fc2.weight": 3.0,
    }
    for name, value in expected.items():
        weight = torch.zeros(2, 2)
        convergence_entry.initialise(Config, f"decoder.layers.0.{name}", weight)
        assert bool((weight == value).all())
    norm = torch.zeros(2)
    convergence_entry.initialise(Config, "decoder.layers.0.pre_mlp_layernorm.weight", norm)
    assert norm.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="no rule"):
        convergence_entry.initialise(Config, "decoder.layers.0.mlp.linear_fc1.bias", norm)


# -- the runner ------------------------------------------------------------------------------------


def test_what_is_done_is_not_run_again_and_the_budget_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell(name=f"c{seed}", setup=Setup(iterations=50), seed=seed) for seed in range(3)]
    ran: list[str] = []

    def run_cell(self: Runner, cell: Cell) -> Result:
        ran.append(cell.name)
        if cell.name == "c1":
            raise BrokenRun("it broke")
        result = result_of(cell)
        self.directory(cell).mkdir(parents=True)
        result.save(self.directory(cell))
        return result

    monkeypatch.setattr(Runner, "run_cell", run_cell)
    said: list[str] = []
    _, failed = Runner(tmp_path, 1000, 10, said.append).run(cells)
    assert ran == ["c0", "c1", "c2"] and failed == ["c1: it broke"]
    results, _ = Runner(tmp_path, 0, 10, said.append).run(cells)
    assert ran == ["c0", "c1", "c2"] and len(results) == 2
    assert "the budget ends here: 1 of 3 cells are left" in said[-1]


TINY = {"iterations": 40, "eval_interval": 20, "eval_iters": 2}
CHECKFREE = ("--ft-checkfree",)
LAUNCHED = {
    "none": Cell(name="none", setup=Setup(**TINY), seed=0, flags=CHECKFREE),
    "checkpoint": Cell(
        name="checkpoint",
        setup=Setup(**TINY),
        seed=0,
        flags=CHECKFREE,
        starts=(Start(0, 15, 1), Start(10, None)),
        save_interval=10,
    ),
    "copy": Cell(
        name="copy",
        setup=Setup(**TINY),
        seed=0,
        flags=CHECKFREE,
        faults=("lose-stage@20:stage=2",),
        rebuild="copy",
    ),
    "random": Cell(
        name="random",
        setup=Setup(**TINY),
        seed=0,
        flags=CHECKFREE,
        faults=("lose-stage@20:stage=2",),
        rebuild="random",
    ),
    "adaptive": Cell(
        name="adaptive",
        setup=Setup(pipeline=1, data=4, micro_batch=4, **TINY),
        seed=0,
        flags=("--ft-recover", "--ft-recover-policy", "adaptive"),
        faults=("kill@20:slot=2",),
    ),
    "all together": Cell(
        name="all together",
        setup=Setup(pipeline=2, data=2, micro_batch=4, **TINY),
        seed=0,
        flags=("--ft-recover", *swap_share.flags_of("1/4"), "--ft-respawn"),
        faults=("kill@10:slot=0", "kill@12:slot=2"),
        may_miss=True,
    ),
}


@pytest.mark.slow
def test_jobs_of_the_studies(tmp_path: Path) -> None:
    """Each kind of job once, small."""
    results, failed = Runner(tmp_path, math.inf, 150, print).run(list(LAUNCHED.values()))
    assert failed == []
    found = {name: results[cell.key] for name, cell in LAUNCHED.items()}
    for result in found.values():
        assert result.validation[-1][0] == 40 and result.losses[-1][1] < result.losses[0][1] - 1
    none, restarted = found["none"].losses, found["checkpoint"].losses
    assert [loss for _, loss in restarted] == pytest.approx([loss for _, loss in none], rel=1e-6)
    before, after = (dict(found[name].losses) for name in ("none", "random"))
    assert all(after[i] == before[i] for i in range(1, 20)), "nothing differs before the loss"
    assert after[20] > before[20] and found["random"].rebuilt == found["copy"].rebuilt == 1
    assert found["random"].losses != found["copy"].losses
    assert found["adaptive"].faults_fired == 1 and found["adaptive"].live_replicas[-1] == 3
    # With the batch shrunk nobody has more to do.
    assert set(found["adaptive"].max_quotas) == {2}
    assert max(found["all together"].max_quotas) == 8
