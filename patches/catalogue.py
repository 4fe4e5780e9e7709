"""The areas of patches and when each is installed."""

from __future__ import annotations

from . import cpu_device
from .registry import Patch

AREAS: dict[str, tuple[Patch, ...]] = {
    "cpu": cpu_device.PATCHES,
}

WHEN: dict[str, str] = {
    "cpu": "no GPU present",
}


def all_patches() -> tuple[Patch, ...]:
    return tuple(patch for patches in AREAS.values() for patch in patches)
