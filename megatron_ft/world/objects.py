"""Python objects and vacant slots: the two places where torch's object collectives need telling.

torch sends pickles as byte tensors. A vacant slot's length reads zero, which torch would try to
unpickle; and a broadcast from a vacant slot would take its lengths from a process that has none.
Both wrappers are entries of the patch registry (``patches/ulfm.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_ft.world.group import UlfmProcessGroup


def none_for_vacant(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_tensor_to_object``: an object of no bytes, which no pickle is, is None."""

    @functools.wraps(original)
    def tensor_to_object(tensor: Any, tensor_size: Any, group: Any) -> Any:
        return None if int(tensor_size) == 0 else original(tensor, tensor_size, group)

    return tensor_to_object


def lowest_live_sends(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``broadcast_object_list``: for a vacant source the lowest live slot sends its list."""

    @functools.wraps(original)
    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        target = group if group is not None else dist.group.WORLD
        if isinstance(target, UlfmProcessGroup):
            link = target.link
            if group_src is None:
                group_src = dist.get_group_rank(target, 0 if src is None else src)
            if link.ranks[group_src] is None:
                group_src = link.group_rank(0)
            src = None
        original(object_list, src, group, device, group_src)

    return broadcast_object_list
