"""Where torch and Megatron must be told of vacant slots, and of who speaks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .registry import TORCH, Patch

_C10D = "torch.distributed.distributed_c10d"


def _tensor_to_object(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_ft.world.objects import none_for_vacant

    return none_for_vacant(original)


def _broadcast_object_list(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_ft.world.objects import lowest_live_sends

    return lowest_live_sends(original)


def _create_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # Megatron wants gloo for tensors in host memory, which are ours too.
        return original(ranks, timeout, "ulfm" if backend == "gloo" else backend, *args, **kwargs)

    return create_group


def _signal_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_device(local_rank: int | None = None) -> Any:
        import torch

        if torch.distributed.get_backend() == "ulfm":
            return torch.device("cpu")
        return original(local_rank)

    return get_device


def _param_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_param_groups(*args: Any, **kwargs: Any) -> Any:
        from megatron_ft.session import current
        from megatron_ft.world.compact import compact

        with compact(current().world):
            return original(*args, **kwargs)

    return get_param_groups


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron_ft.session import current
        from megatron_ft.world.compact import compact

        with compact(current().world):
            return original(*args, **kwargs)

    return load_checkpoint


def _is_last_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def is_last_rank() -> bool:
        from megatron_ft.session import current

        return current().observer.log.elected or original()

    return is_last_rank


def _torch(name: str, make: Callable[[Any], Any], reason: str, module: str = _C10D) -> Patch:
    return Patch(
        name=f"ulfm.{module.rpartition('.')[2]}.{name}",
        target=f"{module}:{name}",
        reason=reason,
        kind="wrap",
        make=make,
        package=TORCH,
        versions=">=2.13,<2.14",
    )


# Installed with the backend.
BACKEND: tuple[Patch, ...] = (
    _torch(
        "_tensor_to_object",
        _tensor_to_object,
        "an object of no bytes, from a vacant slot, is None",
    ),
    _torch(
        "broadcast_object_list",
        _broadcast_object_list,
        "for a vacant source the lowest live slot sends",
    ),
    _torch(
        "broadcast_object_list",
        _broadcast_object_list,
        "for a vacant source the lowest live slot sends",
        module="torch.distributed",
    ),
)

# Installed with the backend, once Megatron is imported.
GROUPS: tuple[Patch, ...] = (
    Patch(
        name="ulfm.gloo_groups",
        target="megatron.core.parallel_state:create_group",
        reason="the groups for host memory that Megatron makes of gloo are ours",
        kind="wrap",
        make=_create_group,
        requires=("ranks", "timeout", "backend"),
    ),
    Patch(
        name="ulfm.signal_device",
        target="megatron.training.dist_signal_handler:get_device",
        reason="--exit-signal-handler asks all ranks, and knows the device of nccl and gloo only",
        kind="wrap",
        make=_signal_device,
        requires=("local_rank",),
    ),
)

_LAST = "its messages come from the elected writer when the last slot is vacant"

# Installed where slots can be vacant.
VACANCY: tuple[Patch, ...] = (
    Patch(
        name="ulfm.param_groups",
        target="megatron.core.optimizer:_get_param_groups",
        reason="gathers the keys of all ranks as objects; a vacant slot has none",
        kind="wrap",
        make=_param_groups,
    ),
    Patch(
        name="ulfm.load_checkpoint",
        target="megatron.training.training:load_checkpoint",
        reason="a job that starts degraded reads a checkpoint as a job of its live replicas",
        kind="wrap",
        make=_load,
    ),
    *(
        Patch(
            name=f"ulfm.is_last_rank.{module.rpartition('.')[2]}",
            target=f"{module}:is_last_rank",
            reason=_LAST,
            kind="wrap",
            make=_is_last_rank,
        )
        for module in (
            "megatron.training.utils.common_utils",
            "megatron.training.training",
            "megatron.training.checkpointing",
        )
    ),
)
