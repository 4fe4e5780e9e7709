"""CheckFree's parts on MPI ranks: ``checkfree_worker.py FOLDER CASE,CASE -- <Megatron's flags>``.

Megatron's own model, optimizer, training step and checkpoints, over ulfm, on made-up tokens. Each
rank writes what it saw to ``FOLDER/rank-N.json``. ``checkfree_cases`` has the cases.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]


def main() -> None:
    from megatron_ft.world.environment import rank_environment

    rank_environment()
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    sys.argv[1:] = sys.argv[4:]

    from megatron_ft.patches import adam, checkfree, cpu_device, wheel
    from megatron_ft.patches.registry import registry

    registry.install(cpu_device.PATCHES)
    registry.install(wheel.PATCHES)
    registry.install(adam.PATCHES)
    registry.install(checkfree.PATCHES)

    from checkfree_cases import CASES, Job
    from mpi4py import MPI

    job = Job(MPI.COMM_WORLD.Dup(), folder)
    found = {}
    for name in names:
        found[name] = CASES[name](job)
        job.comm.Barrier()
    (folder / f"rank-{job.comm.rank}.json").write_text(json.dumps(found))
    job.comm.Barrier()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        # Left alone, this rank would wait for the others in MPI_Finalize, and they for it.
        from mpi4py import MPI

        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
