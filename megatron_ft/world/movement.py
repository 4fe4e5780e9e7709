"""broadcast, scatter and all_to_all: elements that move as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.distributed.distributed_c10d import Work

from megatron_ft.world import checks, staging
from megatron_ft.world.dtypes import copy_type
from megatron_ft.world.parts import counted_parts, equal_parts, first_parts
from megatron_ft.world.pending import Pending, settle

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
                source = staging.flat_outgoing(first_parts(link, inputs))
                held.append(source)
                whole = equal_parts(source, comm)
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
    return call(counted_parts(source, sent), counted_parts(host, received))
