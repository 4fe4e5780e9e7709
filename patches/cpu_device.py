"""The device "cuda" redirected to the host: factories, moves, and Megatron's own checks.

Installed only where there is no GPU. Together with ``cpu_cuda_api`` it is all that stock Megatron
needs to pretrain, evaluate, save and load on a CPU.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from .cpu_cuda_api import PATCHES as CUDA_API
from .cpu_optimizer import PATCHES as OPTIMIZER
from .registry import TORCH, Patch

_TORCH_VERSIONS = ">=2.6"
_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "eye", "linspace"),
    *("rand", "randn", "randint", "randperm", "empty_strided", "tril_indices", "triu_indices"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
    *("rand_like", "randn_like", "randint_like"),
)


def is_cuda(device: Any) -> bool:
    """Whether ``device`` names the accelerator: "cuda", "cuda:0", a torch.device of that type."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        # An int is what torch.cuda.current_device() answers and means "that GPU" to torch.
        if device is not None and (is_cuda(device) or isinstance(device, int)):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return on_host


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and (is_cuda(args[0]) or type(args[0]) is int):
            args = ("cpu", *args[1:])
        device = kwargs.get("device")
        if device is not None and (is_cuda(device) or isinstance(device, int)):
            kwargs["device"] = "cpu"
        return original(self, *args, **kwargs)

    return to_host


def _stay(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stay(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self

    return stay


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str):  # asked for the name; Megatron compares it with torch.cuda.*
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return cuda_type


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize_megatron


def _host_rng_get(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    return get_state


def _host_rng_set(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_state


def _without_host_check(original: Callable[..., Any]) -> Callable[..., Any]:
    """``fork`` warns when the host RNG moved; here the host RNG is the one that is forked."""
    import logging

    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    @functools.wraps(original)
    def fork(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    return fork


def _norm_of_part_of_a_sequence(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = original(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums its gradient over the tensor-parallel peers, which see a part each.
            parameter.sequence_parallel = True
        return norm

    return new_norm


def _torch(target: str, make: Callable[[Any], Any], reason: str) -> Patch:
    return Patch(
        name=f"cpu.{target.replace(':', '.')}",
        target=target,
        reason=reason,
        kind="wrap",
        make=make,
        package=TORCH,
        versions=_TORCH_VERSIONS,
    )


_RANDOM = "megatron.core.tensor_parallel.random"

PATCHES: tuple[Patch, ...] = (
    *CUDA_API,
    *OPTIMIZER,
    *(
        _torch(f"torch:{name}", _factory, "Megatron asks factories for device='cuda'")
        for name in _FACTORIES
    ),
    _torch("torch:Tensor.to", _to, "moves to 'cuda' stay on the host"),
    _torch("torch:Tensor.cuda", _stay, "moves to 'cuda' stay on the host"),
    _torch("torch:Tensor.pin_memory", _stay, "host memory needs no pinning without a GPU"),
    _torch("torch:Tensor.type", _type, "Megatron compares names of types with torch.cuda.*"),
    _torch("torch.nn:Module.to", _to, "moves to 'cuda' stay on the host"),
    _torch("torch.nn:Module.cuda", _stay, "moves to 'cuda' stay on the host"),
    Patch(
        name="cpu.initialize_megatron",
        target="megatron.training.training:initialize_megatron",
        reason="pretrain() has no way to pass allow_no_cuda=True",
        kind="wrap",
        make=_allow_no_cuda,
        requires=("allow_no_cuda",),
    ),
    Patch(
        name="cpu.rng_get",
        target=f"{_RANDOM}:_get_cuda_rng_state",
        reason="the RNG of the device is the RNG of the host",
        kind="replace",
        make=_host_rng_get,
        requires=("device", "clone", "graph_safe"),
    ),
    Patch(
        name="cpu.rng_set",
        target=f"{_RANDOM}:_set_cuda_rng_state",
        reason="the RNG of the device is the RNG of the host",
        kind="replace",
        make=_host_rng_set,
        requires=("new_state", "device", "graph_safe"),
    ),
    Patch(
        name="cpu.rng_fork",
        target=f"{_RANDOM}:CudaRNGStatesTracker.fork",
        reason="silences a warning that the host RNG moved: here it is the forked one",
        kind="wrap",
        make=_without_host_check,
    ),
    Patch(
        name="cpu.sequence_parallel_norm",
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        reason="torch's norm serves --sequence-parallel too; Megatron's own needs Apex or a GPU",
        kind="wrap",
        make=_norm_of_part_of_a_sequence,
        requires=("config",),
    ),
)
