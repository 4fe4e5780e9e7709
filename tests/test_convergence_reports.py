"""The convergence studies: how results are read and reported, and the ways to rebuild a stage."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from convergence_results import KNOWN, events, result_of
from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import convergence
from studies import ablation, iteration_time, plots, strategies, swap_share
from studies.cells import Cell, Setup
from studies.options import Options
from studies.report import Origin, write
from studies.results import BrokenRun, from_events, load

# -- results ---------------------------------------------------------------------------------------


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
    for lost in (25, 50):
        with pytest.raises(BrokenRun, match="evaluated after"):
            from_events(
                [e for e in whole if (e["kind"], e["iteration"]) != ("eval", lost)], **of_run
            )
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


def test_a_share_that_is_half_done_is_not_chosen() -> None:
    """A study that stopped in between: one share whole, another only with its losses."""
    options = Options(seeds=[0], flags_known=KNOWN)
    grid = swap_share.grid(options)
    done = [swap_share.name_of("1/8", c) for c in (swap_share.WITHOUT, swap_share.WITH)]
    done.append(swap_share.name_of("1/4", swap_share.WITH))
    results = {grid[name, 0].key: result_of(grid[name, 0]) for name in done}
    assert swap_share.report(options, results).numbers["chosen"] == "1/8"


def test_hours_to_the_target() -> None:
    """The same losses everywhere: what differs is what an iteration costs."""
    options = Options(seeds=[0], target_loss=1.1)
    results = {cell.key: result_of(cell) for cell in strategies.grid(options).values()}
    hours = strategies.report(options, results).numbers["hours"]
    (plain,) = hours["CheckFree"][2]
    assert hours["redundant computation"][2][0] == pytest.approx(plain * 1.25)  # 0.2 s / 8 / 0.1 s
    assert hours["checkpoint and restart"][2][0] > hours["checkpoint and restart"][0][0] > plain
    assert hours["CheckFree+"][0][0] > plain and hours["ReCoVer adaptive"][0] == [plain]


def test_runs_that_never_reach_the_target_do_not_make_a_strategy_fast() -> None:
    options = Options(seeds=[0, 1], target_loss=1.15)
    grid = strategies.grid(options)
    results = {cell.key: result_of(cell) for cell in grid.values()}
    (late,) = [cell for (name, seed), cell in grid.items() if (name, seed) == ("CheckFree, 5 %", 1)]
    made = strategies.report(options, results)
    assert len(made.numbers["hours"]["CheckFree"][0]) == 2
    results[late.key] = result_of(late, 2.0)
    made = strategies.report(options, results)
    assert made.numbers["hours"]["CheckFree"][0] == []
    assert any("there is no order" in f and "CheckFree" in f for f in made.findings)


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
