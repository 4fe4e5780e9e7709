"""all_reduce, reduce and reduce_scatter.

A vacant slot contributes the identity; AVG divides by the number of slots whatever is vacant; a
process that serves several slots contributes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Work

from megatron_ft.world import checks, staging
from megatron_ft.world.dtypes import MAX_COUNT, Reduction, reduction
from megatron_ft.world.pending import Pending, merge, settle

if TYPE_CHECKING:
    from megatron_ft.world.group import UlfmProcessGroup

# Several small tensors cost less in one call, also with the copies; large ones do not.
FLATTEN_BYTES = 1 << 16
# A large tensor is reduced piece by piece: what MPI and the conversion to float32 need beside it
# then stays in the cache and is not fresh memory from the system each time. Twice as fast at 64 MB.
PIECE_BYTES = 8 << 20


def all_reduce(group: UlfmProcessGroup, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work:
    plan = reduction(op, tensor.dtype)

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        return _all_reduce(group, comm, tensor, plan, async_op)

    buffers = (tensor,)
    return group.policy.run(group, "all_reduce", body, buffers, async_op, buffers)


def all_reduce_coalesced(
    group: UlfmProcessGroup, tensors: Sequence[torch.Tensor], op: ReduceOp, async_op: bool
) -> Work:
    batches = [(batch, reduction(op, batch[0].dtype)) for batch in _batches(tensors)]

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        return merge(
            _all_reduce(group, comm, batch[0], plan, async_op)
            if len(batch) == 1
            else _all_reduce_flat(group, comm, batch, plan, async_op)
            for batch, plan in batches
        )

    return group.policy.run(group, "all_reduce", body, tensors, async_op, tensors)


def reduce(
    group: UlfmProcessGroup, tensor: torch.Tensor, root: int, op: ReduceOp, async_op: bool
) -> Work:
    """The result is at ``root`` (a group rank) only; the others' tensors stay as they are.

    With the root vacant nobody keeps the result.
    """
    checks.root("reduce", root, group.size())
    plan = reduction(op, tensor.dtype)

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        at = group.link.ranks[root]
        if at is None:
            return None
        real = _real(tensor)
        pieces = staging.pieces(real, _piece_numel(plan))
        return merge(_reduce(group, comm, piece, plan, at, async_op) for piece in pieces)

    buffers = (tensor,)
    return group.policy.run(group, "reduce", body, buffers, async_op, buffers)


def reduce_scatter(
    group: UlfmProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[torch.Tensor]],
    op: ReduceOp,
    async_op: bool,
) -> Work:
    """Reduce the parts and keep one's own, for each output.

    Args:
        outputs: One tensor for each reduction.
        inputs: For each reduction either one part a group rank, which may differ in size, or one
            tensor that is the concatenation of equal parts. An output may lie inside its input.
    """
    size = group.size()
    plans = [reduction(op, output.dtype) for output in outputs]
    for output, parts in zip(outputs, inputs, strict=True):
        checks.same_dtype("reduce_scatter", parts, output)
        if len(parts) == 1:
            checks.numel("reduce_scatter", parts[0], output.numel() * size)
        else:
            checks.length("reduce_scatter", "input tensor", parts, size)
            checks.numel("reduce_scatter", parts[group.rank()], output.numel())
    aliased = [o for o, parts in zip(outputs, inputs, strict=True) if _aliased(o, parts)]

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        checks.full("reduce_scatter", group.link)
        jobs = zip(outputs, inputs, plans, strict=True)
        return merge(_reduce_scatter(group, comm, *job, async_op) for job in jobs)

    return group.policy.run(group, "reduce_scatter", body, aliased, async_op, outputs)


def _all_reduce(
    group: UlfmProcessGroup,
    comm: MPI.Intracomm | None,
    tensor: torch.Tensor,
    plan: Reduction,
    async_op: bool,
) -> Pending | None:
    pieces = staging.pieces(_real(tensor), _piece_numel(plan))
    if len(pieces) == 1:
        return _all_reduce_piece(group, comm, pieces[0], plan, async_op)
    return merge(_all_reduce_piece(group, comm, piece, plan, async_op) for piece in pieces)


def _all_reduce_piece(
    group: UlfmProcessGroup,
    comm: MPI.Intracomm | None,
    tensor: torch.Tensor,
    plan: Reduction,
    async_op: bool,
) -> Pending | None:
    host = _load(tensor, plan)
    requests: Iterable[MPI.Request | None] = ()
    if comm is not None:
        call = comm.Iallreduce if async_op else comm.Allreduce
        requests = (call(MPI.IN_PLACE, span, plan.op) for span in _spans(host, plan))

    def finish() -> None:
        _store(host, tensor, plan, len(group.link.slots))

    return settle(requests, finish, (host,))


def _reduce(
    group: UlfmProcessGroup,
    comm: MPI.Intracomm | None,
    tensor: torch.Tensor,
    plan: Reduction,
    root: int,
    async_op: bool,
) -> Pending | None:
    """Reduce to rank ``root`` of ``comm``."""
    at_root = comm is None or comm.rank == root
    host = _load(tensor, plan, keep=not at_root)
    requests: Iterable[MPI.Request | None] = ()
    if comm is not None:
        call = comm.Ireduce if async_op else comm.Reduce
        spans = _spans(host, plan)
        ends = [(MPI.IN_PLACE, span) if at_root else (span, None) for span in spans]
        requests = (call(*end, plan.op, root) for end in ends)

    def finish() -> None:
        if at_root:
            _store(host, tensor, plan, len(group.link.slots))

    return settle(requests, finish, (host,))


def _all_reduce_flat(
    group: UlfmProcessGroup,
    comm: MPI.Intracomm | None,
    tensors: Sequence[torch.Tensor],
    plan: Reduction,
    async_op: bool,
) -> Pending | None:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    pending = _all_reduce(group, comm, flat, plan, async_op)

    def unpack() -> None:
        parts = flat.split([tensor.numel() for tensor in tensors])
        for part, tensor in zip(parts, tensors, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    if pending is None:
        unpack()
        return None
    return merge([pending, Pending([], unpack, (flat,))])


def _reduce_scatter(
    group: UlfmProcessGroup,
    comm: MPI.Intracomm | None,
    output: torch.Tensor,
    parts: Sequence[torch.Tensor],
    plan: Reduction,
    async_op: bool,
) -> Pending | None:
    size = group.size()
    output = _real(output)
    parts = [_real(part) for part in parts]
    whole = parts[0] if len(parts) == 1 else staging.flat_outgoing(parts)
    source = _load(whole, plan, keep=True)
    host = staging.incoming(output)
    if host.dtype != source.dtype or staging.overlap(host, source):
        host = staging.buffer(output, source.dtype)
    counts = [output.numel()] * size if len(parts) == 1 else [part.numel() for part in parts]
    requests: Iterable[MPI.Request | None] = ()
    if comm is None:
        host.copy_(source.view(host.shape))
    elif source.numel() > MAX_COUNT:
        requests = _reduce_each(comm, source, host, counts, plan, async_op)
    elif len(set(counts)) == 1:
        block = comm.Ireduce_scatter_block if async_op else comm.Reduce_scatter_block
        requests = (block(_one(source, plan), _one(host, plan), plan.op),)
    else:
        uneven = comm.Ireduce_scatter if async_op else comm.Reduce_scatter
        requests = (uneven(_one(source, plan), _one(host, plan), counts, plan.op),)

    def finish() -> None:
        _store(host, output, plan, size)

    return settle(requests, finish, (source, host))


def _reduce_each(
    comm: MPI.Intracomm,
    source: torch.Tensor,
    host: torch.Tensor,
    counts: Sequence[int],
    plan: Reduction,
    async_op: bool,
) -> Iterator[MPI.Request | None]:
    """Reduce part after part, each at its owner: for more elements than one call can count."""
    call = comm.Ireduce if async_op else comm.Reduce
    for owner, part in enumerate(source.view(-1).split(list(counts))):
        sends = staging.spans(part, plan.wire)
        kept = staging.spans(host, plan.wire) if comm.rank == owner else [None] * len(sends)
        for send, keep in zip(sends, kept, strict=True):
            yield call(send, keep, plan.op, owner)


def _piece_numel(plan: Reduction) -> int:
    # In elements of what is sent, so that a process whose tensor has gaps cuts at the same places.
    return PIECE_BYTES // plan.compute.itemsize


def _spans(host: torch.Tensor, plan: Reduction) -> list[staging.View]:
    return staging.spans(host, plan.wire, _piece_numel(plan))


def _one(host: torch.Tensor, plan: Reduction) -> staging.View:
    (only,) = staging.spans(host, plan.wire)
    return only


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _load(tensor: torch.Tensor, plan: Reduction, keep: bool = False) -> torch.Tensor:
    """Host memory with this process's contribution.

    Args:
        keep: Never write to the tensor itself.
    """
    host = staging.outgoing(tensor, plan.compute)
    if plan.factor is not None:
        if host is tensor and keep:
            host = tensor.detach().clone()
        host.detach().mul_(plan.factor)
    return host


def _store(host: torch.Tensor, tensor: torch.Tensor, plan: Reduction, num_slots: int) -> None:
    if plan.average:
        host.detach().div_(num_slots)
    staging.land(host, tensor)


def _batches(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Runs of small tensors that are reduced as one; decided by what all processes see alike."""
    batches: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if batches and tensor.nbytes <= room and tensor.dtype == batches[-1][0].dtype:
            batches[-1].append(tensor)
            room -= tensor.nbytes
        else:
            batches.append([tensor])
            room = FLATTEN_BYTES - tensor.nbytes
    return batches


def _aliased(output: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    return any(staging.overlap(output, part) for part in parts)
