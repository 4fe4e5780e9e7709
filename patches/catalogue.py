"""The areas of patches and when each is installed."""

from __future__ import annotations

from . import cpu_device, faults, observe, recover, ulfm, wheel
from .registry import Patch

AREAS: dict[str, tuple[Patch, ...]] = {
    "wheel": wheel.PATCHES,
    "cpu": cpu_device.PATCHES,
    "backend": ulfm.BACKEND,
    "observe": observe.PATCHES,
    "vacancy": ulfm.VACANCY,
    "recover": recover.PATCHES,
    "faults": faults.PATCHES,
}

WHEN: dict[str, str] = {
    "wheel": "always",
    "cpu": "no GPU present",
    "backend": "--distributed-backend ulfm",
    "observe": "always",
    "vacancy": "a strategy is on",
    "recover": "a strategy is on",
    "faults": "faults are injected",
}


def all_patches() -> tuple[Patch, ...]:
    return tuple(patch for patches in AREAS.values() for patch in patches)
