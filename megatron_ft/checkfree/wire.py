"""A value with tensors in it goes from one process to another, in chunks with a checksum each."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from mpi4py import MPI

from megatron_ft.rejoin import transfer
from megatron_ft.rejoin.transfer import TransferCorrupted

META_TAG, CHUNK_TAG, SUM_TAG = 7112, 7113, 7114


def send(comm: MPI.Intracomm, rank: int, value: Any) -> int:
    """Send ``value`` to ``rank``; the bytes of its tensors."""
    tensors: list[torch.Tensor] = []
    comm.send(transfer._strip(value, tensors), dest=rank, tag=META_TAG)
    nbytes = 0
    for chunk in transfer._chunks(tensors):
        comm.Send(chunk, dest=rank, tag=CHUNK_TAG)
        comm.send(zlib.crc32(chunk), dest=rank, tag=SUM_TAG)
        nbytes += len(chunk)
    return nbytes


def receive(comm: MPI.Intracomm, rank: int) -> tuple[Any, int]:
    """Receive what ``rank`` sends, its tensors on the host; and the bytes of them.

    Raises:
        TransferCorrupted: A checksum does not match.
    """
    value = comm.recv(source=rank, tag=META_TAG)
    places: list[Any] = []
    transfer._find(value, places)
    places.sort(key=lambda place: place.index)
    tensors = [torch.empty(place.shape, dtype=place.dtype) for place in places]
    nbytes = 0
    for chunk in transfer._chunks(tensors):
        comm.Recv(chunk, source=rank, tag=CHUNK_TAG)
        if zlib.crc32(chunk) != comm.recv(source=rank, tag=SUM_TAG):
            raise TransferCorrupted(f"a chunk of {len(chunk)} bytes from rank {rank} is corrupted")
        nbytes += len(chunk)
    return transfer._fill(value, tensors), nbytes
