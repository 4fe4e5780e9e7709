"""Keeps Open MPI 5.0.11 from waiting for itself when a peer dies in the middle of a large message.

When a connection closes, ``mca_btl_tcp_frag_recv`` takes the connection's lock for sending, marks
the connection as failed, and reports the death. The report breaks off collectives of the dead
process, and where one of its large messages has been announced and not been received, that one is
answered: by ``mca_btl_tcp_endpoint_send`` on the same connection, which waits for the lock that its
own thread holds, for ever. Gradients are large messages, so that is no rare death.

Here the call goes through a few instructions that refuse to send on a failed connection, as the
function itself does once it has the lock; as with ``mpi_fix``, only where it knows the code.
"""

from __future__ import annotations

import mmap
import struct

from megatron_ft.world import mpi_code

_SEND = (
    "4157 4989ff 4156 4155 4154 55 4889f5 53 4881ecb8000000 488b1d???????? 803b00 0f85f9020000"
    " 8b4770 41bcf4ffffff 83f803 7464"
)
_CALLER, _CALLER_END = "mca_btl_tcp_send", 0xBB + 5
"""It ends with a jump to the function."""
_FAILED = bytes.fromhex("837f7003 7506")  # cmp dword [rdi + state], FAILED; jne past the return
_RETURN = bytes.fromhex("b8f4ffffff c3")  # mov eax, OPAL_ERR_UNREACH; ret

_kept: list[mmap.mmap] = []


def install() -> bool:
    """Put the fix in place in this process; whether it is."""
    if _kept:
        return True
    memory = mpi_code.mend(_find, _write)
    if memory is not None:
        _kept.append(memory)
    return memory is not None


def _write(memory: mmap.mmap, base: int, send: int) -> int:
    go_on = bytes.fromhex(f"48b8 {struct.pack('<Q', send).hex()} ffe0")  # mov rax, send; jmp rax
    program = _FAILED + _RETURN + go_on
    memory[: len(program)] = program
    return base


def _find() -> tuple[int, int] | None:
    """Where libopen-pal keeps the address of ``mca_btl_tcp_endpoint_send``, and that address."""
    lib, writable = mpi_code.library("libopen-pal.so")
    if lib is None:
        return None
    try:
        send = mpi_code.address(lib, "mca_btl_tcp_endpoint_send")
        after = mpi_code.address(lib, _CALLER) + _CALLER_END
    except AttributeError:
        return None
    if not mpi_code.matches(send, _SEND) or not mpi_code.matches(after - 5, "e9"):
        return None
    slot = mpi_code.slot_of_call(after, send, writable)
    return None if slot is None else (slot, send)
