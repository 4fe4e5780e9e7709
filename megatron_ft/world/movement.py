"""broadcast, all_gather, gather, scatter and all_to_all: operations that move elements as they are.

Parts of vacant slots read zeros. A process that serves several slots fills the part of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.distributed.distributed_c10d import Work

from megatron_ft.world import checks, staging
from megatron_ft.world.dtypes import MAX_COUNT, copy_type
from megatron_ft.world.link import Link
from megatron_ft.world.work import Pending, merge, nothing, settle

if TYPE_CHECKING:
    from megatron_ft.world.group import UlfmProcessGroup


def broadcast(group: UlfmProcessGroup, tensor: torch.Tensor, root: int, async_op: bool) -> Work:
    """Copy the tensor of ``root`` (a group rank); if that is vacant, of the lowest live slot."""
    checks.root("broadcast", root, group.size())

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        if comm is None:
            return None
        sender = group.link.ranks[root] or 0
        sends = comm.rank == sender
        host = staging.outgoing(tensor) if sends else staging.incoming(tensor)
        call = comm.Ibcast if async_op else comm.Bcast
        request = call(staging.view(host, copy_type(host)), sender)

        def finish() -> None:
            if not sends:
                staging.land(host, tensor)

        return settle((request,), finish, (host,))

    buffers = (tensor,)
    return group.policy.run(group, "broadcast", body, buffers, async_op, buffers)


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
        served = _first_parts(link, outputs)
        host = staging.flat_incoming(served)
        requests = []
        if comm is None:
            host.copy_(source.detach().view(-1))
        else:
            call = comm.Igather if async_op else comm.Gather
            requests = [call(staging.view(source, copy_type(source)), _parts(host, comm), at)]

        def finish() -> None:
            staging.flat_land(host, served)
            _fill_others(link, outputs)

        return settle(requests, finish, (source, host))

    return group.policy.run(group, "gather", body, (), async_op, outputs)


def scatter(
    group: UlfmProcessGroup,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    root: int,
    async_op: bool,
) -> Work:
    """Give each process its part of ``root``'s tensors.

    Args:
        inputs: At the root one tensor a group rank, of the size of ``output``; empty elsewhere.

    Raises:
        RuntimeError: The root is vacant: its tensors are gone.
    """
    checks.root("scatter", root, group.size())
    if group.rank() == root:
        checks.length("scatter", "input tensor", inputs, group.size())
        checks.same_dtype("scatter", inputs, output)
        checks.same_sizes("scatter", inputs, output)
    elif inputs:
        raise RuntimeError("scatter: requires empty input on non-root")

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        link = group.link
        at = link.ranks[root]
        if at is None:
            raise RuntimeError(f"scatter: the root, slot {link.slots[root]}, is vacant")
        if link.num_processes != len(link.live):
            checks.full("scatter", link)
        host = staging.incoming(output)
        held = [host]
        requests = []
        if comm is None:
            host.detach().copy_(inputs[root])
        else:
            call = comm.Iscatter if async_op else comm.Scatter
            whole = None
            if comm.rank == at:
                source = staging.flat_outgoing(_first_parts(link, inputs))
                held.append(source)
                whole = _parts(source, comm)
            requests = [call(whole, staging.view(host, copy_type(host)), at)]

        def finish() -> None:
            staging.land(host, output)

        return settle(requests, finish, held)

    return group.policy.run(group, "scatter", body, (), async_op, (output,))


def all_to_all(
    group: UlfmProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    async_op: bool,
) -> Work:
    """Send ``inputs[i]`` to group rank ``i`` and receive ``outputs[i]`` from it."""
    checks.length("all_to_all", "output tensor", outputs, group.size())
    checks.length("all_to_all", "input tensor", inputs, group.size())
    checks.same_dtype("all_to_all", [*outputs, *inputs], inputs[0])

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        checks.full("all_to_all", group.link)
        source = staging.flat_outgoing(inputs)
        host = staging.flat_incoming(outputs)
        sizes = [t.numel() for t in outputs], [t.numel() for t in inputs]
        request = _exchange(comm, host, source, *sizes, async_op)

        def finish() -> None:
            staging.flat_land(host, outputs)

        return settle((request,), finish, (source, host))

    return group.policy.run(group, "all_to_all", body, (), async_op, outputs)


def all_to_all_single(
    group: UlfmProcessGroup,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    async_op: bool,
) -> Work:
    """Exchange rows of one tensor.

    Args:
        output_splits: Rows (of dimension 0) from each group rank; empty for equal parts.
        input_splits: Rows for each group rank; empty for equal parts.
    """
    op = "all_to_all_single"
    checks.same_dtype(op, [output], tensor)
    received = checks.splits(op, output_splits, output, group.size())
    sent = checks.splits(op, input_splits, tensor, group.size())

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        checks.full(op, group.link)
        source = staging.outgoing(tensor)
        host = staging.incoming(output)
        request = _exchange(comm, host, source, received, sent, async_op)

        def finish() -> None:
            staging.land(host, output)

        return settle((request,), finish, (source, host))

    return group.policy.run(group, op, body, (), async_op, (output,))


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
        _fill_others(link, parts)
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
        return call(send, _parts(host, comm))
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
    served = _first_parts(link, outputs)
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
            requests = [call(send, _parts(host, comm))]
        else:
            uneven = comm.Iallgatherv if async_op else comm.Allgatherv
            requests = [uneven(send, _counted(host, counts))]

    def finish() -> None:
        if comm is not None:
            staging.flat_land(host, served)
        _fill_others(link, outputs)

    return settle(requests, finish, (source, host))


def _exchange(
    comm: MPI.Intracomm | None,
    host: torch.Tensor,
    source: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    async_op: bool,
) -> MPI.Request | None:
    """Flat ``source`` out to everybody, flat ``host`` in from everybody."""
    if comm is None:
        checks.numel("all_to_all", source, received[0])
        host.detach().view(-1).copy_(source.detach().view(-1))
        return None
    if staging.overlap(source, host):
        source = source.clone()
    # Equal here need not be equal elsewhere, and all processes must make the same call.
    call = comm.Ialltoallv if async_op else comm.Alltoallv
    return call(_counted(source, sent), _counted(host, received))


def _parts(host: torch.Tensor, comm: MPI.Intracomm) -> staging.View:
    """``host`` as one equal part for each process."""
    wire = copy_type(host)
    numel = host.numel() // comm.size
    memory = MPI.buffer.fromaddress(host.data_ptr(), host.nbytes)
    if numel <= MAX_COUNT:
        return memory, numel, wire
    return memory, 1, staging.huge_type(numel, wire)


def _counted(
    host: torch.Tensor, counts: Sequence[int]
) -> tuple[MPI.buffer, Sequence[int], MPI.Datatype]:
    """``host`` as consecutive parts of ``counts`` elements."""
    memory = MPI.buffer.fromaddress(host.data_ptr(), host.nbytes)
    wire = copy_type(host)
    if host.numel() <= MAX_COUNT:
        return memory, counts, wire
    # Displacements are C ints too: count in the largest unit that all parts are multiples of.
    unit = math.gcd(*counts)
    if host.numel() // unit > MAX_COUNT:
        raise RuntimeError(
            f"uneven parts of {host.numel()} elements in all, more than MPI can address: split them"
        )
    return memory, [count // unit for count in counts], staging.huge_type(unit, wire)


def _first_parts(link: Link, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """One part for each process, that of its first slot, in the order of ranks."""
    if link.full:
        return parts
    return [parts[link.group_rank(rank)] for rank in range(link.num_processes)]


def _fill_others(link: Link, parts: Sequence[torch.Tensor]) -> None:
    """Zeros for vacant slots; for a process's further slots what its first one has."""
    if link.full:
        return
    for i, (rank, part) in enumerate(zip(link.ranks, parts, strict=True)):
        if rank is None:
            part.detach().zero_()
        elif link.group_rank(rank) != i:
            part.detach().copy_(parts[link.group_rank(rank)])
