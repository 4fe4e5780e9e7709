"""Cases of operations that move elements as they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from side import (
    COPY_DTYPES,
    GLOO_DTYPES,
    ULFM_ONLY,
    Case,
    Side,
    both,
    short,
    ulfm_only,
)


def _copies(dtype: torch.dtype) -> Case:
    def case(s: Side) -> Any:
        """Every copying operation, against what the ranks are known to have."""
        group, n = s.world, s.size
        mine = s.values(2, 3, dtype=dtype)
        all_of = [s.values(2, 3, dtype=dtype, rank=r) for r in range(n)]
        got: list[Any] = []
        expected: list[Any] = []

        tensor = mine.clone()
        dist.broadcast(tensor, 1, group=group)
        got.append(tensor)
        expected.append(all_of[1])

        parts = [torch.empty_like(mine) for _ in range(n)]
        dist.all_gather(parts, mine, group=group)
        got.append(parts)
        expected.append(all_of)

        for shape in ((2 * n, 3), (n, 2, 3)):
            whole = torch.empty(shape, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine, group=group)
            got.append(whole)
            expected.append(torch.cat(all_of).view(shape))

        parts = [torch.empty_like(mine) for _ in range(n)]
        dist.gather(mine, parts if s.rank == 2 else None, 2, group=group)
        got.append(parts if s.rank == 2 else None)
        expected.append(all_of if s.rank == 2 else None)

        tensor = torch.empty_like(mine)
        sent = [s.values(2, 3, dtype=dtype, rank=3, salt=i) for i in range(n)]
        dist.scatter(tensor, sent if s.rank == 3 else None, 3, group=group)
        got.append(tensor)
        expected.append(sent[s.rank])

        parts = [torch.empty_like(mine) for _ in range(n)]
        sent = [s.values(2, 3, dtype=dtype, salt=i) for i in range(n)]
        dist.all_to_all(parts, sent, group=group)
        got.append(parts)
        expected.append([s.values(2, 3, dtype=dtype, rank=r, salt=s.rank) for r in range(n)])

        tensor = torch.empty_like(mine)
        sending = dist.isend(mine, (s.rank + 1) % n, group=group)
        dist.recv(tensor, (s.rank - 1) % n, group=group)
        sending.wait()
        got.append(tensor)
        expected.append(all_of[s.rank - 1])
        return got, expected

    return case


for _dtype in COPY_DTYPES:
    ULFM_ONLY[f"copies_{short(_dtype)}"] = _copies(_dtype)


@both
def broadcast_from_each_root(s: Side) -> Any:
    tensors = [s.values(1000, dtype=d) for d in GLOO_DTYPES] + [s.values(), s.values(0)]
    for root in range(s.size):
        for tensor in tensors:
            dist.broadcast(tensor, root, group=s.world)
    return tensors


@both
def broadcast_strided(s: Side) -> Any:
    tensors = [s.strided(s.values(4, 5)), s.strided(s.values(4, 5).to(torch.int8))]
    for tensor in tensors:
        dist.broadcast(tensor, 2, group=s.world)
    return tensors


@both
def all_gather_sizes(s: Side) -> Any:
    gathered = []
    for n in (0, 1, 7, 5000, 100_003):
        parts = [torch.empty(n) for _ in range(s.size)]
        dist.all_gather(parts, s.values(n, salt=n), group=s.world)
        gathered.append(parts)
    return gathered


@both
def all_gather_strided(s: Side) -> Any:
    parts = [s.strided(torch.zeros(3, 4)) for _ in range(s.size)]
    dist.all_gather(parts, s.strided(s.values(3, 4)), group=s.world)
    return parts


@both
def all_gather_into_parts_of_one_tensor(s: Side) -> Any:
    whole = torch.zeros(s.size * 6 + 4)
    parts = [whole[2 + 6 * i : 8 + 6 * i] for i in range(s.size)]
    dist.all_gather(parts, s.values(6), group=s.world)
    return whole


@both
def all_gather_into_tensor(s: Side) -> Any:
    wholes = []
    for n in (0, 1, 7, 5000, 100_003):
        whole = torch.empty(n * s.size)
        dist.all_gather_into_tensor(whole, s.values(n, salt=n), group=s.world)
        wholes.append(whole)
    return wholes


@both
def all_gather_of_a_part_of_the_output(s: Side) -> Any:
    whole = torch.zeros(5 * s.size)
    mine = whole[5 * s.rank : 5 * s.rank + 5]
    mine.copy_(s.values(5))
    dist.all_gather_into_tensor(whole, mine, group=s.world)
    return whole


@ulfm_only
def all_gather_of_another_part_of_the_output(s: Side) -> Any:
    whole = torch.zeros(5 * s.size)
    whole[:5] = s.values(5)
    dist.all_gather_into_tensor(whole, whole[:5], group=s.world)
    parts = [torch.zeros(5) for _ in range(s.size)]
    parts[0].copy_(s.values(5))
    dist.all_gather(parts, parts[0], group=s.world)
    expected = torch.cat([s.values(5, rank=r) for r in range(s.size)])
    return [whole, torch.cat(parts)], [expected, expected]


@ulfm_only
def all_gather_uneven(s: Side) -> Any:
    parts = [torch.empty(2 * r, 3) for r in range(s.size)]
    dist.all_gather(parts, s.values(2 * s.rank, 3), group=s.world)
    return parts, [s.values(2 * r, 3, rank=r) for r in range(s.size)]


@both
def gather_and_scatter_strided(s: Side) -> Any:
    parts = [s.strided(torch.zeros(3, 2)) for _ in range(s.size)] if s.rank == 1 else None
    dist.gather(s.strided(s.values(3, 2)), parts, 1, group=s.world)
    output = s.strided(torch.zeros(3, 2))
    sent = [s.strided(s.values(3, 2, salt=i)) for i in range(s.size)] if s.rank == 2 else None
    dist.scatter(output, sent, 2, group=s.world)
    return parts, output


@both
def gather_and_scatter_nothing(s: Side) -> Any:
    parts = [torch.zeros(0) for _ in range(s.size)] if s.rank == 0 else None
    dist.gather(torch.zeros(0), parts, 0, group=s.world)
    output = torch.zeros(0)
    dist.scatter(output, parts, 0, group=s.world)
    return parts, output


@both
def all_to_all_lists(s: Side) -> Any:
    outputs = [torch.empty(4) for _ in range(s.size)]
    dist.all_to_all(outputs, [s.values(4, salt=i) for i in range(s.size)], group=s.world)
    return outputs


@ulfm_only
def all_to_all_uneven_lists(s: Side) -> Any:
    outputs = [torch.empty(r + 2 * s.rank) for r in range(s.size)]
    dist.all_to_all(outputs, [s.values(s.rank + 2 * i) for i in range(s.size)], group=s.world)
    return outputs, [s.values(r + 2 * s.rank, rank=r) for r in range(s.size)]


@both
def all_to_all_single(s: Side) -> Any:
    even = torch.empty(2 * s.size, 3)
    dist.all_to_all_single(even, s.values(2 * s.size, 3), group=s.world)
    # From rank r to rank i go r * i rows, so that some send or receive nothing.
    received = [r * s.rank for r in range(s.size)]
    sent = [s.rank * i for i in range(s.size)]
    uneven = torch.empty(sum(received), 2)
    source = s.strided(s.values(sum(sent), 2))
    dist.all_to_all_single(uneven, source, received, sent, group=s.world)
    return even, uneven


@both
def objects(s: Side) -> Any:
    mine = {"rank": s.rank, "text": "x" * (1 + 1000 * s.rank)}
    gathered: list[Any] = [None] * s.size
    dist.all_gather_object(gathered, mine, group=s.world)
    at_two: list[Any] | None = [None] * s.size if s.rank == 2 else None
    dist.gather_object(mine, at_two, 2, group=s.world)
    sent: list[Any] = [s.rank, None, mine]
    dist.broadcast_object_list(sent, 3, group=s.world)
    output: list[Any] = [None]
    parts = [("part", i) for i in range(s.size)] if s.rank == 1 else None
    dist.scatter_object_list(output, parts, 1, group=s.world)
    message: list[Any] = [mine, 3] if s.rank == 0 else [None, None]
    if s.rank == 0:
        dist.send_object_list(message, 1, group=s.world)
    elif s.rank == 1:
        dist.recv_object_list(message, 0, group=s.world)
    return gathered, at_two, sent, output, message
