"""The schedule executor against Megatron's own schedules, and on routes that those do not have.

Each launch is a real job; what it does is in ``workers/executor_worker.py``. Models with an
embedding and a head on each stage, which swapped routes need, are made for these tests there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Run, assert_faults_fired, assert_same_training, launch

WORKER = "tests/workers/executor_worker.py"
Results = list[dict[str, Any]]
"""By rank."""

RECOMPUTE = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "20000")
PER_TOKEN = ("--calculate-per-token-loss",)
BF16 = ("--bf16",)


def run(tmp_path: Path, cases: str, *flags: str, tp: int = 1, pp: int = 1, dp: int = 1) -> Results:
    env = {"EXECUTOR_CASES": cases, "EXECUTOR_OUT": str(tmp_path)}
    done = launch(
        *flags, tp=tp, pp=pp, dp=dp, iters=12, per_replica=8, script=WORKER, env=env,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.output[-6000:]
    assert sorted(done.losses) == list(range(1, 13))
    return [
        json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(tp * pp * dp)
    ]


def assert_stock(results: Results, case: str, counts: set[int]) -> None:
    """To the last bit, on each rank: losses, norms, weights, steps, evaluation."""
    losses = {}
    for result in results:
        assert {int(count) for count in result[case]} == counts
        for count, runs in result[case].items():
            stock, executor = runs["stock"], runs["executor"]
            assert executor == stock
            assert len(stock["norms"]) == 3
            assert stock["peak"] > 0
            if stock["losses"][0]:
                losses[count] = stock["losses"]
                assert len(stock["evaluation"]) == int(count)
    # The comparison can tell: another number of microbatches is another training.
    assert len(losses) == len(counts)
    assert len({json.dumps(values) for values in losses.values()}) == len(counts)


@pytest.mark.slow
def test_two_stages_with_tensor_and_sequence_parallelism(tmp_path: Path) -> None:
    flags = ("--sequence-parallel", *BF16, *RECOMPUTE, *DROPOUT)
    results = run(tmp_path, "stock", *flags, tp=2, pp=2)
    assert_stock(results, "stock", {1, 2, 5})
    assert {tuple(r["stock"]["5"]["stock"]["steps"][:4]) for r in results} == {
        ("F0", "F1", "B", "F2"),
        ("F0", "B", "F1", "B"),
    }


@pytest.mark.slow
def test_two_stages_with_overlapped_reduction(tmp_path: Path) -> None:
    results = run(tmp_path, "stock,unaligned", *OVERLAP, *PER_TOKEN, pp=2, dp=2)
    assert_stock(results, "stock", {1, 2, 5})
    assert_stock(results, "unaligned", {1, 2, 5})


def test_one_stage(tmp_path: Path) -> None:
    assert_stock(run(tmp_path, "stock", *DROPOUT), "stock", {1, 4})


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four stages, for several tests."""
    return run(tmp_path_factory.mktemp("four"), "stock,pipelines,refused", pp=4)


def test_four_stages(four: Results) -> None:
    assert_stock(four, "stock", {1, 3, 4, 7})
    assert [result["stock"]["7"]["stock"]["peak"] for result in four] == [4, 3, 2, 1]
    assert [result["stock"]["3"]["executor"]["peak"] for result in four] == [3, 3, 2, 1]


def cases_of(four: Results) -> list[tuple[str, list[dict[str, Any]]]]:
    names = list(dict.fromkeys(name for result in four for name in result["pipelines"]))
    return [
        (name, [r["pipelines"][name] for r in four if name in r["pipelines"]]) for name in names
    ]


def test_swapped_routes_and_adopted_stages_compute_what_they_should(four: Results) -> None:
    cases = cases_of(four)
    assert len(cases) == (2 + 2 + 3) * 6 + 3 * 2
    for name, ranks in cases:
        reported, swapped = [], 0
        for rank in ranks:
            for reports in (rank["reports"], rank["evaluated"]):
                indices = [index for index, _, _ in reports]
                assert indices == sorted(indices), name
                assert bool(reports) <= bool(rank["ends_here"]), name
                for index, loss, expected in reports:
                    assert loss == expected, (name, index)
            reported += [index for index, _, _ in rank["reports"]]
            swapped += sum(abs(x - rank["straight"][i]) > 1e-3 for i, x, _ in rank["reports"])
            assert rank["worst_gradient"] < 2e-5, name
        assert sorted(reported) == list(range(len(ranks[0]["straight"]))), name
        share = name.split()[-2]
        some = {"0": 0, "1": len(reported)}.get(share, len(reported) // 2)
        # A swapped route gives another loss, so that the comparison can tell.
        assert swapped == some, name


def test_tokens_are_those_of_the_whole_replica(four: Results) -> None:
    for name, ranks in cases_of(four):
        for rank in ranks:
            expected = [rank["expected_tokens"]] if "per token" in name else []
            assert rank["tokens"] == expected, name


def test_a_process_with_two_stages_runs_both(four: Results) -> None:
    by_rank = [result["pipelines"].get("4 middle adopted 0 9") for result in four]
    assert [rank and rank["stages"] for rank in by_rank] == [[0], [1, 2], None, [3]]
    assert len(by_rank[1]["steps"]) == 2 * len(by_rank[0]["steps"]) == 4 * 9


def test_what_cannot_be_run_is_refused(four: Results) -> None:
    for result in four:
        refused = result["refused"]
        assert "begin or end their route at stage" in refused["swapped"]
        assert "adjust the shapes" in refused["shapes"]
        assert "one each is needed" in refused["chunks"]
        assert "a placement of 1 stages in a group of 4" in refused["placement"]
        assert "varying length (variable_seq_lengths)" in refused["lengths"]


@pytest.mark.slow
def test_within_the_step_transaction(tmp_path: Path) -> None:
    """In the place of Megatron's schedule; a replica dies in the middle of it."""

    def job(name: str, *flags: str, **kwargs: Any) -> Run:
        done = launch("--ft-recover", *flags, pp=2, dp=2, run_dir=tmp_path / name, **kwargs)
        assert done.returncode == 0, done.output[-6000:]
        return done

    reference = job("stock")
    env = {"EXECUTOR_CASES": "transaction"}
    whole = job("whole", script=WORKER, env=env)
    assert_same_training(whole, reference, bound=0.0)
    fault = ("--ft-fault", "kill@4:slot=2:point=backward:n=2")
    faulty = job("faulty", *fault, script=WORKER, env=env)
    assert_faults_fired(faulty, 1)
    assert_same_training(faulty, reference)
