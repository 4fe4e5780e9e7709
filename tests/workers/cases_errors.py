"""Cases of wrong use: the kind of error must be that of gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from side import (
    BOTH,
    Case,
    Side,
    error_of,
    ulfm_only,
)
from torch.distributed import ReduceOp

WRONG: dict[str, Callable[[Side], Any]] = {
    "broadcast_root": lambda s: s.world.broadcast(torch.ones(2), 7),
    "reduce_root": lambda s: s.world.reduce(torch.ones(2), -1),
    "outputs_too_few": lambda s: dist.all_gather([torch.empty(2)], torch.ones(2), group=s.world),
    "output_dtype": lambda s: dist.all_gather(
        [torch.empty(2, dtype=torch.int64)] * s.size, torch.ones(2), group=s.world
    ),
    "output_dtype_below": lambda s: s.world.allgather(
        [[torch.empty(2, dtype=torch.int64)] * s.size], [torch.ones(2)]
    ),
    "output_size": lambda s: dist.all_gather(
        [torch.empty(3)] * s.size, torch.ones(2), group=s.world
    ),
    "whole_size": lambda s: dist.all_gather_into_tensor(
        torch.empty(2 * s.size + 1), torch.ones(2), group=s.world
    ),
    "whole_dtype": lambda s: dist.all_gather_into_tensor(
        torch.empty(2 * s.size, dtype=torch.float64), torch.ones(2), group=s.world
    ),
    "reduce_scatter_size": lambda s: dist.reduce_scatter_tensor(
        torch.empty(2), torch.ones(2 * s.size + 1), group=s.world
    ),
    "reduce_scatter_length": lambda s: dist.reduce_scatter(
        torch.empty(2), [torch.ones(2)] * (s.size - 1), group=s.world
    ),
    "reduce_scatter_dtype": lambda s: dist.reduce_scatter(
        torch.empty(2), [torch.ones(2).double()] * s.size, group=s.world
    ),
    "gather_list_off_root": lambda s: dist.gather(
        torch.ones(2), [torch.empty(2)] * s.size, (s.rank + 1) % s.size, group=s.world
    ),
    "gather_no_list": lambda s: dist.gather(torch.ones(2), None, s.rank, group=s.world),
    "gather_size": lambda s: dist.gather(
        torch.ones(2), [torch.empty(3)] * s.size, s.rank, group=s.world
    ),
    "scatter_no_list": lambda s: dist.scatter(torch.ones(2), None, s.rank, group=s.world),
    "scatter_size": lambda s: dist.scatter(
        torch.ones(2), [torch.empty(3)] * s.size, s.rank, group=s.world
    ),
    "all_to_all_splits": lambda s: dist.all_to_all_single(
        torch.empty(8), torch.ones(8), [1] * s.size, [1] * s.size, group=s.world
    ),
    "all_to_all_lengths": lambda s: dist.all_to_all(
        [torch.empty(1)] * (s.size - 1), [torch.ones(1)] * s.size, group=s.world
    ),
    "average_of_integers": lambda s: dist.all_reduce(
        torch.ones(2, dtype=torch.int64), op=ReduceOp.AVG, group=s.world
    ),
    "bits_of_floats": lambda s: dist.all_reduce(torch.ones(2), op=ReduceOp.BXOR, group=s.world),
    "float8_sum": lambda s: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn), group=s.world),
    "complex_product": lambda s: dist.all_reduce(
        torch.ones(2, dtype=torch.complex64), op=ReduceOp.PRODUCT, group=s.world
    ),
    "not_a_tensor": lambda s: dist.all_reduce([1.0], group=s.world),
    "send_to_oneself": lambda s: dist.send(torch.ones(1), s.rank, group=s.world),
}


def _wrong(call: Callable[[Side], Any]) -> Case:
    return lambda s: error_of(lambda: call(s))


for _name, _call in WRONG.items():
    BOTH[f"wrong_{_name}"] = _wrong(_call)


@ulfm_only
def wrong_all_to_all_rows(s: Side) -> Any:
    call = lambda: dist.all_to_all_single(torch.empty(9), torch.ones(9), group=s.world)  # noqa: E731
    return error_of(call), "RuntimeError"


@ulfm_only
def wrong_receive_too_small(s: Side) -> Any:
    partner = s.rank ^ 1
    sending = dist.isend(torch.ones(5), partner, group=s.world)
    error = error_of(lambda: dist.recv(torch.empty(3), partner, group=s.world))
    sending.wait()
    return error, "RuntimeError"


@ulfm_only
def wrong_several_tensors(s: Side) -> Any:
    call = lambda: s.world.allreduce([torch.ones(1), torch.ones(1)])  # noqa: E731
    return error_of(call), "RuntimeError"


@ulfm_only
def wrong_rank_of_a_message(s: Side) -> Any:
    calls = [
        lambda: s.world.send([torch.ones(1)], 17, 0),
        lambda: s.world.recv([torch.ones(1)], -3),
    ]
    return [error_of(call) for call in calls], ["RuntimeError"] * 2
