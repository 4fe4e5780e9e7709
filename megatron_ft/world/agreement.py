"""What is agreed on by words that may come garbled. Pure.

A word that comes garbled to a process (``comms.AGREEING``) tells it nothing, and the others go on
without it. So all agree a second time, on whether the first word came whole to everybody. If that
one comes garbled, the first did not: two would be needed in one decision, which nobody has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("megatron_ft.world")

WHOLE = 0x2A5A5A00
"""What every word has, to know a garbled one by."""
SAID = 0xFF
"""Where it says something."""


def agreement(agree: Callable[[int], int], said: int) -> int:
    """The bits that all have said, the same for all; none if somebody has died unnoticed.

    Args:
        agree: From this process's word to what is in all words; ``WHOLE`` where one has died.
        said: Bits of ``SAID``.
    """
    word = agree(WHOLE | said)
    heard = word & ~SAID == WHOLE
    if not heard:
        logger.warning("what was agreed on came garbled: this process objects")
    second = agree(WHOLE | int(heard))
    if not heard or second == WHOLE:
        return 0
    return word & SAID
