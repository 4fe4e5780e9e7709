"""Cases of all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from side import (
    BOTH,
    GLOO_DTYPES,
    MORE_DTYPES,
    OPS,
    ULFM_ONLY,
    Case,
    Side,
    both,
    error_of,
    short,
    ulfm_only,
)
from torch.distributed import ReduceOp


def _all_reduce(dtype: torch.dtype, op: str) -> Case:
    def case(s: Side) -> Any:
        tensor = s.values(37, dtype=dtype)
        error = error_of(lambda: dist.all_reduce(tensor, getattr(ReduceOp, op), group=s.world))
        return error, None if error else tensor

    return case


for _dtype in GLOO_DTYPES:
    for _op in OPS:
        BOTH[f"all_reduce_{short(_dtype)}_{_op}"] = _all_reduce(_dtype, _op)
for _dtype in (torch.complex64, torch.complex128):
    for _op in ("SUM", "AVG", "MAX", "PRODUCT"):
        BOTH[f"all_reduce_{short(_dtype)}_{_op}"] = _all_reduce(_dtype, _op)


def _all_reduce_more(dtype: torch.dtype, op: str) -> Case:
    def case(s: Side) -> Any:
        tensor = s.values(37, dtype=dtype)
        dist.all_reduce(tensor, op=getattr(ReduceOp, op), group=s.world)
        wide = torch.stack([s.values(37, dtype=dtype, rank=r).long() for r in range(s.size)])
        expected = {"SUM": wide.sum(0), "MIN": wide.amin(0), "MAX": wide.amax(0)}[op]
        return tensor, expected.to(dtype)

    return case


for _dtype in MORE_DTYPES:
    for _op in ("SUM", "MIN", "MAX"):
        ULFM_ONLY[f"all_reduce_{short(_dtype)}_{_op}"] = _all_reduce_more(_dtype, _op)


@both
def all_reduce_sizes(s: Side) -> Any:
    tensors = [s.values(n, salt=n) for n in (0, 1, 2, 3, 1000, 65537, 300_001)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=s.world)
    return tensors


@both
def reduce_large(s: Side) -> Any:
    kept = []
    for dtype in (torch.float32, torch.bfloat16):
        tensor = s.values(5_000_001, dtype=dtype)
        dist.reduce(tensor, 1, group=s.world)
        kept += [tensor] if s.rank == 1 else []
    tensor = s.values(5_000_001, dtype=torch.bfloat16)
    work = dist.all_reduce(tensor, ReduceOp.AVG, group=s.world, async_op=True)
    work.wait()
    return kept, tensor


@both
def all_reduce_shapes(s: Side) -> Any:
    tensors = [s.values(), s.values(1, 1), s.values(3, 0, 2), s.values(2, 3, 4)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=s.world)
    return tensors


@both
def all_reduce_strided(s: Side) -> Any:
    tensors = [s.strided(s.values(5, 6, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    tensors += [s.values(5, 6).t(), s.values(5, 6, 7).permute(2, 0, 1)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=s.world)
    return tensors


@ulfm_only
def all_reduce_strides_differ_between_ranks(s: Side) -> Any:
    got, expected = [], []
    for shape in ((4, 6), (2500, 2000)):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = s.values(*shape, dtype=dtype)
            mine = tensor.t().contiguous().t() if s.rank % 2 else tensor
            dist.all_reduce(mine, group=s.world)
            got.append(mine)
            expected.append(sum(s.values(*shape, rank=r) for r in range(s.size)).to(dtype))
    return got, expected


@ulfm_only
def all_reduce_negated_view(s: Side) -> Any:
    tensor = torch.complex(s.values(9), s.values(9, salt=1)).conj().imag
    assert tensor.is_neg()
    dist.all_reduce(tensor, group=s.world)
    return tensor.clone(), -sum(s.values(9, salt=1, rank=r) for r in range(s.size))


@both
def all_reduce_of_a_leaf_that_requires_grad(s: Side) -> Any:
    tensors = [torch.nn.Parameter(s.values(7, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=s.world)
        dist.broadcast(tensor, 1, group=s.world)
    return tensors


@ulfm_only
def average_of_a_leaf_that_requires_grad(s: Side) -> Any:
    tensors = [torch.nn.Parameter(s.values(7, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    for tensor in tensors:
        dist.all_reduce(tensor, ReduceOp.AVG, group=s.world)
    average = sum(s.values(7, rank=r) for r in range(s.size)) / s.size
    return tensors, [torch.nn.Parameter(average), torch.nn.Parameter(average.bfloat16())]


@ulfm_only
def all_reduce_premul_sum(s: Side) -> Any:
    op = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
    tensors = [s.values(11, dtype=d) for d in (torch.float32, torch.bfloat16)]
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=s.world)
    total = sum(s.values(11, rank=r) for r in range(s.size)) * 0.5
    return tensors, [total, total.bfloat16()]


@ulfm_only
def half_precision_is_reduced_in_float32(s: Side) -> Any:
    # 256 + 1 has no bfloat16: adding 1 to 256 pair by pair would lose every 1.
    tensor = torch.tensor([256.0 if s.rank == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(tensor, group=s.world)
    return tensor, torch.tensor([256.0 + s.size - 1]).bfloat16()


@both
def reduce_to_each_root(s: Side) -> Any:
    kept = []
    for root in range(s.size):
        for dtype in GLOO_DTYPES:
            tensor = s.values(9, dtype=dtype, salt=root)
            dist.reduce(tensor, root, group=s.world)
            kept += [tensor] if root == s.rank else []
    return kept


@both
def reduce_ops(s: Side) -> Any:
    kept = []
    for op in OPS[:5]:
        tensor = s.strided(s.values(9))
        dist.reduce(tensor, 1, op=getattr(ReduceOp, op), group=s.world)
        kept += [tensor] if s.rank == 1 else []
    return kept


@ulfm_only
def reduce_leaves_the_others_tensors(s: Side) -> Any:
    tensors = [s.values(9, dtype=d) for d in (torch.float32, torch.bfloat16)]
    premul = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
    for tensor in tensors:
        for op in (ReduceOp.SUM, ReduceOp.AVG, premul):
            dist.reduce(tensor, 2, op=op, group=s.world)
    if s.rank == 2:
        return None, None
    return tensors, [s.values(9), s.values(9).bfloat16()]


@both
def reduce_scatter_list(s: Side) -> Any:
    outputs = []
    for dtype in GLOO_DTYPES:
        output = torch.empty(5, dtype=dtype)
        parts = [s.values(5, dtype=dtype, salt=i) for i in range(s.size)]
        dist.reduce_scatter(output, parts, group=s.world)
        outputs.append(output)
    return outputs


@both
def reduce_scatter_uneven_list(s: Side) -> Any:
    output = torch.empty(s.rank * 2)
    parts = [s.values(i * 2, salt=i) for i in range(s.size)]
    dist.reduce_scatter(output, parts, op=ReduceOp.MAX, group=s.world)
    return output


@both
def reduce_scatter_single(s: Side) -> Any:
    outputs = []
    for op in OPS[:5]:
        for dtype in (torch.float32, torch.bfloat16):
            output = torch.empty(3, 2, dtype=dtype)
            source = s.values(3 * s.size, 2, dtype=dtype)
            dist.reduce_scatter_tensor(output, source, op=getattr(ReduceOp, op), group=s.world)
            outputs.append(output)
    return outputs


@ulfm_only
def reduce_scatter_into_its_own_input(s: Side) -> Any:
    got, expected = [], []
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        source = s.values(8 * s.size)
        output = source[8 * s.rank : 8 * s.rank + 8]
        dist.reduce_scatter_tensor(output, source, op=op, group=s.world)
        total = sum(s.values(8 * s.size, rank=r) for r in range(s.size))
        scale = s.size if op == ReduceOp.AVG else 1
        got.append(output)
        expected.append((total / scale)[8 * s.rank : 8 * s.rank + 8])
    return got, expected


@ulfm_only
def reduce_scatter_leaves_its_input(s: Side) -> Any:
    source = s.values(4 * s.size)
    premul = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
    output = torch.empty(4)
    for op in (ReduceOp.SUM, ReduceOp.AVG, premul):
        dist.reduce_scatter_tensor(output, source, op=op, group=s.world)
    total = 2 * sum(s.values(4 * s.size, rank=r) for r in range(s.size))
    return [source, output], [s.values(4 * s.size), total[4 * s.rank : 4 * s.rank + 4]]
