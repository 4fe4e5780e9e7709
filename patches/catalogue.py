"""The areas of patches, when each is installed, and what is called as it is."""

from __future__ import annotations

from . import (
    adam,
    calls,
    checkfree,
    cpu_device,
    faults,
    mecefo,
    observe,
    recover,
    tokenizers,
    ulfm,
    wheel,
)
from .registry import Patch, Reliance

AREAS: dict[str, tuple[Patch | Reliance, ...]] = {
    "wheel": wheel.PATCHES,
    "tokenizers": tokenizers.PATCHES,
    "cpu": cpu_device.PATCHES,
    "backend": (*ulfm.BACKEND, *ulfm.GROUPS),
    "observe": observe.PATCHES,
    "vacancy": ulfm.VACANCY,
    "recover": recover.PATCHES,
    "mecefo": mecefo.PATCHES,
    "adam": adam.PATCHES,
    "checkfree": checkfree.PATCHES,
    "faults": faults.PATCHES,
    "calls": (
        *calls.RELIANCES,
        *checkfree.RELIANCES,
        *mecefo.RELIANCES,
        *tokenizers.RELIANCES,
    ),
}

WHEN: dict[str, str] = {
    "wheel": "always",
    "tokenizers": "always",
    "cpu": "no GPU present",
    "backend": "--distributed-backend ulfm",
    "observe": "always",
    "vacancy": "a strategy is on",
    "recover": "a strategy is on",
    "mecefo": "--ft-mecefo",
    "adam": "--ft-mecefo, --ft-checkfree or --ft-checkfree-plus",
    "checkfree": "--ft-checkfree or --ft-checkfree-plus",
    "faults": "faults are injected",
    "calls": "never: called as it is",
}


def everything() -> tuple[Patch | Reliance, ...]:
    """Every patch and every reliance."""
    return tuple(item for items in AREAS.values() for item in items)


def all_patches() -> tuple[Patch, ...]:
    return tuple(item for item in everything() if isinstance(item, Patch))
