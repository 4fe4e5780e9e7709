"""Entering Megatron's training loop again after a step was broken off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ft import reporting

if TYPE_CHECKING:
    from megatron_ft.session import Session


def prepare(session: Session) -> None:
    """Make Megatron's objects ready for train() to be entered once more."""
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
    from megatron.core.utils import get_model_config
    from megatron.training import get_timers

    # It would take the broken step for one that it has still to judge.
    get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET

    finish_committed_step(session)
    config = get_model_config(session.model[0])
    config.no_sync_func = config.grad_sync_func = None
    config.timers = get_timers()
    for timer in get_timers()._timers.values():
        timer.reset()
    if session.transaction.snapshots is not None:
        session.transaction.snapshots.reset_bookkeeping()
        session.transaction.snapshots.drop()
    session.args.iteration = session.committed


def resume(session: Session) -> None:
    """Let Megatron's loop do what comes after the last committed step, if that was broken off.

    Evaluation, checkpoint and exit conditions of a step come after it, and so does this repair
    where nobody has begun another step. All processes know the same of it, from the repair, and
    enter training together. The evaluation is of the same samples as if nothing had happened.
    """
    args, transaction = session.args, session.transaction
    session.resumes = False
    told = [report.facts for report in session.membership.others.values()]
    begun = max((facts["iteration"] for facts in told), default=0)
    if begun > session.committed or not any(facts["stepped"] for facts in told):
        return
    session.resumes = True
    if any(facts.get("written") == session.committed for facts in told):
        session.saved = session.committed  # what broke off the save came after its last word
    args.iteration = session.committed - 1
    args.consumed_train_samples -= args.global_batch_size
    known = session.evaluates_from
    if known is not None and known.iteration == session.committed:
        transaction.eval_starts = dict(known.starts)
        args.consumed_valid_samples = known.consumed
        session.evaluations = known.evaluations


def step_is_done(session: Session) -> tuple[Any, ...]:
    """What Megatron's train_step returns of a step whose results nobody needs again."""
    session.iteration = session.committed
    session.policy.entering = False  # all are in the same place
    return {}, 0, False, False, 0, None, None, 0


def finish_committed_step(session: Session) -> None:
    """Do what Megatron does after the optimizer step, if a death broke it off in between.

    The optimizer step of a committed step is local and was done; counters and schedule follow. The
    state of such a process is sent to others as that of this step, so this comes before a repair.
    Where nothing was broken off, nothing is done.
    """
    transaction, args = session.transaction, session.args
    if (
        transaction is None
        or not session.stepped
        or transaction.iteration != session.committed
        or args.consumed_train_samples != transaction.step_start
    ):
        return
    args.consumed_train_samples += args.global_batch_size
    overflowed = bool(transaction.rehearsed.get("prepare_grads"))
    if not overflowed:
        session.scheduler.step(increment=args.global_batch_size)
    if transaction.last_reports:
        total, count = transaction.last_reports[0]["lm loss"].tolist()
        from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

        norm = transaction.rehearsed.get("get_grad_norm")
        rate = get_canonical_lr_for_logging(session.optimizer.param_groups)
        session.step.seconds = transaction.last.seconds
        reporting.step(
            session, session.committed, total / count, None if norm is None else float(norm), rate
        )
