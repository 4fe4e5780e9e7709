"""Who writes: one process, found by every process alone from the assignment they agreed on."""

from __future__ import annotations

from collections.abc import Mapping


def elected_writer(assignment: Mapping[int, int | None]) -> int:
    """The process that writes events.jsonl, the progress line and the wandb run.

    It is the one that serves the highest live slot. Without failures that is Megatron's last rank,
    where Megatron keeps its own TensorBoard and wandb writers; and since Megatron numbers pipeline
    stages last, the highest live slot lies in the last stage as long as that stage lives anywhere,
    which is where the loss is known.

    Args:
        assignment: slot -> process, None for a vacant slot.

    Raises:
        ValueError: no slot is served.
    """
    live = [slot for slot, process in assignment.items() if process is not None]
    if not live:
        raise ValueError("no slot is served, so nobody can write")
    process = assignment[max(live)]
    assert process is not None
    return process
