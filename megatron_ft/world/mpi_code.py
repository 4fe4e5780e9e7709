"""Reads the machine code of Open MPI's libraries in this process, and adds to it.

Nothing here knows what is mended; see ``mpi_fix`` and ``mpi_fix_send``.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import struct
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("megatron_ft.world")

type Ranges = list[tuple[int, int]]

STUB = "ff25"
"""A jump through a table, by which libraries call exported functions."""


def library(prefix: str) -> tuple[ctypes.CDLL | None, Ranges]:
    """The loaded library whose file name begins so, and where its memory can be written."""
    path, writable = None, []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not Path(fields[5]).name.startswith(prefix):
            continue
        path = fields[5]
        if "w" in fields[1]:
            begin, end = (int(number, 16) for number in fields[0].split("-"))
            writable.append((begin, end))
    return None if path is None else ctypes.CDLL(path), writable


def address(lib: ctypes.CDLL, name: str) -> int:
    """Where an exported function begins.

    Raises:
        AttributeError: The library does not export it.
    """
    found = ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
    assert found is not None
    return found


def matches(at: int, pattern: str) -> bool:
    """Whether the code there is the pattern, in hexadecimal with ``??`` for any byte."""
    digits = pattern.replace(" ", "")
    pairs = [digits[i : i + 2] for i in range(0, len(digits), 2)]
    code = ctypes.string_at(at, len(pairs))
    return all(
        pair == "??" or int(pair, 16) == byte for pair, byte in zip(pairs, code, strict=True)
    )


def slot_of_call(after: int, function: int, writable: Ranges) -> int | None:
    """Where the table entry is by which a call or jump reaches ``function``.

    Args:
        after: The address behind the instruction, whose last four bytes say where it leads.
        function: Where the call is to end.
        writable: Memory that can be changed.

    Returns:
        None if it does not lead there, or the entry cannot be changed.
    """
    (jump,) = struct.unpack("<i", ctypes.string_at(after - 4, 4))
    stub = after + jump
    if not matches(stub, STUB):
        return None
    (offset,) = struct.unpack("<i", ctypes.string_at(stub + 2, 4))
    slot = stub + 6 + offset
    if not any(begin <= slot <= end - 8 for begin, end in writable):
        return None
    # Not called yet, it still leads to the loader, by way of the instruction after the jump.
    if ctypes.c_uint64.from_address(slot).value not in (function, stub + 6):
        return None
    return slot


def executable(nbytes: int) -> tuple[mmap.mmap, int]:
    """New memory for instructions, and its address; it lives as long as the object does.

    Raises:
        OSError: A hardened system.
    """
    memory = mmap.mmap(-1, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def mend(
    find: Callable[[], tuple[int, int] | None], make: Callable[[mmap.mmap, int, int], int]
) -> mmap.mmap | None:
    """Have calls of a function go through new instructions.

    Args:
        find: The table entry by which it is called and where it is; None for an unknown build.
        make: From new memory, its address and where the function is: writes the instructions there
            and says where they begin.

    Returns:
        The memory, which must be kept; None where nothing was changed.
    """
    try:
        found = find()
        if found is None:
            logger.debug("%s: this build of Open MPI is not known", find.__module__)
            return None
        memory, base = executable(8192)
    except OSError as error:
        logger.debug("%s: Open MPI stays as it is: %s", find.__module__, error)
        return None
    slot, function = found
    ctypes.c_uint64.from_address(slot).value = make(memory, base, function)
    return memory
