"""What is done when Megatron's training loop is entered again, on a session that never ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft import reentry
from megatron_ft.session import EvaluatesFrom

BATCH = 8


def session(*, stepped: bool = True, iteration: int = 5, begun: int = 5, **told: Any) -> Any:
    """Step 5 is committed, and the others have told where they are."""
    facts = {"iteration": begun, "stepped": stepped, "written": None, **told}
    return SimpleNamespace(
        stepped=stepped,
        committed=iteration,
        resumes=True,
        saved=None,
        evaluates_from=None,
        evaluations=3,
        args=SimpleNamespace(
            consumed_train_samples=iteration * BATCH,
            consumed_valid_samples=48,
            global_batch_size=BATCH,
            iteration=iteration,
        ),
        transaction=SimpleNamespace(
            iteration=iteration,
            step_start=iteration * BATCH,
            rehearsed={},
            last_reports=[],
            eval_starts={"valid": 48},
        ),
        scheduler=SimpleNamespace(
            increments=[], step=lambda increment: scheduled.append(increment)
        ),
        membership=SimpleNamespace(others={0: SimpleNamespace(facts=facts)}),
    )


scheduled: list[int] = []


@pytest.mark.parametrize("stepped", [False, True])
def test_only_a_step_that_was_done_is_finished(stepped: bool) -> None:
    """Before the first one all numbers are zero, and look like those of a step broken off."""
    scheduled.clear()
    it = session(stepped=stepped, iteration=0)
    reentry.finish_committed_step(it)
    assert it.args.consumed_train_samples == (BATCH if stepped else 0)
    assert scheduled == ([BATCH] if stepped else [])


def test_what_comes_after_a_step_is_done_again() -> None:
    it = session()
    it.evaluates_from = EvaluatesFrom(5, {"valid": 24}, 24, 2)
    reentry.resume(it)
    assert it.resumes and (it.args.iteration, it.args.consumed_train_samples) == (4, 4 * BATCH)
    assert it.transaction.eval_starts == {"valid": 24}
    assert (it.args.consumed_valid_samples, it.evaluations, it.saved) == (24, 2, None)


def test_an_evaluation_of_an_earlier_step_stays() -> None:
    it = session()
    it.evaluates_from = EvaluatesFrom(3, {"valid": 24}, 24, 2)
    reentry.resume(it)
    assert it.resumes and it.transaction.eval_starts == {"valid": 48} and it.evaluations == 3


@pytest.mark.parametrize("elsewhere", [{"begun": 6}, {"stepped": False}])
def test_where_others_are_further_or_nobody_has_trained_nothing_is(elsewhere: Any) -> None:
    it = session(**elsewhere)
    reentry.resume(it)
    assert not it.resumes and it.args.iteration == 5


def test_a_checkpoint_that_was_complete_is_not_written_again() -> None:
    it = session(written=5)
    reentry.resume(it)
    assert it.saved == 5
