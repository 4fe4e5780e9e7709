"""Host memory that MPI can read and write, for any tensor.

A contiguous tensor in host memory is used where it lies. Anything else (strided, on a GPU, of a
type that MPI cannot reduce) goes through a host buffer: pinned for a GPU, so that the copy runs at
full speed and needs no second one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from mpi4py import MPI

from megatron_ft.world.dtypes import MAX_COUNT

type View = tuple[MPI.buffer, MPI.Datatype] | tuple[MPI.buffer, int, MPI.Datatype]

always = False
"""Stage tensors that need it not, too; a switch for tests of this file."""

_CHUNK = 1 << 20
_huge_types: dict[tuple[int, int], MPI.Datatype] = {}


def in_place(tensor: torch.Tensor) -> bool:
    """Whether MPI can work on the tensor's own memory."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not always
    )


def outgoing(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Host memory that holds the tensor's values: the tensor itself where that is possible.

    On a GPU it waits for the work queued before, which makes the values, and for the copy.
    """
    if (dtype is None or dtype == tensor.dtype) and in_place(tensor):
        return tensor
    host = buffer(tensor, dtype)
    host.copy_(tensor.detach(), non_blocking=True)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return host


def incoming(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory of the tensor's shape for MPI to write: the tensor itself where possible."""
    return tensor if in_place(tensor) else buffer(tensor)


def land(host: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put what arrived in ``host`` into the tensor that it stands for.

    On a GPU the copy is queued on the current stream; the pinned buffer outlives it because torch's
    allocator holds back a pinned block until the streams that use it are done.
    """
    if host is not tensor:
        tensor.detach().copy_(host, non_blocking=True)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return (
        a.data_ptr() < b.data_ptr() + b.nbytes
        and b.data_ptr() < a.data_ptr() + a.nbytes
        and a.device == b.device
    )


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one flat tensor whose consecutive parts ``tensors`` are; None if they are scattered."""
    first = tensors[0]
    address = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    numel = 0
    for tensor in tensors:
        if (
            not in_place(tensor)
            or tensor.data_ptr() != address
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        address += tensor.nbytes
        numel += tensor.numel()
    return first.detach().as_strided((numel,), (1,))


def flat_outgoing(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Host memory with the tensors' values one after another."""
    whole = joined(tensors)
    if whole is not None:
        return whole
    host = flat_incoming(tensors)
    parts = host.split([t.numel() for t in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        part.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return host


def flat_incoming(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Host memory for the tensors' values one after another, their own where that is possible."""
    whole = joined(tensors)
    if whole is not None:
        return whole
    first = tensors[0]
    numel = sum(t.numel() for t in tensors)
    return torch.empty(numel, dtype=first.dtype, pin_memory=first.is_cuda)


def flat_land(host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Put what arrived in memory of :func:`flat_incoming` into the tensors."""
    parts = host.split([t.numel() for t in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        if part.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(part.view(tensor.shape), non_blocking=True)


def view(host: torch.Tensor, wire: MPI.Datatype) -> View:
    """``host`` as one MPI buffer, of any size.

    For copies only: beyond 2^31-1 elements it is one element of a type of that length.
    """
    memory = MPI.buffer.fromaddress(host.data_ptr(), host.nbytes)
    if host.numel() <= MAX_COUNT:
        return memory, wire
    return memory, 1, huge_type(host.numel(), wire)


def pieces(tensor: torch.Tensor, numel: int) -> Sequence[torch.Tensor]:
    """The tensor as flat pieces of ``numel`` elements, or as a whole where it has gaps."""
    if tensor.numel() <= numel or not tensor.is_contiguous():
        return (tensor,)
    return tensor.detach().view(-1).split(numel)


def spans(host: torch.Tensor, wire: MPI.Datatype, numel: int = MAX_COUNT) -> list[View]:
    """``host`` as MPI buffers of at most ``numel`` elements each, for reductions."""
    return [
        (MPI.buffer.fromaddress(piece.data_ptr(), piece.nbytes), wire)
        for piece in pieces(host, numel)
    ]


def huge_type(numel: int, wire: MPI.Datatype) -> MPI.Datatype:
    """A type of ``numel`` elements of ``wire``; kept for good, there are few sizes."""
    key = (numel, wire.Get_size())
    if key not in _huge_types:
        chunks, rest = divmod(numel, _CHUNK)
        chunk = wire.Create_contiguous(_CHUNK)
        whole = MPI.Datatype.Create_struct(
            [chunks, rest], [0, chunks * _CHUNK * wire.Get_size()], [chunk, wire]
        )
        chunk.Free()
        _huge_types[key] = whole.Commit()
    return _huge_types[key]


def buffer(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """New host memory of the tensor's shape."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=tensor.is_cuda)


def landed(tensors: Iterable[torch.Tensor]) -> list[torch.cuda.Event]:
    """What says when the copies that ``land`` has begun in this thread are over, for ``follow``."""
    events = []
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


def follow(events: Iterable[torch.cuda.Event]) -> None:
    """Let what the caller's stream does from here on come after those copies."""
    for event in events:
        torch.cuda.current_stream(event.device).wait_event(event)
