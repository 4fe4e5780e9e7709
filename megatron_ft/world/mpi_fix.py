"""Keeps Open MPI 5.0.11 alive when a death is noticed while a communicator is being made.

A new communicator is known to Open MPI before it has its collectives. When a process of it dies in
between, ``ompi_comm_revoke_local`` calls ``comm->c_coll->coll_...`` through a null pointer, and the
survivor that noticed the death ends with a segmentation fault. Each Split, Dup and Merge has that
window. A repair makes communicators, so a second death at that moment could take survivors along.

Here the call goes through a few instructions that lend such a communicator an empty set of
collectives for its time. The library's file is not touched. It is done only where the code of the
two functions concerned is, byte for byte, the one for which this was written; any other library is
left alone, and so is any other processor than x86-64.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import struct
from pathlib import Path

logger = logging.getLogger("megatron_ft.world")

C_COLL = 0x158
"""Of ``ompi_communicator_t``: where its collectives are; null until it has some."""
REVOKED = 0x450
"""In them: what is called when the communicator is revoked."""

_REVOKE_LOCAL = (
    "0fb687 79010000 84c0 7565 53 4889fb 4084f6 7409 80bf7a01000000 7543 488b05 ???????? 400fb6f6 "
    "4889df c6837801000000 ff5030 488b83 58010000 4889df ff90 50040000"
)
_ITS_CALLER = "c6837801000000 be01000000 4889df e8"
_STUB = "ff25"

_kept: list[mmap.mmap] = []


def install() -> bool:
    """Put the fix in place in this process; whether it is."""
    if _kept:
        return True
    try:
        found = _find()
    except OSError as error:
        logger.debug("Open MPI is not mended: %s", error)
        return False
    if found is None:
        logger.debug("Open MPI is not mended: this build is not known")
        return False
    slot, revoke_local = found
    try:
        memory = mmap.mmap(-1, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError as error:  # a hardened system
        logger.debug("Open MPI is not mended: %s", error)
        return False
    _kept.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    lent, does_nothing, code = base, base + 4096, base + 4096 + 16
    struct.pack_into("<Q", memory, REVOKED, does_nothing)
    memory[4096 : 4096 + 3] = bytes.fromhex("31c0 c3")
    program = _program(lent, revoke_local)
    memory[4096 + 16 : 4096 + 16 + len(program)] = program
    ctypes.c_uint64.from_address(slot).value = code
    return True


def _program(lent: int, revoke_local: int) -> bytes:
    """The instructions: from (comm, collectives only) to what ``ompi_comm_revoke_local`` returns.

    Another thread may be making the communicator: its own collectives are never overwritten.
    """
    field = struct.pack("<i", C_COLL).hex()
    call = f"48b8 {struct.pack('<Q', revoke_local).hex()}"  # mov rax, revoke_local
    lend = f"48b9 {struct.pack('<Q', lent).hex()}"  # mov rcx, lent
    have = bytes.fromhex(f"5b {call} ffe0")  # pop rbx; jmp rax
    lacks = bytes.fromhex(
        f"{call} ffd0 89c2"  # call rax; mov edx, eax
        f" 48b8 {struct.pack('<Q', lent).hex()} 31c9"  # mov rax, lent; xor ecx, ecx
        f" f0480fb18b {field}"  # lock cmpxchg [rbx + c_coll], rcx
        " 89d0 5b c3"  # mov eax, edx; pop rbx; ret
    )
    begin = bytes.fromhex(
        "53 4889fb 31c0"  # push rbx; mov rbx, rdi; xor eax, eax
        f" {lend} f0480fb18b {field}"  # lock cmpxchg [rbx + c_coll], rcx
        f" 75 {len(lacks):02x}"  # jne have
    )
    return begin + lacks + have


def _find() -> tuple[int, int] | None:
    """Where libmpi keeps the address of ``ompi_comm_revoke_local``, and that address."""
    path, writable = _library()
    if path is None:
        return None
    library = ctypes.CDLL(path)
    try:
        revoke_local = _address(library, "ompi_comm_revoke_local")
        caller = _address(library, "ompi_comm_set_rank_failed")
    except AttributeError:
        return None
    if not _matches(revoke_local, _REVOKE_LOCAL):
        return None
    wanted = bytes.fromhex(_ITS_CALLER)
    code = ctypes.string_at(caller, 0x80)
    at = code.find(wanted)
    if at < 0:
        return None
    after = caller + at + len(wanted) + 4
    (jump,) = struct.unpack("<i", ctypes.string_at(after - 4, 4))
    stub = after + jump
    if not _matches(stub, _STUB):
        return None
    (offset,) = struct.unpack("<i", ctypes.string_at(stub + 2, 4))
    slot = stub + 6 + offset
    if not any(begin <= slot < end - 8 for begin, end in writable):
        return None
    # Not called yet, it still leads to the loader, by way of the instruction after the jump.
    if ctypes.c_uint64.from_address(slot).value not in (revoke_local, stub + 6):
        return None
    return slot, revoke_local


def _library() -> tuple[str | None, list[tuple[int, int]]]:
    """The path of libmpi in this process, and where its memory can be written."""
    path, writable = None, []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not Path(fields[5]).name.startswith("libmpi.so"):
            continue
        path = fields[5]
        if "w" in fields[1]:
            begin, end = (int(number, 16) for number in fields[0].split("-"))
            writable.append((begin, end))
    return path, writable


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _matches(address: int, pattern: str) -> bool:
    """Whether the code there is the pattern, in hexadecimal with ``??`` for any byte."""
    digits = pattern.replace(" ", "")
    pairs = [digits[i : i + 2] for i in range(0, len(digits), 2)]
    code = ctypes.string_at(address, len(pairs))
    return all(
        pair == "??" or int(pair, 16) == byte for pair, byte in zip(pairs, code, strict=True)
    )
