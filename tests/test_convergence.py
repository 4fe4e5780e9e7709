"""The convergence studies: what a job is, and how jobs run."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from convergence_results import KNOWN, result_of
from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import convergence
from studies import ablation, mecefo, strategies, swap_share
from studies.cells import Cell, Setup
from studies.failures import Start
from studies.options import Options
from studies.results import BrokenRun, Result
from studies.runner import BusyError, Runner, command_of, shown

from megatron_ft.faults.spec import parse

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
        {cell.key for cell in study.grid(options).values()} for study in (swap_share, strategies)
    ]
    assert len(set.intersection(*keys)) == len(options.seeds)
    # The ablation's model begins with other weights, unless it is told not to.
    assert not keys[0] & {cell.key for cell in ablation.grid(options).values()}
    alike = Options(flags_known=KNOWN, lr=2e-3, init_std=0.02)
    assert ablation.grid(alike)["copy", 0].setup.flags(0, "x")[-2:] == (
        "--init-method-std",
        "0.02",
    )


def test_losses_can_begin_late_and_the_rate_be_another() -> None:
    usual, late = (
        ablation.grid(Options(failures_from=first, lr=lr)) for first, lr in ((1, None), (150, 1e-3))
    )
    assert set(late["copy", 0].faults) < set(usual["copy", 0].faults)
    assert all(parse(fault).iteration >= 150 for fault in late["copy", 0].faults)
    assert (usual["copy", 0].setup.lr, late["copy", 0].setup.lr) == (5e-4, 1e-3)
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


def test_two_studies_do_not_empty_each_others_directories(tmp_path: Path) -> None:
    one, other = (Runner(tmp_path, 1000, 10, print) for _ in range(2))
    with one._alone(), pytest.raises(BusyError, match="another study"):
        other.run([])
    assert other.run([]) == ({}, [])


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
        flags=("--ft-recover", *swap_share.flags_of("1/4"), "--ft-respawn", "--ft-spares", "1"),
        faults=("kill@10:slot=0", "kill@12:slot=2"),
        may_miss=True,
    ),
}


def test_spares_are_started_with_a_job() -> None:
    assert [LAUNCHED[name].processes for name in ("none", "adaptive", "all together")] == [4, 4, 5]


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


def test_each_variant_of_mecefo_trains_another_way() -> None:
    """A budget that gives no layer back, say, would show in the table as one that is of no use."""
    from megatron_ft.arguments import early
    from megatron_ft.mecefo.budget import LayerShape, layer_activations, layer_cost
    from megatron_ft.mecefo.choices import Choices

    setup = mecefo.job(Options())

    def trained(flags: Sequence[str]) -> tuple[Any, ...]:
        options = early(["--ft-recover", "--ft-mecefo", *flags]).mecefo
        shape = LayerShape(
            hidden=setup.hidden,
            ffn=setup.ffn,
            gated=True,
            num_heads=setup.heads,
            num_query_groups=setup.heads,
            head_width=setup.hidden // setup.heads,
            sequence=setup.sequence,
        )
        half = setup.num_layers // 2
        choices = Choices(
            options,
            [range(1, half + 1), range(half + 1, setup.num_layers + 1)],
            layer_cost(shape, options),
            layer_activations(shape, options),
            microbatches=setup.microbatches,
        )
        return choices.of((0, 1)).exact, options.skip_attention, options.low_rank

    ways = [trained(()), *(trained(flags) for flags in mecefo.VARIANTS.values())]
    assert len(set(ways)) == len(ways), ways
