"""Run the cases on this rank and write down, for each, what was wrong with it.

Phases, in one launch:
1. every case on gloo and on ulfm;
2. every case on ulfm again with each tensor staged through a host buffer, against the same gloo
   results;
3. a few cases with the backend deliberately broken: they must be found different.

Arguments: a directory for the results and for gloo's store.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend_cases import BOTH, ULFM_ONLY
from compare import difference
from mpi4py import MPI
from side import Case, Side

from megatron_ft.world import dtypes, movement, staging
from megatron_ft.world.backend import PlainPolicy, register

comm = MPI.COMM_WORLD.Dup()


def make_side(name: str) -> Side:
    def group(ranks: list[int], **kwargs: Any) -> Any:
        return dist.new_group(ranks, backend=name, timeout=timedelta(seconds=30), **kwargs)

    everyone = list(range(comm.size))
    solos = [group([rank]) for rank in everyone]
    return Side(
        name,
        comm.rank,
        comm.size,
        world=group(everyone),
        world_again=group(everyone),
        pair=group([1, 3]),
        turned=group([3, 0, 2], sort_ranks=False),
        solo=solos[comm.rank],
    )


def outcome(case: Case, side: Side) -> Any:
    try:
        return case(side)
    except Exception:
        return f"raised {traceback.format_exc()}"


def run_cases(gloo: Side, ulfm: Side) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    expected: dict[str, Any] = {}
    for name, case in BOTH.items():
        expected[name] = outcome(case, gloo)
        comm.Barrier()
        found[name] = difference(outcome(case, ulfm), expected[name])
        if isinstance(expected[name], str) and expected[name].startswith("raised"):
            found[name] = f"on gloo: {expected[name]}"
        comm.Barrier()
    for name, case in ULFM_ONLY.items():
        found[name] = own(case, ulfm)
    staging.always = True
    for name, case in BOTH.items():
        found[f"staged_{name}"] = difference(outcome(case, ulfm), expected[name])
        comm.Barrier()
    for name, case in ULFM_ONLY.items():
        found[f"staged_{name}"] = own(case, ulfm)
    staging.always = False
    found |= break_and_look(gloo, ulfm)
    return found


def own(case: Case, ulfm: Side) -> str | None:
    try:
        got, expected = case(ulfm)
    except Exception:
        return f"raised {traceback.format_exc()}"
    finally:
        comm.Barrier()
    return difference(got, expected)


def break_and_look(gloo: Side, ulfm: Side) -> dict[str, str | None]:
    """Wrong results on purpose; a comparison that finds nothing is what is wrong here."""

    def must_differ(name: str) -> str | None:
        want = outcome(BOTH[name], gloo)
        comm.Barrier()
        got = outcome(BOTH[name], ulfm)
        comm.Barrier()
        return None if difference(got, want) else "the wrong result was not noticed"

    found = {}
    dtypes._cache.clear()
    right, dtypes._OPS[dist.ReduceOp.SUM] = dtypes._OPS[dist.ReduceOp.SUM], MPI.MAX
    found["broken_sum"] = must_differ("all_reduce_float32_SUM")
    found["broken_reduce_scatter"] = must_differ("reduce_scatter_list")
    dtypes._OPS[dist.ReduceOp.SUM] = right
    dtypes._cache.clear()

    land, staging.flat_land = staging.flat_land, lambda host, tensors: None
    found["broken_all_gather"] = must_differ("all_gather_sizes")
    staging.flat_land = land

    rows, movement.checks.splits = movement.checks.splits, lambda op, sizes, t, n: [0] * n
    found["broken_all_to_all"] = must_differ("all_to_all_single")
    movement.checks.splits = rows
    return found


def default_group(found: dict[str, str | None]) -> None:
    """ulfm as the default group, without a store in common; destroyed and made again."""
    everyone = torch.arange(float(comm.size))
    for attempt in range(3):
        dist.init_process_group(
            "ulfm", store=dist.HashStore(), rank=comm.rank, world_size=comm.size
        )
        tensor = torch.tensor([float(comm.rank)])
        dist.all_reduce(tensor)
        part = dist.new_group([0, comm.size - 1])
        parts = list(torch.zeros(comm.size).split(1))
        dist.all_gather(parts, torch.tensor([float(comm.rank)]))
        got = [tensor, torch.cat(parts), dist.get_backend(), dist.get_world_size(part)]
        size = 2 if comm.rank in (0, comm.size - 1) else -1
        want = [everyone.sum(0, keepdim=True), everyone, "ulfm", size]
        found[f"default_group_{attempt}"] = difference(got, want)
        dist.destroy_process_group()


def groups_are_freed(found: dict[str, str | None]) -> None:
    """Make and destroy many groups: contexts, threads and open files must not add up."""
    dist.init_process_group("ulfm", store=dist.HashStore(), rank=comm.rank, world_size=comm.size)

    def make_and_destroy(count: int) -> None:
        for _ in range(count):
            group = dist.new_group()
            dist.all_reduce(torch.ones(2), group=group)
            dist.destroy_process_group(group)

    def in_use() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    make_and_destroy(10)
    before = in_use()
    make_and_destroy(300)
    found["groups_are_freed"] = difference(in_use(), before)
    dist.destroy_process_group()


def main(directory: Path) -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    store = dist.FileStore(str(directory / "store"), comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    register(PlainPolicy())
    gloo, ulfm = make_side("gloo"), make_side("ulfm")
    comm.Barrier()
    found = run_cases(gloo, ulfm)
    dist.destroy_process_group()
    default_group(found)
    groups_are_freed(found)
    (directory / f"found-{comm.rank}.json").write_text(json.dumps(found))
    comm.Barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
