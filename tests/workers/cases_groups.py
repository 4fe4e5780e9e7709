"""Cases of groups of some slots, in another order, of one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from side import (
    OPS,
    Side,
    both,
)
from torch.distributed import ReduceOp


@both
def subgroups(s: Side) -> Any:
    tensor = s.values(4)
    got = [dist.all_reduce(tensor, group=s.pair), tensor]
    if s.rank in (1, 3):
        rooted = s.values(4)
        dist.broadcast(rooted, 3, group=s.pair)
        parts = [torch.empty(4), torch.empty(4)]
        dist.all_gather(parts, s.values(4), group=s.pair)
        got += [rooted, parts, dist.get_rank(s.pair), dist.get_world_size(s.pair)]
    else:
        got += [dist.get_rank(s.pair)]
    return got


@both
def a_group_in_an_order_of_its_own(s: Side) -> Any:
    if s.rank == 1:
        return None
    parts = [torch.empty(4) for _ in range(3)]
    dist.all_gather(parts, s.values(4), group=s.turned)
    output = torch.empty(2)
    dist.scatter(
        output,
        [s.values(2, salt=i) for i in range(3)] if s.rank == 2 else None,
        2,
        group=s.turned,
    )
    reduced = s.values(2)
    dist.reduce(reduced, 0, group=s.turned)
    kept = reduced if s.rank == 0 else None
    return dist.get_group_rank(s.turned, s.rank), parts, output, kept


@both
def a_group_of_one(s: Side) -> Any:
    group, n = s.solo, s.values(4)
    got: list[Any] = []
    for op in OPS[:5]:
        tensor = s.values(4)
        dist.all_reduce(tensor, op=getattr(ReduceOp, op), group=group)
        got.append(tensor)
    parts = [torch.empty(4)]
    dist.all_gather(parts, n, group=group)
    whole = torch.empty(4)
    dist.all_gather_into_tensor(whole, n, group=group)
    output = torch.empty(4)
    dist.reduce_scatter_tensor(output, n, group=group)
    exchanged = torch.empty(4)
    dist.all_to_all_single(exchanged, n, group=group)
    gathered = [torch.empty(4)]
    dist.gather(n, gathered, s.rank, group=group)
    scattered = torch.empty(4)
    dist.scatter(scattered, [n], s.rank, group=group)
    dist.reduce(n, s.rank, group=group)
    dist.broadcast(n, s.rank, group=group)
    dist.barrier(group=group)
    objects_: list[Any] = [None]
    dist.all_gather_object(objects_, {"me": s.rank}, group=group)
    future = dist.all_reduce(n, group=group, async_op=True).get_future().wait()
    listed = [torch.empty(4)]
    dist.all_to_all(listed, [n], group=group)
    return got, parts, whole, output, exchanged, gathered, scattered, n, objects_, future, listed


@both
def older_calls_on_the_group(s: Side) -> Any:
    """The overloads without options that torch keeps for its own older callers."""
    group, n = s.world, s.size
    reduced, one = s.values(4), s.values(4)
    group.allreduce(reduced).wait()
    group.allreduce([one], ReduceOp.MAX).wait()
    rooted, kept = s.values(4), s.values(4)
    group.broadcast(rooted, 2).wait()
    group.reduce(kept, 1, ReduceOp.MIN).wait()
    parts = [torch.empty(4) for _ in range(n)]
    group.allgather(parts, s.values(4)).wait()
    output = torch.empty(4)
    group.reduce_scatter(output, [s.values(4, salt=i) for i in range(n)]).wait()
    gathered = [torch.zeros(4) for _ in range(n)]
    group.gather(gathered if s.rank == 3 else [], s.values(4), 3).wait()
    scattered = torch.empty(4)
    group.scatter(
        scattered, [s.values(4, salt=i) for i in range(n)] if s.rank == 0 else [], 0
    ).wait()
    exchanged = torch.empty(n)
    group.alltoall_base(exchanged, s.values(n), [], []).wait()
    group.barrier().wait()
    at_root = kept if s.rank == 1 else None
    return reduced, one, rooted, at_root, parts, output, gathered, scattered, exchanged
