"""Cases of sends, receives and barriers."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from side import (
    BOTH,
    Case,
    Side,
    both,
    error_of,
    ulfm_only,
)

from megatron_ft.rejoin import transfer


@both
def tags_out_of_order(s: Side) -> Any:
    received = [torch.empty(4) for _ in range(5)]
    to, source = (s.rank + 1) % s.size, (s.rank - 1) % s.size
    works = [dist.isend(s.values(4, salt=t), to, group=s.world, tag=t) for t in range(5)]
    order = (3, 0, 4, 2, 1)
    works += [dist.irecv(received[t], source, group=s.world, tag=t) for t in order]
    for work in works:
        work.wait()
    return received


@both
def same_tag_in_order(s: Side) -> Any:
    to, source = (s.rank + 1) % s.size, (s.rank - 1) % s.size
    received = [torch.empty(n) for n in (3, 100_000, 5)]
    works = [dist.irecv(t, source, group=s.world) for t in received]
    works += [dist.isend(s.values(t.numel()), to, group=s.world) for t in received]
    for work in works:
        work.wait()
    return received


@both
def receive_from_any(s: Side) -> Any:
    if s.rank != 0:
        dist.send(s.values(3), 0, group=s.world, tag=s.rank)
        return None
    got = []
    for tag in (2, 3, 1):
        tensor = torch.empty(3)
        work = dist.irecv(tensor, group=s.world, tag=tag)
        work.wait()
        got.append((tensor, work._source_rank()))
    return got


@both
def receive_from_any_says_who(s: Side) -> Any:
    if s.rank != 0:
        dist.send(s.values(3), 0, group=s.world, tag=9)
        return None
    got = []
    for _ in range(s.size - 1):
        tensor = torch.empty(3)
        source = dist.recv(tensor, group=s.world, tag=9)
        got.append((source, tensor))
    return sorted(got, key=lambda item: item[0])


def _batch(numel: int) -> Case:
    def case(s: Side) -> Any:
        """Everybody sends to both neighbours first: blocking sends would deadlock."""
        left, right = (s.rank - 1) % s.size, (s.rank + 1) % s.size
        received = [torch.empty(numel), torch.empty(numel)]
        operations = [
            dist.P2POp(dist.isend, s.values(numel, salt=1), right, group=s.world),
            dist.P2POp(dist.isend, s.values(numel, salt=2), left, group=s.world),
            dist.P2POp(dist.irecv, received[0], left, group=s.world),
            dist.P2POp(dist.irecv, received[1], right, group=s.world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    return case


for _numel in (0, 10, 1_000_000):
    BOTH[f"batch_isend_irecv_{_numel}"] = _batch(_numel)


@both
def messages_in_a_subgroup(s: Side) -> Any:
    if s.rank not in (1, 3):
        return dist.isend(torch.ones(1), 1, group=s.pair)
    tensor = s.values(4)
    if s.rank == 3:
        dist.send(tensor, 1, group=s.pair, tag=5)
        dist.recv(tensor, group=s.pair, group_src=0)
        return tensor
    source = dist.recv(tensor, 3, group=s.pair, tag=5)
    dist.send(tensor, group_dst=1, group=s.pair)
    return tensor, source


@ulfm_only
def send_strided(s: Side) -> Any:
    tensor = s.strided(torch.zeros(3, 4))
    to, source = (s.rank + 1) % s.size, (s.rank - 1) % s.size
    sending = dist.isend(s.strided(s.values(3, 4)), to, group=s.world)
    dist.recv(tensor, source, group=s.world)
    sending.wait()
    return tensor, s.values(3, 4, rank=source)


@ulfm_only
def send_to_oneself(s: Side) -> Any:
    got = []
    for group in (s.world, s.solo):
        tensor = torch.empty(5)
        sending = dist.isend(s.values(5), s.rank, group=group, tag=3)
        dist.irecv(tensor, s.rank, group=group, tag=3).wait()
        sending.wait()
        got.append(tensor)
    return got, [s.values(5)] * 2


@ulfm_only
def sends_that_nobody_waits_for(s: Side) -> Any:
    to, source = (s.rank + 1) % s.size, (s.rank - 1) % s.size
    for i in range(300):
        dist.isend(s.values(3, salt=i), to, group=s.world)
    received = [torch.empty(3) for _ in range(300)]
    for tensor in received:
        dist.recv(tensor, source, group=s.world)
    dist.barrier(group=s.world)
    end = time.monotonic() + 20
    for work in list(s.world._pending):
        while not work.is_completed():  # what has arrived may not be known to have been sent
            assert time.monotonic() < end
    left = len(s.world._pending)
    return [received, left], [[s.values(3, salt=i, rank=source) for i in range(300)], 0]


@ulfm_only
def works_are_looked_at_before_they_pile_up(s: Side) -> Any:
    """Sends to oneself are over at once: the group must not hold all 2000."""
    for i in range(1000):
        dist.isend(s.values(3, salt=i), s.rank, group=s.world)
        dist.irecv(torch.empty(3), s.rank, group=s.world)
    return len(s.world._pending) < 200, True


@ulfm_only
def a_wait_with_a_timeout(s: Side) -> Any:
    partner = s.rank ^ 1
    tensor = torch.empty(3)
    receiving = dist.irecv(tensor, partner, group=s.world)
    started = time.monotonic()
    error = error_of(lambda: receiving.wait(timedelta(seconds=0.2)))
    in_time = 0.2 <= time.monotonic() - started < 5
    dist.barrier(group=s.world)
    dist.send(s.values(3), partner, group=s.world)
    receiving.wait()
    return [error, in_time, tensor], ["RuntimeError", True, s.values(3, rank=partner)]


@both
def barrier_waits(s: Side) -> Any:
    if s.rank == 1:
        time.sleep(0.3)
    started = time.monotonic()
    dist.barrier(group=s.world)
    dist.barrier(group=s.world, async_op=True).wait()
    return s.rank == 1 or time.monotonic() - started > 0.1


@both
def monitored_barrier(s: Side) -> Any:
    if s.rank == 2:
        time.sleep(0.2)
    return s.world.monitored_barrier(timedelta(seconds=20), True)


@ulfm_only
def monitored_barrier_names_the_missing(s: Side) -> Any:
    if s.rank == 2:
        time.sleep(1.0)
        dist.barrier(group=s.world_again)
        return None, None
    try:
        s.world.monitored_barrier(timedelta(seconds=0.3), True)
    except RuntimeError as error:
        text = str(error)
    dist.barrier(group=s.world_again)
    return ("Ranks 2 failed" in text) if s.rank == 0 else ("did not release" in text), True


@ulfm_only
def barrier_with_a_timeout(s: Side) -> Any:
    if s.rank == 0:
        time.sleep(0.5)
    limit = timedelta(seconds=30 if s.rank == 0 else 0.1)
    error = error_of(lambda: dist.barrier(group=s.world, timeout=limit))
    return error, None if s.rank == 0 else "RuntimeError"


@ulfm_only
def state_in_chunks(s: Side) -> Any:
    """What a newcomer gets: of any type, through host memory where MPI cannot read it."""
    transfer.CHUNK_BYTES, usual = 100, transfer.CHUNK_BYTES
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

    def tensors(rank: int) -> list[torch.Tensor]:
        made = [s.values(7, 11, rank=rank).to(kind) for kind in kinds]
        return [*made, s.strided(s.values(4, 5, rank=rank)), torch.empty(0), torch.tensor(rank)]

    mine, tags = tensors(s.rank), (71, 72)
    if s.rank % 2:
        nbytes = transfer.receive_tensors(MPI.COMM_WORLD, s.rank - 1, mine, tags)
    else:
        nbytes = transfer.send_tensors(MPI.COMM_WORLD, s.rank + 1, mine, tags)
    transfer.CHUNK_BYTES = usual
    expected = tensors(s.rank - s.rank % 2)
    return [nbytes, *mine], [sum(t.nbytes for t in expected), *expected]
