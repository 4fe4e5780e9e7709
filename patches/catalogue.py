"""The areas of patches and when each is installed."""

from __future__ import annotations

from . import cpu_device, faults, observe, recover
from .registry import Patch

AREAS: dict[str, tuple[Patch, ...]] = {
    "cpu": cpu_device.PATCHES,
    "observe": observe.PATCHES,
    "recover": recover.PATCHES,
    "faults": faults.PATCHES,
}

WHEN: dict[str, str] = {
    "cpu": "no GPU present",
    "observe": "always",
    "recover": "a strategy is on",
    "faults": "faults are injected",
}


def all_patches() -> tuple[Patch, ...]:
    return tuple(patch for patches in AREAS.values() for patch in patches)
