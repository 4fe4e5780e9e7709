"""All cases, by name."""

from __future__ import annotations

import warnings

import cases_async
import cases_errors
import cases_groups
import cases_messages
import cases_movement
import cases_reductions
from side import BOTH, ULFM_ONLY

# Megatron calls the older names of these operations; so do the cases.
warnings.simplefilter("ignore", FutureWarning)

__all__ = [
    "BOTH",
    "ULFM_ONLY",
    "cases_async",
    "cases_errors",
    "cases_groups",
    "cases_messages",
    "cases_movement",
    "cases_reductions",
]
