"""CheckFree: from which stages one is rebuilt, what it becomes, its learning rate, and the twins.

What runs on ranks is in ``workers/checkfree_cases.py``: Megatron's own model, optimizer, training
step and checkpoints, over ulfm. Each rank says what it saw, and is judged here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import MODEL
from hypothesis import given
from hypothesis import strategies as st
from mpi_job import run_ranks

from megatron_ft import adam
from megatron_ft.checkfree import lr_scale
from megatron_ft.checkfree.options import (
    CheckfreeOptions,
    add_flags,
    from_namespace,
    validate,
)
from megatron_ft.checkfree.weights import Source, plan_sources, strengths, twins_of
from megatron_ft.recovery_plan import Rebuild
from megatron_ft.rejoin.moving import give_state
from megatron_ft.topology import Topology
from megatron_ft.validation import FtArgumentError

PLAIN = CheckfreeOptions(enabled=True)
PLUS = CheckfreeOptions(enabled=True, plus=True)

# -- sources and weights ---------------------------------------------------------------------------

NORMS = st.one_of(
    st.none(),
    st.floats(min_value=1e-30, max_value=1e200),
    st.sampled_from([0.0, math.nan, math.inf]),
)


@st.composite
def losses(draw: st.DrawFn, least: int = 2) -> tuple[int, set[int], int]:
    """A lost stage, the surviving ones, and how many there are."""
    stages = draw(st.integers(least, 9))
    lost = draw(st.integers(0, stages - 1))
    others = [s for s in range(stages) if s != lost]
    return lost, draw(st.sets(st.sampled_from(others), min_size=1)), stages


@given(losses(), st.lists(NORMS, min_size=9, max_size=9), st.booleans(), st.data())
def test_sources_are_the_nearest_survivors_and_add_up(
    loss: tuple[int, set[int], int], norms: list[float | None], plus: bool, data: st.DataObject
) -> None:
    lost, surviving, stages = loss
    kind = data.draw(st.sampled_from(["grad-norm", "grad-norm-sq", "uniform"]))
    share = data.draw(st.sampled_from([Fraction(0), Fraction(1, 8), Fraction(1, 2)]))
    chosen = CheckfreeOptions(enabled=True, plus=plus, weight=kind, swap_share=share)
    known = dict(enumerate(norms[:stages]))
    found = plan_sources(lost, surviving, stages, options=chosen, norms=known)
    if found is None:
        below = [s for s in surviving if s < lost]
        above = [s for s in surviving if s > lost]
        gone = plus and any(s not in surviving for s in twins_of(lost, stages))
        assert gone or not below or not above
        return
    assert [s.stage for s in found] == sorted({s.stage for s in found})
    assert all(0 <= s.weight <= 1 for s in found)
    assert sum(s.weight for s in found) == pytest.approx(1)
    for source in found:
        assert source.stage in surviving
        low, high = sorted((source.stage, lost))
        assert not surviving & set(range(low + 1, high))
    if not plus:
        assert len(found) == 2
        assert found[0].stage < lost < found[1].stage


@given(losses(least=3), st.floats(0.01, 100), st.floats(0.01, 100))
def test_weights_are_the_formula(
    loss: tuple[int, set[int], int], first: float, second: float
) -> None:
    lost, _, stages = loss
    if lost in (0, stages - 1):
        return
    known = {lost - 1: first, lost + 1: second}
    for kind, power in (("grad-norm", 1), ("grad-norm-sq", 2), ("uniform", 0)):
        chosen = CheckfreeOptions(enabled=True, weight=kind)  # type: ignore[arg-type]
        found = plan_sources(lost, set(range(stages)) - {lost}, stages, options=chosen, norms=known)
        assert found is not None
        below, above = found
        assert (below.stage, above.stage) == (lost - 1, lost + 1)
        assert below.weight == pytest.approx(first**power / (first**power + second**power))


@pytest.mark.parametrize("norm", [None, 0.0, math.nan, math.inf, -1.0])
def test_without_usable_norms_both_count_the_same(norm: float | None) -> None:
    assert strengths("grad-norm", norm, 3.0) == (1.0, 1.0)
    assert strengths("grad-norm-sq", 3.0, norm) == (1.0, 1.0)
    assert strengths("grad-norm", 1.0, 3.0) == (pytest.approx(1 / 3), 1.0)
    assert plan_sources(1, {0, 2}, 3, options=PLAIN, norms=None) == (
        Source(0, 0.5),
        Source(2, 0.5),
    )


def test_two_adjacent_stages() -> None:
    even = {0: 1.0, 1: None, 2: None, 3: 1.0}
    found = plan_sources(1, {0, 3}, 4, options=PLAIN, norms=even)
    assert found == (Source(0, pytest.approx(2 / 3)), Source(3, pytest.approx(1 / 3)))
    found = plan_sources(2, {0, 3}, 4, options=PLAIN, norms=even)
    assert found == (Source(0, pytest.approx(1 / 3)), Source(3, pytest.approx(2 / 3)))


def test_ends() -> None:
    everyone = set(range(6))

    def of(lost: int, chosen: CheckfreeOptions, gone: Sequence[int] = (), stages: int = 6) -> Any:
        alive = set(range(stages)) - {lost, *gone}
        found = plan_sources(lost, alive, stages, options=chosen, norms=None)
        return found and [(s.stage, round(s.weight, 3)) for s in found]

    assert of(0, PLAIN) is None and of(5, PLAIN) is None
    assert [of(s, PLUS) for s in sorted(everyone)] == [
        [(1, 1.0)],
        [(0, 1.0)],
        [(1, 0.5), (3, 0.5)],
        [(2, 0.5), (4, 0.5)],
        [(5, 1.0)],
        [(4, 1.0)],
    ]
    still = CheckfreeOptions(enabled=True, plus=True, swap_share=Fraction(0))
    assert of(1, still) == [(0, 0.5), (2, 0.5)]
    assert of(0, still) == [(1, 1.0)]
    assert of(0, PLUS, gone=[1]) is None and of(1, PLUS, gone=[0]) is None
    assert of(1, PLUS, stages=3) == [(0, 0.5), (2, 0.5)]
    assert of(1, PLUS, gone=[2], stages=3) is None
    assert of(0, PLUS, stages=2) == [(1, 1.0)]
    with pytest.raises(ValueError, match="not lost"):
        plan_sources(1, {0, 1}, 3, options=PLAIN, norms=None)


# -- flags -----------------------------------------------------------------------------------------


def parsed(*flags: str) -> CheckfreeOptions:
    return from_namespace(add_flags(argparse.ArgumentParser()).parse_args(flags))


def test_flags() -> None:
    assert parsed() == CheckfreeOptions()
    assert parsed("--ft-checkfree-plus") == PLUS
    some = parsed(
        *("--ft-checkfree", "--ft-checkfree-weight", "grad-norm-sq"),
        *("--ft-checkfree-optimizer", "average", "--ft-checkfree-lr-scale", "1.2"),
        *("--ft-checkfree-lr-decay-iters", "50", "--ft-checkfree-swap-share", "0.125"),
    )
    assert some == CheckfreeOptions(
        enabled=True, weight="grad-norm-sq", optimizer="average", lr_scale=1.2,
        lr_decay_iters=50, swap_share=Fraction(1, 8),
    )  # fmt: skip
    assert parsed("--ft-checkfree-swap-share", "1/8").swap_share == Fraction(1, 8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ft-checkfree-lr-scale", "0"), "lr-scale 0.0: more than 0"),
        (("--ft-checkfree-lr-scale", "nan"), "lr-scale nan: more than 0"),
        (("--ft-checkfree-lr-decay-iters", "-1"), "lr-decay-iters -1"),
        (("--ft-checkfree-swap-share", "3/2"), "swap-share 3/2: from 0 to 1"),
    ],
)
def test_bad_values(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(*flags)


def test_bad_share(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--ft-checkfree-swap-share", "1/0")
    assert "'1/0' is no share: write a fraction like 1/8" in capsys.readouterr().err


def megatron(plus: bool = False, **changes: Any) -> Any:
    """The flags of Megatron that are looked at, as they are when nothing is wrong."""
    flags = vars(add_flags(argparse.ArgumentParser()).parse_args([]))
    settings = {
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers": 8,
        "num_experts": None,
        "use_distributed_optimizer": False,
        "optimizer": "adam",
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
    }
    on = {"ft_checkfree": not plus, "ft_checkfree_plus": plus}
    return SimpleNamespace(**{**flags, **settings, **on, **changes})


@pytest.mark.parametrize(
    ("plus", "changes", "message"),
    [
        (False, {"pipeline_model_parallel_size": 2}, "at least 3, or --ft-checkfree-plus"),
        (True, {"pipeline_model_parallel_size": 1}, "at least 2"),
        (False, {"num_layers": 10}, "10 layers on 4 stages"),
        (False, {"decoder_first_pipeline_num_layers": 1}, "must be the same number"),
        (False, {"virtual_pipeline_model_parallel_size": 2}, "interleaved"),
        (False, {"num_experts": 8}, "mixture of experts"),
        (False, {"mtp_num_layers": 1}, "multi-token prediction"),
        (False, {"fp8": "hybrid"}, "fp8"),
        (False, {"use_distributed_optimizer": True}, "--use-distributed-optimizer"),
        (False, {"optimizer": "sgd"}, "--optimizer sgd"),
        (True, {"untie_embeddings_and_output_weights": False}, "--untie-embeddings"),
        (True, {"position_embedding_type": "learned_absolute"}, "--position-embedding-type rope"),
        (True, {"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
        (False, {"ft_checkfree_lr_scale": -1.0}, "--ft-checkfree-lr-scale"),
    ],
)
def test_refused_before_training(plus: bool, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FtArgumentError, match=message):
        validate(megatron(plus, **changes))


def test_what_is_accepted() -> None:
    validate(megatron())
    validate(megatron(pipeline_model_parallel_size=3, num_layers=6))
    validate(megatron(True, pipeline_model_parallel_size=2))
    # Plain CheckFree does not mind what needs no twin, and nothing is checked where it is off.
    validate(megatron(untie_embeddings_and_output_weights=False))
    validate(megatron(ft_checkfree=False, num_experts=8))


# -- learning rate and Adam ------------------------------------------------------------------------


def test_factor_of_the_learning_rate() -> None:
    stays = CheckfreeOptions(enabled=True, lr_scale=1.5)
    assert [lr_scale.scale_at(i, 10, stays) for i in (11, 12, 500)] == [1.5] * 3
    assert lr_scale.scale_at(500, None, stays) == 1.0
    decays = CheckfreeOptions(enabled=True, lr_scale=1.5, lr_decay_iters=4)
    factors = [lr_scale.scale_at(i, 10, decays) for i in range(11, 17)]
    assert factors == pytest.approx([1.5, 1.375, 1.25, 1.125, 1.0, 1.0])


def test_what_is_known_of_rebuilt_stages() -> None:
    args = SimpleNamespace(pipeline_model_parallel_size=4)
    lr_scale.note(args, 2, 10, uncounted=10)
    lr_scale.note(args, 2, 10)  # as every process does, the rebuilt one too
    lr_scale.note(args, 0, 12)
    assert lr_scale.record(args) == {2: (10, 10), 0: (12, 0)}
    lr_scale.note(args, 2, 20)  # again: nothing is left of the first time
    assert lr_scale.record(args) == {2: (20, 0), 0: (12, 0)}
    resumed = SimpleNamespace(pipeline_model_parallel_size=4)
    lr_scale.note(args, 2, 20, uncounted=20)
    lr_scale.remember(resumed, args)
    assert lr_scale.record(resumed) == {2: (20, 0), 0: (12, 0)}
    otherwise = SimpleNamespace(pipeline_model_parallel_size=8)
    lr_scale.remember(otherwise, args)
    assert lr_scale.record(otherwise) == {}, "these layers are on other stages"


@given(st.integers(1, 50), st.integers(0, 2000))
def test_common_step_count_keeps_adams_quotients(steps: int, uncounted: int) -> None:
    group = {"betas": (0.9, 0.95)}
    state = {
        "step": torch.tensor(float(steps)),
        "exp_avg": torch.tensor([0.5, -0.25], dtype=torch.float64),
        "exp_avg_sq": torch.tensor([0.5, 0.125], dtype=torch.float64),
    }
    common = adam.common(group, state, uncounted)
    total = steps + uncounted
    assert float(common["step"]) == total
    for name, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.95)):
        before = state[name] / (1 - beta**steps)
        assert torch.allclose(common[name] / (1 - beta**total), before, rtol=1e-9)


def test_groups_of_a_fused_optimizer_count_on() -> None:
    """Such an optimizer counts its steps in its groups; layers that began anew count their own."""
    layer, rest = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([layer, rest], lr=0.5)
    (group,) = optimizer.param_groups
    group["step"] = 7
    seen = []
    rate = lr_scale.LayerRate([layer], lambda: 2.0, lambda: 6)
    with rate.apart(optimizer):
        for part in optimizer.param_groups:
            seen.append((part["lr"], part["step"], len(part["params"])))
            part["step"] += 1
    assert seen == [(0.5, 7, 1), (1.0, 1, 1)]
    assert optimizer.param_groups == [group]
    assert (group["step"], group["lr"], len(group["params"])) == (8, 0.5, 2)


# -- on ranks --------------------------------------------------------------------------------------

SMALL = (
    *MODEL,
    *("--num-layers", "6", "--global-batch-size", "8", "--train-iters", "50"),
    *("--mock-data", "--rerun-mode", "disabled", "--ft-checkfree-plus"),
)
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = {"decoder.final_layernorm.weight", "output_layer.weight"}


def on_ranks(
    tmp_path: Path, cases: str, *flags: str, pp: int = 3, tp: int = 1
) -> list[dict[str, Any]]:
    """What each rank saw."""
    sizes = ("--pipeline-model-parallel-size", str(pp), "--tensor-model-parallel-size", str(tp))
    done = run_ranks(
        pp * tp, "checkfree_worker.py", tmp_path, cases, "--", *SMALL, *sizes, *flags,
        timeout_s=400,
    )  # fmt: skip
    found = [tmp_path / f"rank-{rank}.json" for rank in range(pp * tp)]
    assert all(path.exists() for path in found), done.output[-6000:]
    return [json.loads(path.read_text()) for path in found]


def assert_pairs(ranks: list[dict[str, str]], pp: int, tp: int) -> None:
    """Originals and twins are the same to the last bit, and are where they belong."""
    for index in range(tp):
        stages = ranks[index::tp]
        for stage, ends in enumerate(stages):
            expected = {EMBEDDING} if stage < 2 else set()
            expected |= HEAD if stage >= pp - 2 else set()
            assert set(ends) == expected, stage
        assert stages[0][EMBEDDING] == stages[1][EMBEDDING]
        assert all(stages[pp - 2][name] == stages[pp - 1][name] for name in HEAD)


def judge_twins(seen: list[dict[str, Any]], pp: int, tp: int) -> None:
    starts = [rank["same_start"] for rank in seen]
    assert all(start["same_names"] and start["equal"] for start in starts)
    twins = [set(start["twins"]) for start in starts]
    assert [set(start["marked"]) for start in starts] == twins
    for stage in range(pp):
        expected = ({EMBEDDING} if stage == 1 else set()) | (HEAD if stage == pp - 2 else set())
        assert all(found == expected for found in twins[stage * tp : (stage + 1) * tp])

    runs = [rank["equal_twins"] for rank in seen]
    assert_pairs([run["ends"] for run in runs], pp, tp)
    assert all(value > 0 for run in runs for value in run["largest"].values())
    for step, norm in enumerate(runs[0]["reported"]):
        sums = [run["sums"][step] for run in runs]
        once = math.sqrt(sum(s["own"] for s in sums))
        twice = math.sqrt(sum(s["with_twins"] for s in sums))
        assert norm == pytest.approx(once, rel=1e-4)
        assert abs(twice - norm) > 0.01 * norm, "counting twins would go unnoticed"
        for s in sums:
            assert s["share"] == pytest.approx(s["layers"], rel=1e-4)

    control = [rank["unequal_without"]["ends"] for rank in seen]
    assert control[0][EMBEDDING] != control[tp][EMBEDDING]


def judge_rebuilt(seen: list[dict[str, Any]], pp: int, tp: int) -> None:
    results = [rank["rebuilt"] for rank in seen]
    for how in ("reset", "average"):
        for lost in range(pp):
            key = f"{how} {lost}"
            for rank in range(lost * tp, (lost + 1) * tp):
                got = results[rank][key]
                assert got["received"] > 0
                assert got["worst"] <= 1e-6, (key, got)
                assert got["masters"] == 0, "weights are their fp32 masters, rounded"
                assert got["moments"] <= 1e-6, (key, got)
                assert got["first_moments"] == 0
                assert got["steps"] == [0.0 if how == "reset" else 3.0]
                assert got["exact_ends"]
                assert (got["committed"], got["scheduler"]) == (3, 3 * 8)
                assert got["record"] == {str(lost): [3, 3 if how == "reset" else 0]}
            assert_pairs([r[key]["ends"] for r in results], pp, tp)
            norms = {tuple(r[key]["norms"]) for r in results}
            assert len(norms) == 1 and all(0 < n < 100 for n in norms.pop())


def judge_scaled(seen: list[dict[str, Any]], tp: int) -> None:
    for rank, result in enumerate(seen):
        one = rank // tp == 1
        for name, (least, middle, most) in result["scaled"]["ratio"].items():
            if one and name.startswith("decoder.layers."):
                assert middle == pytest.approx(1.25, rel=1e-3), name
                assert 1.2 < least <= most < 1.3, name
            else:
                assert least == middle == most == 1.0, name
        before, after = result["scaled"]["lr"]
        assert before == after, "the groups are as Megatron made them"


def judge_saved(seen: list[dict[str, Any]], pp: int, tp: int) -> None:
    for kind in ("torch_dist", "torch"):
        ranks = [rank["saved"][kind] for rank in seen]
        for rank, got in enumerate(ranks):
            assert got["unchanged"], "saving changes nothing"
            assert got["iteration"] == 5
            assert got["weights"] and got["stock_weights"]
            assert got["live_record"] == {"1": [3, 3 if rank // tp == 1 else 0]}
            assert got["record"] == {"1": [3, 0]}
            assert got["hats"] <= 1e-5 and got["stock_hats"] <= 1e-5
            assert got["steps"] == [5]
            expected = ({EMBEDDING} if rank // tp == 1 else set()) | (
                HEAD if rank // tp == pp - 2 else set()
            )
            assert set(got["stock_names"]) == expected
        assert_pairs([got["ends"] for got in ranks], pp, tp)
        assert_pairs([got["ends_later"] for got in ranks], pp, tp)


def test_three_stages(tmp_path: Path) -> None:
    cases = "same_start,equal_twins,unequal_without,scaled,rebuilt,saved"
    seen = on_ranks(tmp_path, cases)
    judge_twins(seen, 3, 1)
    judge_scaled(seen, 1)
    judge_rebuilt(seen, 3, 1)
    judge_saved(seen, 3, 1)


@pytest.mark.slow
def test_two_stages_in_half_precision(tmp_path: Path) -> None:
    """Each stage has an original and a twin; tensor and sequence parallelism; fp32 masters."""
    cases = "same_start,equal_twins,unequal_without,rebuilt,saved"
    seen = on_ranks(tmp_path, cases, "--bf16", "--sequence-parallel", pp=2, tp=2)
    judge_twins(seen, 2, 2)
    judge_rebuilt(seen, 2, 2)
    judge_saved(seen, 2, 2)


@pytest.mark.slow
def test_four_stages(tmp_path: Path) -> None:
    """Twins on two stages, and overlapped reduction."""
    flags = ("--num-layers", "4", "--overlap-grad-reduce", "--ddp-bucket-size", "20000")
    seen = on_ranks(tmp_path, "same_start,equal_twins,unequal_without", *flags, pp=4)
    judge_twins(seen, 4, 1)


def test_a_spare_that_has_built_nothing_takes_part_in_a_rebuild() -> None:
    """It notes nothing of it: what there is to note comes with the state that it gets one day."""
    topology = Topology(tensor=1, pipeline=3, data=1)
    session: Any = SimpleNamespace(
        world=SimpleNamespace(topology=topology, process=4), args=None, committed=0
    )
    give_state(session, [Rebuild(1, 3, (0, 2))])
    session.args = SimpleNamespace()
    give_state(session, [Rebuild(1, 3, (0, 2))])
    assert set(lr_scale.record(session.args)) == {1}, "one that has built remembers the stage"
