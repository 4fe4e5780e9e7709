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
import mmap
import struct

from megatron_ft.world import mpi_code

C_COLL = 0x158
"""Of ``ompi_communicator_t``: where its collectives are; null until it has some."""
REVOKED = 0x450
"""In them: what is called when the communicator is revoked."""

_REVOKE_LOCAL = (
    "0fb687 79010000 84c0 7565 53 4889fb 4084f6 7409 80bf7a01000000 7543 488b05 ???????? 400fb6f6 "
    "4889df c6837801000000 ff5030 488b83 58010000 4889df ff90 50040000"
)
_ITS_CALLER = "c6837801000000 be01000000 4889df e8"

_kept: list[mmap.mmap] = []


def install() -> bool:
    """Put the fix in place in this process; whether it is."""
    if _kept:
        return True
    memory = mpi_code.mend(_find, _write)
    if memory is not None:
        _kept.append(memory)
    return memory is not None


def _write(memory: mmap.mmap, base: int, revoke_local: int) -> int:
    """The empty set of collectives, what it calls, and the instructions that lend it."""
    lent, does_nothing, code = base, base + 4096, base + 4096 + 16
    struct.pack_into("<Q", memory, REVOKED, does_nothing)
    memory[4096 : 4096 + 3] = bytes.fromhex("31c0 c3")
    program = _program(lent, revoke_local)
    memory[4096 + 16 : 4096 + 16 + len(program)] = program
    return code


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
    lib, writable = mpi_code.library("libmpi.so")
    if lib is None:
        return None
    try:
        revoke_local = mpi_code.address(lib, "ompi_comm_revoke_local")
        caller = mpi_code.address(lib, "ompi_comm_set_rank_failed")
    except AttributeError:
        return None
    if not mpi_code.matches(revoke_local, _REVOKE_LOCAL):
        return None
    wanted = bytes.fromhex(_ITS_CALLER)
    at = ctypes.string_at(caller, 0x80).find(wanted)
    if at < 0:
        return None
    slot = mpi_code.slot_of_call(caller + at + len(wanted) + 4, revoke_local, writable)
    return None if slot is None else (slot, revoke_local)
