"""Where Megatron's loop is watched: what is built, what a step cost, what an evaluation gave."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from .registry import Patch

_TRAINING = "megatron.training.training"


def _session() -> Any:
    from megatron_ft.session import current

    return current()


def _setup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        session = _session()
        session.build_again = functools.partial(original, *args, **kwargs)
        session.built(model, optimizer, scheduler)
        return model, optimizer, scheduler

    return setup_model_and_optimizer


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        session = _session()
        try:
            return session.run_train(lambda: original(*args, **kwargs))
        finally:
            session.train_ended()

    return train


def _train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        session = _session()
        if session.resumes:
            from megatron_ft import reentry

            return reentry.step_is_done(session)
        started = time.monotonic()
        with session.step_begins():
            result = original(*args, **kwargs)
        session.step.seconds = time.monotonic() - started
        return result

    return train_step


def _training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def training_log(
        loss_dict: Any,
        total_loss_dict: Any,
        learning_rate: Any,
        iteration: int,
        loss_scale: Any,
        report_memory_flag: Any,
        skipped_iter: Any,
        grad_norm: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        session = _session()
        if session.resumes:
            session.resumes = False
            return report_memory_flag
        session.step_committed(iteration, loss_dict, learning_rate, grad_norm)
        if session.resilient:
            # Megatron logs the first iteration of each train() together with all ranks. Who came
            # later has its first when others do not, and all must do the same.
            kwargs["is_first_iteration"] = False
        return original(
            loss_dict,
            total_loss_dict,
            learning_rate,
            iteration,
            loss_scale,
            report_memory_flag,
            skipped_iter,
            grad_norm,
            *args,
            **kwargs,
        )

    return training_log


def _evaluate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        session = _session()
        started = time.monotonic()
        with session.evaluation_begins():
            result = original(*args, **kwargs)
        session.evaluated(result[0], args[1], time.monotonic() - started)
        return result

    return evaluate


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        return _session().save(original, iteration, args, kwargs)

    return save_checkpoint


def _wandb(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_wandb_writer(args: Any) -> None:
        from megatron.training import global_vars

        global_vars._GLOBAL_WANDB_WRITER = _session().wandb_writer(args)

    return set_wandb_writer


def _wrap(name: str, make: Callable[[Any], Any], reason: str, *requires: str) -> Patch:
    return Patch(
        name=f"observe.{name}",
        target=f"{_TRAINING}:{name}",
        reason=reason,
        kind="wrap",
        make=make,
        requires=requires,
    )


PATCHES: tuple[Patch, ...] = (
    _wrap(
        "setup_model_and_optimizer",
        _setup,
        "the model and the optimizer are local to pretrain()",
        "model_provider_func",
    ),
    _wrap("train", _train, "training begins and ends here", "forward_step_func"),
    _wrap(
        "train_step",
        _train_step,
        "a step has no callback",
        "forward_step_func",
        "data_iterator",
        "iteration",
    ),
    _wrap(
        "training_log",
        _training_log,
        "loss and gradient norm reach no callback in full precision",
        "loss_dict",
        "total_loss_dict",
        "learning_rate",
        "iteration",
        "loss_scale",
        "report_memory_flag",
        "skipped_iter",
        "grad_norm",
    ),
    _wrap("evaluate", _evaluate, "the validation loss is printed only", "data_iterator"),
    _wrap("save_checkpoint", _save, "a finished checkpoint is printed only", "iteration"),
    Patch(
        name="observe.wandb",
        target="megatron.training.global_vars:_set_wandb_writer",
        reason="Megatron opens a run of its own without id on the last rank",
        kind="replace",
        make=_wandb,
        requires=("args",),
    ),
)
