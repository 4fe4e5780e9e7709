"""Placements: which process of a replica runs each stage.

Normally one each. In MeCeFO (arXiv 2510.16415) a process whose neighbour died runs two
neighbouring stages. Processes are named by the stage that is their own.
"""

from __future__ import annotations

from collections.abc import Mapping

Placement = tuple[int, ...]
"""For each stage, the process that runs it: by the number of that process's own stage."""


def normal(num_stages: int) -> Placement:
    """Each stage on its own process."""
    return tuple(range(num_stages))


def adopted(num_stages: int, adopters: Mapping[int, int]) -> Placement:
    """Each stage on its own process, but for those that a neighbour runs.

    Args:
        adopters: For each stage without a process of its own, the stage whose process runs it.

    Raises:
        ValueError: See ``check_placement``.
    """
    placement = tuple(adopters.get(stage, stage) for stage in range(num_stages))
    check_placement(placement)
    return placement


def check_placement(placement: Placement) -> None:
    """Refuse what MeCeFO cannot run.

    Raises:
        ValueError: A process runs a stage that is not next to its own, or more than two stages, or
            not its own one.
    """
    for stage, process in enumerate(placement):
        if not 0 <= process < len(placement) or abs(process - stage) > 1:
            raise ValueError(
                f"stage {stage} cannot run on the process of stage {process}: only on its own or "
                "that of a neighbouring stage"
            )
        if placement[process] != process:
            raise ValueError(
                f"the process of stage {process} is to run stage {stage}, but not its own"
            )
        if len(stages_of(placement, process)) > 2:
            raise ValueError(f"the process of stage {process} is to run more than two stages")


def stages_of(placement: Placement, process: int) -> tuple[int, ...]:
    """The stages that a process runs, ascending."""
    return tuple(stage for stage, host in enumerate(placement) if host == process)


def processes_of(placement: Placement) -> tuple[int, ...]:
    """The processes that run stages, ascending."""
    return tuple(sorted(set(placement)))
