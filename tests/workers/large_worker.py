"""Messages beyond 2 GiB and beyond 2^31 elements, on two ranks of about 7 GB each.

Arguments: a directory for the findings.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

from megatron_ft.world.backend import PlainPolicy, register

RANK = MPI.COMM_WORLD.rank
MANY = 2**31 + 12_345
"""Elements of one byte: more than a C int counts, and no multiple of anything useful."""


def is_all(tensor: torch.Tensor, value: int) -> bool:
    """Whether every element is ``value``, without a mask as large as the tensor."""
    return bool(tensor.min() == value) and bool(tensor.max() == value)


def filled(numel: int, value: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.full((numel,), value, dtype=dtype)


def many_bytes() -> dict[str, bool]:
    found = {}
    tensor = filled(MANY, RANK + 1)
    dist.all_reduce(tensor)
    found["all_reduce"] = is_all(tensor, 3)
    tensor.fill_(RANK + 1)
    dist.all_reduce(tensor, async_op=True).wait()
    found["all_reduce_async"] = is_all(tensor, 3)
    tensor.fill_(RANK + 1)
    dist.broadcast(tensor, 1)
    found["broadcast"] = is_all(tensor, 2)
    tensor.fill_(RANK + 5)
    dist.reduce(tensor, 0)
    found["reduce"] = is_all(tensor, 11 if RANK == 0 else 6)
    tensor.fill_(RANK + 1)
    if RANK == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor)
    found["message"] = is_all(tensor, 1)
    return found


def many_bytes_in_parts() -> dict[str, bool]:
    found = {}
    mine, whole = filled(MANY, RANK + 1), torch.empty(2 * MANY, dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, mine)
    found["all_gather"] = is_all(whole[:MANY], 1) and is_all(whole[MANY:], 2)
    whole.fill_(RANK + 1)
    dist.reduce_scatter_tensor(mine, whole)
    found["reduce_scatter"] = is_all(mine, 3)
    del mine, whole
    half = MANY // 2
    source, target = filled(2 * half, RANK + 1), torch.empty(2 * half, dtype=torch.uint8)
    dist.all_to_all_single(target, source)
    found["all_to_all"] = is_all(target[:half], 1) and is_all(target[half:], 2)
    return found


def many_floats() -> dict[str, bool]:
    tensor = filled(600_000_000, RANK + 1, torch.float32)
    dist.all_reduce(tensor)
    return {"all_reduce_floats": is_all(tensor, 3)}


def main(directory: Path) -> None:
    faulthandler.dump_traceback_later(280, exit=True)
    register(PlainPolicy())
    dist.init_process_group("ulfm", store=dist.HashStore(), rank=RANK, world_size=2)
    found = many_bytes() | many_bytes_in_parts() | many_floats()
    (directory / f"found-{RANK}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
