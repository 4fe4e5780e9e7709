"""A buffer as the parts of the processes, and whose part a vacant slot's is.

Parts of vacant slots read zeros. A process that serves several slots fills the part of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from mpi4py import MPI

from megatron_ft.world import staging
from megatron_ft.world.dtypes import MAX_COUNT, copy_type
from megatron_ft.world.link import Link


def equal_parts(host: torch.Tensor, comm: MPI.Intracomm) -> staging.View:
    """``host`` as one equal part for each process."""
    wire = copy_type(host)
    numel = host.numel() // comm.size
    memory = MPI.buffer.fromaddress(host.data_ptr(), host.nbytes)
    if numel <= MAX_COUNT:
        return memory, numel, wire
    return memory, 1, staging.huge_type(numel, wire)


def counted_parts(
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


def first_parts(link: Link, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """One part for each process, that of its first slot, in the order of ranks."""
    if link.full:
        return parts
    return [parts[link.group_rank(rank)] for rank in range(link.num_processes)]


def fill_others(link: Link, parts: Sequence[torch.Tensor]) -> None:
    """Zeros for vacant slots; for a process's further slots what its first one has."""
    if link.full:
        return
    for i, (rank, part) in enumerate(zip(link.ranks, parts, strict=True)):
        if rank is None:
            part.detach().zero_()
        elif link.group_rank(rank) != i:
            part.detach().copy_(parts[link.group_rank(rank)])
