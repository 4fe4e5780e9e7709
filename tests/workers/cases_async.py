"""Cases of coalesced and asynchronous operations, works and futures."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from compare import values
from side import (
    BOTH,
    Case,
    Side,
    both,
    ulfm_only,
)
from torch.distributed import ReduceOp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def _coalesced(async_ops: bool) -> Case:
    def case(s: Side) -> Any:
        small = [s.values(n, salt=n) for n in (3, 50_000, 1, 0, 7, 40_000, 2)]
        with dist._coalescing_manager(s.world, async_ops=async_ops) as manager:
            for tensor in small:
                dist.all_reduce(tensor, group=s.world)
        if async_ops:
            manager.wait()
        gathered = [torch.empty(n * s.size) for n in (2, 9)]
        with dist._coalescing_manager(s.world, async_ops=async_ops) as manager:
            for output in gathered:
                n = output.numel() // s.size
                dist.all_gather_into_tensor(output, s.values(n, salt=n), group=s.world)
        if async_ops:
            manager.wait()
        scattered = [torch.empty(n) for n in (2, 9)]
        with dist._coalescing_manager(s.world, async_ops=async_ops) as manager:
            for output in scattered:
                source = s.values(output.numel() * s.size)
                dist.reduce_scatter_tensor(output, source, group=s.world)
        if async_ops:
            manager.wait()
        return small, gathered, scattered

    return case


BOTH["coalesced"] = _coalesced(False)
BOTH["coalesced_async"] = _coalesced(True)


@ulfm_only
def coalesced_dtypes_and_strides(s: Side) -> Any:
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    tensors = [s.strided(s.values(6, dtype=d, salt=i)) for i, d in enumerate(dtypes)]
    with dist._coalescing_manager(s.world):
        for tensor in tensors:
            dist.all_reduce(tensor, group=s.world)
    expected = [
        sum(s.values(6, salt=i, rank=r) for r in range(s.size)).to(d) for i, d in enumerate(dtypes)
    ]
    return tensors, expected


@both
def old_coalesced_calls(s: Side) -> Any:
    reduced = [s.values(2), s.values(3, 3)]
    dist.all_reduce_coalesced(reduced, group=s.world)
    later = [s.values(4), s.values(2, 2)]
    value = dist.all_reduce_coalesced(later, group=s.world, async_op=True).wait()
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(s.size)]
    dist.all_gather_coalesced(lists, [s.values(2), s.values(3)], group=s.world)
    return reduced, later, value, lists


@both
def async_operations_overlap(s: Side) -> Any:
    tensors = [s.values(n, salt=n) for n in (5, 70_000, 11, 300_000)]
    half = s.values(1000, dtype=torch.bfloat16)
    gathered = torch.empty(9 * s.size)
    parts = [torch.empty(9) for _ in range(s.size)]
    rooted = s.values(6)
    exchanged = torch.empty(2 * s.size)
    scattered = torch.empty(3)
    kept = torch.empty(3)
    gathered_at_0 = [torch.empty(3) for _ in range(s.size)] if s.rank == 0 else None
    to_scatter = [s.values(3, salt=i) for i in range(s.size)] if s.rank == 0 else None
    strided = s.strided(s.values(4, 4))
    group = s.world
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    works += [
        dist.all_reduce(half, op=ReduceOp.AVG, group=group, async_op=True),
        dist.all_gather_into_tensor(gathered, s.values(9), group=group, async_op=True),
        dist.all_gather(parts, s.values(9), group=group, async_op=True),
        dist.broadcast(rooted, 1, group=group, async_op=True),
        dist.all_to_all_single(exchanged, s.values(2 * s.size), group=group, async_op=True),
        dist.reduce_scatter_tensor(scattered, s.values(3 * s.size), group=group, async_op=True),
        dist.barrier(group=group, async_op=True),
        dist.gather(s.values(3), gathered_at_0, 0, group=group, async_op=True),
        dist.scatter(kept, to_scatter, 0, group=group, async_op=True),
        dist.all_reduce(strided, group=group, async_op=True),
    ]
    done = [work.wait() for work in reversed(works)]
    both_lists = gathered_at_0, kept, strided
    return tensors, half, gathered, parts, rooted, exchanged, scattered, both_lists, done


@both
def async_on_two_groups_in_opposite_order(s: Side) -> Any:
    groups = [s.world, s.world_again]
    tensors = [s.values(200_000, salt=i) for i in range(2)]
    order = (0, 1) if s.rank % 2 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    return tensors


@both
def futures(s: Side) -> Any:
    tensors = [s.values(n, salt=n) for n in (4, 100_000)]
    called: list[int] = []

    def note(future: Any) -> int:
        called.append(1)
        return len(future.value())

    works = [dist.all_reduce(t, group=s.world, async_op=True) for t in tensors]
    lengths = [work.get_future().then(note).wait() for work in works]
    values_ = [work.get_future().value() for work in works]
    nothing = dist.barrier(group=s.world, async_op=True).get_future().wait()
    sent = s.values(3)
    rooted = dist.broadcast(sent, 1, group=s.world, async_op=True).get_future().wait()
    return tensors, lengths, values_, len(called), nothing, rooted


@both
def works(s: Side) -> Any:
    tensor = s.values(5)
    work = dist.all_reduce(tensor, group=s.world, async_op=True)
    while not work.is_completed():
        time.sleep(0)
    waited = work.wait(), work.wait(timedelta(seconds=5)), work.is_success(), work.exception()
    return tensor, waited, work.result()


@both
def ddp(s: Side) -> Any:
    gradients = []
    for hook in (None, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 2))
        for i, parameter in enumerate(model.parameters()):
            parameter.data.copy_(values(*parameter.shape, rank=0, salt=i))
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, process_group=s.world, bucket_cap_mb=1e-4
        )
        if hook is not None:
            wrapped.register_comm_hook(s.world, hook)
        for _ in range(2):
            wrapped(s.values(4, 8)).sum().backward()
        gradients += [p.grad for p in model.parameters()]
    return gradients


@both
def threads_use_two_groups(s: Side) -> Any:
    tensors = [s.values(1000, salt=i) for i in range(2)]

    def work(i: int) -> None:
        for _ in range(5):
            dist.all_reduce(tensors[i], op=ReduceOp.MAX, group=[s.world, s.world_again][i])
            dist.all_reduce(tensors[i], op=ReduceOp.SUM, group=[s.world, s.world_again][i])

    other = threading.Thread(target=work, args=(1,))
    other.start()
    work(0)
    other.join()
    return tensors
