"""The wandb run id beside the checkpoints, so that a job in a new run directory goes on with it."""

from __future__ import annotations

import os
from pathlib import Path

FILE = "ft_wandb_id"


def keep(checkpoints: Path, run_id: str) -> None:
    """Leave the id where Megatron keeps its checkpoints; the file is replaced as a whole.

    Args:
        checkpoints: the folder of ``--save``.
    """
    if kept(checkpoints) != run_id:
        temporary = checkpoints / f".{FILE}.{os.getpid()}"
        temporary.write_text(run_id)
        os.replace(temporary, checkpoints / FILE)


def kept(checkpoints: Path | str | None) -> str | None:
    """The id that was left in the folder of ``--load``; None where there is none."""
    if checkpoints is None:
        return None
    try:
        return (Path(checkpoints) / FILE).read_text() or None
    except FileNotFoundError:
        return None
