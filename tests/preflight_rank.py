"""A rank that prints what its preflight check says, as JSON. Imports no torch."""

import json

from mpi4py import MPI

from megatron_ft.world.environment import rank_environment
from megatron_ft.world.preflight import PreflightError, preflight

rank_environment()
try:
    words: dict[str, object] = {"ok": preflight()}
except PreflightError as error:
    words = {"error": str(error)}
if MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1:
    print(json.dumps(words), flush=True)
MPI.COMM_WORLD.Barrier()
