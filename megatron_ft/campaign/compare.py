"""Two trainings step by step: did both take the same samples, as many, with the same loss?

Each function yields what is wrong, a sentence each, and nothing where all is well.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from megatron_ft.campaign.recorded import Run, relative
from megatron_ft.campaign.spec import End

NORM_FACTOR = 1000
"""Gradient norms may differ by so many times the bound. The norm of one step amplifies what the
order of summation does: up to 4e-4 was seen where losses agreed to 3e-7. One microbatch too few
changes it by some per cent."""
LAST = 5
"""Steps whose mean loss is that of the end."""


def step_problems(run: Run, iterations: int) -> Iterator[str]:
    """Every step from the first to the last is there, each committed once."""
    found = [event["iteration"] for event in run.of_kind("step")]
    wanted = list(range(1, iterations + 1))
    if missing := sorted(set(wanted) - set(found)):
        yield f"{len(missing)} of {iterations} steps are missing: {_few(missing)}"
    if twice := sorted({i for i in found if found.count(i) > 1}):
        yield f"steps committed more than once: {_few(twice)}"
    if more := sorted(set(found) - set(wanted)):
        yield f"steps that were not asked for: {_few(more)}"


def microbatch_problems(run: Run, microbatches: int) -> Iterator[str]:
    """Every step has exactly B microbatches."""
    wrong = {
        i: s["microbatches"] for i, s in run.steps.items() if s["microbatches"] != microbatches
    }
    if wrong:
        first, count = next(iter(wrong.items()))
        yield f"{len(wrong)} steps not of {microbatches} microbatches: step {first} has {count}"


def sample_problems(run: Run, reference: Run) -> Iterator[str]:
    """Every step consumed the samples that the fault-free one did."""
    wrong = [
        i
        for i, step in run.steps.items()
        if i in reference.steps and step["samples_digest"] != reference.steps[i]["samples_digest"]
    ]
    if wrong:
        yield f"{len(wrong)} steps consumed other samples than without faults: {_few(wrong)}"


def loss_problems(run: Run, reference: Run, end: End) -> Iterator[str]:
    """Losses and gradient norms of each step, or the mean loss of the last steps."""
    if not end.each_step:
        if len(run.steps) < LAST:
            yield f"it has {len(run.steps)} steps, and its end is the mean of the last {LAST}"
            return
        got, want = _last_mean(run), _last_mean(reference)
        if not relative(want, got) <= end.bound:
            yield (
                f"the mean loss of the last {LAST} steps is {got:.4f}, without faults {want:.4f}: "
                f"{relative(want, got):.2g} apart, bound {end.bound:g}"
            )
        return
    for iteration, step in run.steps.items():
        other = reference.steps.get(iteration)
        if other is None:
            continue  # `step_problems` says so
        bound = end.bound_at(iteration)
        if not relative(other["lm_loss"], step["lm_loss"]) <= bound:
            yield (
                f"step {iteration}: loss {step['lm_loss']}, without faults {other['lm_loss']}: "
                f"{relative(other['lm_loss'], step['lm_loss']):.2g} apart, bound {bound:g}"
            )
            return
        norm, other_norm = step["grad_norm"], other["grad_norm"]
        if norm is None or other_norm is None:  # the loss scale overflowed
            if norm is not other_norm:
                yield f"step {iteration}: gradient norm {norm}, without faults {other_norm}"
                return
        elif not relative(other_norm, norm) <= NORM_FACTOR * bound:
            yield f"step {iteration}: gradient norm {norm}, without faults {other_norm}"
            return


def validation_problems(run: Run, reference: Run, end: End) -> Iterator[str]:
    """As many evaluations, with the same losses."""
    if len(run.validation) != len(reference.validation):
        yield f"{len(run.validation)} evaluations, without faults {len(reference.validation)}"
        return
    bound = max(end.bound, end.later_bound) if end.each_step else end.bound
    for got, want in zip(run.validation, reference.validation, strict=True):
        if not relative(want, got) <= bound:
            yield (
                f"an evaluation gives {got}, without faults {want}: {relative(want, got):.2g} "
                f"apart, bound {bound:g}"
            )
            return


def largest_difference(run: Run, reference: Run) -> float:
    """Relative, over the losses of the steps that both have."""
    common = run.losses.keys() & reference.losses.keys()
    return max((relative(reference.losses[i], run.losses[i]) for i in common), default=0.0)


def end_difference(run: Run, reference: Run) -> float:
    """Relative, of the mean losses of the last steps."""
    if not run.steps or not reference.steps:
        return 0.0
    return relative(_last_mean(reference), _last_mean(run))


def _last_mean(run: Run) -> float:
    return statistics.fmean(loss for _, loss in sorted(run.losses.items())[-LAST:])


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
