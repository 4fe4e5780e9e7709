"""all_gather and gather: a part of every slot, for all or for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.distributed.distributed_c10d import Work

from megatron_ft.world import checks, staging
from megatron_ft.world.dtypes import copy_type
from megatron_ft.world.link import Link
from megatron_ft.world.parts import counted_parts, equal_parts, fill_others, first_parts
from megatron_ft.world.pending import Pending, merge, nothing, settle

if TYPE_CHECKING:
    from megatron_ft.world.group import UlfmProcessGroup


def all_gather_into(
    group: UlfmProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    async_op: bool,
) -> Work:
    """Gather every process's input into one output, for each pair.

    Args:
        outputs: Of ``size`` times the elements of the input; equal parts in group order.
        inputs: May be this process's own part of the output.
    """
    for output, tensor in zip(outputs, inputs, strict=True):
        checks.same_dtype("all_gather", [output], tensor)
        checks.numel("all_gather", output, tensor.numel() * group.size())

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        pairs = zip(outputs, inputs, strict=True)
        return merge(_all_gather_into(group, comm, *pair, async_op) for pair in pairs)

    return group.policy.run(group, "all_gather", body, (), async_op, outputs)


def all_gather(
    group: UlfmProcessGroup,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    async_op: bool,
) -> Work:
    """Gather every process's input into a tensor for each slot, for each input.

    Args:
        outputs: For each input, one tensor a group rank. They may differ in size, as the inputs
            of the processes do; all processes must pass the same sizes.
        inputs: Tensors of this process.
    """
    for parts, tensor in zip(outputs, inputs, strict=True):
        checks.length("all_gather", "output tensor", parts, group.size())
        checks.same_dtype("all_gather", parts, tensor)
        checks.same_sizes("all_gather", [parts[group.rank()]], tensor)

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        pairs = zip(outputs, inputs, strict=True)
        return merge(_all_gather(group, comm, *pair, async_op) for pair in pairs)

    results = [tensor for parts in outputs for tensor in parts]
    return group.policy.run(group, "all_gather", body, (), async_op, results)


def gather(
    group: UlfmProcessGroup,
    outputs: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    root: int,
    async_op: bool,
) -> Work:
    """Gather every process's tensor at ``root`` (a group rank). If that is vacant, nobody keeps.

    Args:
        outputs: One tensor a group rank, of the size of ``tensor``; empty elsewhere.
    """
    checks.root("gather", root, group.size())
    if group.rank() == root:
        checks.length("gather", "output tensor", outputs, group.size())
        checks.same_dtype("gather", outputs, tensor)
        checks.same_sizes("gather", outputs, tensor)
    elif outputs:
        raise RuntimeError("gather: requires empty output on non-root")

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        link = group.link
        at = link.ranks[root]
        if at is None:
            return None
        source = staging.outgoing(tensor)
        if group.rank() != root:
            if comm is None or comm.rank == at:
                return None  # The root's own process serves another slot here: it keeps nothing.
            call = comm.Igather if async_op else comm.Gather
            request = call(staging.view(source, copy_type(source)), None, at)
            return settle((request,), nothing, (source,))
        served = first_parts(link, outputs)
        host = staging.flat_incoming(served)
        requests = []
        if comm is None:
            host.copy_(source.detach().view(-1))
        else:
            call = comm.Igather if async_op else comm.Gather
            requests = [call(staging.view(source, copy_type(source)), equal_parts(host, comm), at)]

        def finish() -> None:
            staging.flat_land(host, served)
            fill_others(link, outputs)

        return settle(requests, finish, (source, host))

    return group.policy.run(group, "gather", body, (), async_op, outputs)


def _all_gather_into(
    group: UlfmProcessGroup,
    comm: MPI.Intracomm | None,
    output: torch.Tensor,
    tensor: torch.Tensor,
    async_op: bool,
) -> Pending | None:
    link = group.link
    source = staging.outgoing(tensor)
    host = staging.incoming(output)
    parts: Sequence[torch.Tensor] = ()
    requests = []
    if comm is None or not link.full:
        parts = host.detach().view(len(link.slots), -1).unbind()
    if comm is None:
        parts[link.ranks.index(0)].copy_(source.detach().view(-1))
    else:
        own = host.data_ptr() + link.group_rank(comm.rank) * source.nbytes
        send: staging.View | MPI.InPlaceType = MPI.IN_PLACE
        if source.data_ptr() != own:
            if staging.overlap(source, host):
                source = source.clone()
            send = staging.view(source, copy_type(source))
        requests = [_call_all_gather(comm, link, send, host, source, async_op)]

    def finish() -> None:
        fill_others(link, parts)
        staging.land(host, output)

    return settle(requests, finish, (source, host))


def _call_all_gather(
    comm: MPI.Intracomm,
    link: Link,
    send: staging.View | MPI.InPlaceType,
    host: torch.Tensor,
    source: torch.Tensor,
    async_op: bool,
) -> MPI.Request | None:
    """Gather equal parts into ``host``, leaving out those that are nobody's."""
    if link.full:
        call = comm.Iallgather if async_op else comm.Allgather
        return call(send, equal_parts(host, comm))
    uneven = comm.Iallgatherv if async_op else comm.Allgatherv
    part = copy_type(source).Create_contiguous(source.numel()).Commit()
    positions = [link.group_rank(rank) for rank in range(comm.size)]
    memory = MPI.buffer.fromaddress(host.data_ptr(), host.nbytes)
    request = uneven(send, (memory, [1] * comm.size, positions, part))
    part.Free()
    return request


def _all_gather(
    group: UlfmProcessGroup,
    comm: MPI.Intracomm | None,
    outputs: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    async_op: bool,
) -> Pending | None:
    link = group.link
    served = first_parts(link, outputs)
    source = staging.outgoing(tensor)
    requests = []
    if comm is None:
        served[0].detach().copy_(source)
        host = served[0]
    else:
        host = staging.flat_incoming(served)
        counts = [part.numel() for part in served]
        if staging.overlap(source, host):
            source = source.clone()
        send = staging.view(source, copy_type(source))
        if len(set(counts)) == 1:
            call = comm.Iallgather if async_op else comm.Allgather
            requests = [call(send, equal_parts(host, comm))]
        else:
            uneven = comm.Iallgatherv if async_op else comm.Allgatherv
            requests = [uneven(send, counted_parts(host, counts))]

    def finish() -> None:
        if comm is not None:
            staging.flat_land(host, served)
        fill_others(link, outputs)

    return settle(requests, finish, (source, host))
