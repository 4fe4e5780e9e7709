"""A value with tensors in it goes from one process to another, in chunks with a checksum each."""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI

from megatron_ft.rejoin import transfer

META_TAG, CHUNK_TAG, SUM_TAG = 7112, 7113, 7114


def send(comm: MPI.Intracomm, rank: int, value: Any) -> int:
    """Send ``value`` to ``rank``; the bytes of its tensors."""
    tensors: list[torch.Tensor] = []
    comm.send(transfer._strip(value, tensors), dest=rank, tag=META_TAG)
    return transfer.send_tensors(comm, rank, tensors, (CHUNK_TAG, SUM_TAG))


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
    nbytes = transfer.receive_tensors(comm, rank, tensors, (CHUNK_TAG, SUM_TAG))
    return transfer._fill(value, tensors), nbytes
