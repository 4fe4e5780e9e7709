"""``torch.cuda`` answered by the host, so that stock Megatron runs without a GPU.

Megatron asks ``torch.cuda`` for the current device, streams, events, RNG states and memory
statistics at hundreds of places. Without a GPU there is one device (the host), everything is
synchronous, and the RNG of the device is the RNG of the host. ``torch.cuda.is_available`` stays
False: data loaders and torch itself ask it, and they must get the truth.
"""

from __future__ import annotations

import contextlib
import functools
import resource
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .registry import TORCH, Patch

_TORCH_VERSIONS = ">=2.6"
_REASON = "no GPU: the host answers for the device"


class HostStream:
    """A stream of a synchronous device: everything is done when it is submitted."""

    stream_id = 0
    device_index = 0
    device_type = 1
    cuda_stream = 0
    priority = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event or HostEvent()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *_exc: Any) -> None:
        pass


class HostEvent:
    """An event of a synchronous device."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, _stream: Any = None) -> None:
        pass

    def wait(self, _stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: HostEvent) -> float:
        return 0.0


_THE_STREAM = HostStream()


@contextlib.contextmanager
def _no_context(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _resident_bytes(*_args: Any, **_kwargs: Any) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes(*_args: Any, **_kwargs: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(*_args: Any, **_kwargs: Any) -> dict[str, int]:
    now, peak = _resident_bytes(), _peak_resident_bytes()
    return {
        "allocated_bytes.all.current": now,
        "allocated_bytes.all.peak": peak,
        "active_bytes.all.current": now,
        "active_bytes.all.peak": peak,
        "reserved_bytes.all.current": now,
        "reserved_bytes.all.peak": peak,
        "allocation.all.current": 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _properties(*_args: Any, **_kwargs: Any) -> SimpleNamespace:
    import os

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=total, multi_processor_count=os.cpu_count()
    )


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all.
    torch.default_generator.manual_seed(seed)


def _answer(value: Any) -> Callable[..., Any]:
    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return answer


def _cuda(name: str, replacement: Any, reason: str = _REASON) -> Patch:
    def make(original: Any) -> Any:
        # Each target needs an object of its own: the registry marks what it puts in place.
        if isinstance(replacement, type):
            return type(replacement.__name__, (replacement,), {"__doc__": replacement.__doc__})
        return functools.wraps(original)(lambda *args, **kwargs: replacement(*args, **kwargs))

    module, _, attribute = f"torch.cuda.{name}".rpartition(".")
    return Patch(
        name=f"cpu.cuda.{name}",
        target=f"{module}:{attribute}",
        reason=reason,
        kind="replace",
        make=make,
        package=TORCH,
        versions=_TORCH_VERSIONS,
    )


PATCHES: tuple[Patch, ...] = (
    _cuda("current_device", _answer(0)),
    _cuda("device_count", _answer(1), "Megatron builds its groups only where it counts a device"),
    _cuda("set_device", _nothing),
    _cuda("synchronize", _nothing),
    _cuda("empty_cache", _nothing),
    _cuda("is_current_stream_capturing", _answer(False)),
    _cuda("Stream", HostStream),
    _cuda("Event", HostEvent),
    _cuda("current_stream", _answer(_THE_STREAM)),
    _cuda("default_stream", _answer(_THE_STREAM)),
    _cuda("set_stream", _nothing),
    _cuda("stream", _no_context),
    _cuda("get_rng_state", _get_rng_state),
    _cuda("set_rng_state", _set_rng_state),
    _cuda("random.get_rng_state", _get_rng_state),
    _cuda("random.set_rng_state", _set_rng_state),
    _cuda("manual_seed", _manual_seed),
    _cuda("get_device_properties", _properties),
    _cuda("get_device_capability", _answer((8, 0)), "asked for bf16 support and Blackwell only"),
    _cuda("get_device_name", _answer("cpu")),
    _cuda("memory_allocated", _resident_bytes),
    _cuda("memory_reserved", _resident_bytes),
    _cuda("max_memory_allocated", _peak_resident_bytes),
    _cuda("max_memory_reserved", _peak_resident_bytes),
    _cuda("device_memory_used", _resident_bytes),
    _cuda("reset_peak_memory_stats", _nothing),
    _cuda("memory_stats", _memory_stats),
    _cuda("nvtx.range_push", _nothing),
    _cuda("nvtx.range_pop", _nothing),
)
