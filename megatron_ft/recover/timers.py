"""Megatron's timers in an attempt of a step that breaks: those that it started go on no more."""

from __future__ import annotations

from typing import Any


def running(timers: Any) -> frozenset[str]:
    """Names of the timers that have been started and not stopped.

    Args:
        timers: Megatron's ``Timers``; None where the schedule runs without.
    """
    if timers is None:
        return frozenset()
    return frozenset(name for name, timer in timers._timers.items() if timer._started)


def break_off(timers: Any, before: frozenset[str]) -> None:
    """Stop, without counting their time, the timers that were started since ``before``.

    The next attempt starts them again, which Megatron takes for a mistake otherwise.
    """
    for name in running(timers) - before:
        timers._timers[name]._started = False
