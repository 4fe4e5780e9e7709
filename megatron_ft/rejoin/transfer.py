"""The state of a shard goes from a process that holds it to one that is to hold it.

Weights go straight into the receiver's parameters; the optimizer's state, fp32 masters among it,
goes through its own state dict. Tensors travel in chunks with a checksum each.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from megatron_ft.world import staging

CHUNK_BYTES = 32 << 20
META_TAG, CHUNK_TAG, SUM_TAG = 7101, 7102, 7103


class TransferCorrupted(RuntimeError):
    """A chunk arrived with another checksum than it was sent with."""


@dataclass(frozen=True)
class Moved:
    """What a transfer cost."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class _Placeholder:
    """Where a tensor stood in what is sent."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def send(session: Any, comm: MPI.Intracomm, rank: int) -> Moved:
    """Send this process's committed state to ``rank`` of ``comm``."""
    started = time.monotonic()
    tensors: list[torch.Tensor] = []
    meta = _strip(_state(session), tensors)
    comm.send(meta, dest=rank, tag=META_TAG)
    nbytes = send_tensors(comm, rank, [*_weights(session), *tensors], (CHUNK_TAG, SUM_TAG))
    return Moved(nbytes, time.monotonic() - started)


def receive(session: Any, comm: MPI.Intracomm, rank: int) -> Moved:
    """Receive state from ``rank`` of ``comm`` and make it this process's own.

    Raises:
        TransferCorrupted: A checksum does not match.
    """
    started = time.monotonic()
    meta = comm.recv(source=rank, tag=META_TAG)
    places: list[_Placeholder] = []
    _find(meta, places)
    places.sort(key=lambda place: place.index)
    tensors = [torch.empty(place.shape, dtype=place.dtype) for place in places]
    nbytes = receive_tensors(comm, rank, [*_weights(session), *tensors], (CHUNK_TAG, SUM_TAG))
    _load(session, _fill(meta, tensors))
    return Moved(nbytes, time.monotonic() - started)


def state_of(session: Any) -> tuple[Any, list[torch.Tensor]]:
    """A copy of this process's committed state, for ``take``."""
    tensors: list[torch.Tensor] = []
    meta = _strip(_state(session), tensors)
    return meta, [tensor.clone() for tensor in [*_weights(session), *tensors]]


@torch.no_grad()
def take(session: Any, state: tuple[Any, list[torch.Tensor]]) -> None:
    """Make a copy by ``state_of`` this process's own; the copy is used up."""
    meta, tensors = state
    weights = _weights(session)
    for weight, value in zip(weights, tensors, strict=False):
        weight.copy_(value)
    _load(session, _fill(meta, tensors[len(weights) :]))


def _weights(session: Any) -> list[torch.Tensor]:
    """Parameters and buffers of the model, in order, to be written in place."""
    found: list[torch.Tensor] = []
    for chunk in session.model:
        found += [p.data for p in chunk.parameters()]
        # DDP's attribute of the same name holds its gradient buffers.
        found += list(chunk.module.buffers())
    return found


def _state(session: Any) -> dict[str, Any]:
    args, transaction = session.args, session.transaction
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.training import training

    return {
        "optimizer": session.optimizer.state_dict(),
        "scheduler_steps": session.scheduler.num_steps,
        "iteration": session.committed,
        # What there is of them: Megatron sets some only where it has built data.
        "args": {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)},
        "eval_starts": transaction.eval_starts,
        "evaluations": session.evaluations,
        "evaluates_from": session.evaluates_from,
        "saved": session.saved,
        "degraded": None if session.mecefo is None else session.mecefo.said,
        "grad_squares": dict(session.grad_squares),
        "golden": _golden(session),
        # --exit-duration-in-mins counts from it.
        "began": training._TRAIN_START_TIME,
        "rng": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


_COUNTERS = (
    *("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"),
    *("do_train", "do_valid", "do_test", "ft_checkfree_rebuilt"),
)


def _load(session: Any, state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.training import training

    session.optimizer.load_state_dict(state["optimizer"])
    session.scheduler.num_steps = state["scheduler_steps"]
    session.scheduler.step(increment=0)
    session.args.iteration = state["iteration"]
    for name, value in state["args"].items():
        setattr(session.args, name, value)
    session.transaction.eval_starts = dict(state["eval_starts"])
    session.evaluations = state["evaluations"]
    session.evaluates_from, session.saved = state["evaluates_from"], state["saved"]
    session.committed = state["iteration"]
    session.grad_squares = dict(state["grad_squares"])
    if session.mecefo is not None:
        session.mecefo.hear(state["degraded"])
    training._TRAIN_START_TIME = min(training._TRAIN_START_TIME, state["began"])
    torch.set_rng_state(state["rng"])
    get_cuda_rng_tracker().set_states(dict(state["tracker"]))
    _set_golden(session, state["golden"])


def _golden(session: Any) -> list[list[int]]:
    """How often each parameter's gradient becomes ready; DDP learns it in its first batch."""
    return [
        [group.golden_per_param_grad_ready_counts.get(p, 0) for p in _params(group)]
        for chunk in session.model
        for group in chunk.bucket_groups
    ]


def _set_golden(session: Any, counts: list[list[int]]) -> None:
    groups = [group for chunk in session.model for group in chunk.bucket_groups]
    for group, numbers in zip(groups, counts, strict=True):
        if any(numbers):
            pairs = zip(_params(group), numbers, strict=True)
            group.golden_per_param_grad_ready_counts = {p: n for p, n in pairs if n}
            group.is_first_batch = False


def _params(group: Any) -> list[torch.nn.Parameter]:
    return [param for bucket in group.buckets for param in bucket.params_list]


def _strip(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with its tensors moved to ``tensors`` and placeholders in their stead."""
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        tensors.append(host)
        return _Placeholder(len(tensors) - 1, host.dtype, tuple(host.shape))
    if isinstance(value, dict):
        return {key: _strip(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_strip(item, tensors) for item in value)
    return value


def _find(value: Any, places: list[_Placeholder]) -> None:
    if isinstance(value, _Placeholder):
        places.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _find(item, places)
    elif isinstance(value, list | tuple):
        for item in value:
            _find(item, places)


def _fill(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Placeholder):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _fill(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fill(item, tensors) for item in value)
    return value


def send_tensors(
    comm: MPI.Intracomm, rank: int, tensors: Sequence[torch.Tensor], tags: tuple[int, int]
) -> int:
    """Send tensors, wherever they are, in chunks with a checksum each.

    Args:
        tags: Of the chunks, and of the checksums.

    Returns:
        Their bytes.
    """
    nbytes = 0
    for tensor in tensors:
        for chunk in _chunks(staging.outgoing(tensor)):
            comm.Send(chunk, dest=rank, tag=tags[0])
            comm.send(zlib.crc32(chunk), dest=rank, tag=tags[1])
            nbytes += len(chunk)
    return nbytes


def receive_tensors(
    comm: MPI.Intracomm, rank: int, tensors: Sequence[torch.Tensor], tags: tuple[int, int]
) -> int:
    """Receive into tensors of the same sizes what ``send_tensors`` sends.

    Raises:
        TransferCorrupted: A checksum does not match.
    """
    nbytes = 0
    for tensor in tensors:
        host = staging.incoming(tensor)
        for chunk in _chunks(host):
            comm.Recv(chunk, source=rank, tag=tags[0])
            if zlib.crc32(chunk) != comm.recv(source=rank, tag=tags[1]):
                raise TransferCorrupted(
                    f"a chunk of {len(chunk)} bytes from rank {rank} is corrupted"
                )
            nbytes += len(chunk)
        staging.land(host, tensor)
    return nbytes


def _chunks(host: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous host tensor, writable, in pieces of at most ``CHUNK_BYTES``."""
    if host.numel() == 0:
        return
    whole = memoryview(host.detach().view(-1).view(torch.uint8).numpy()).cast("B")
    for start in range(0, len(whole), CHUNK_BYTES):
        yield whole[start : start + CHUNK_BYTES]
