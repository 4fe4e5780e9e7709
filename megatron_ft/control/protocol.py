"""What the control tool and a job say to each other: one JSON object a line, in both directions.

The socket lies in the run directory. A path to a socket may be 107 bytes long only, so both sides
go through the open directory in ``/proc/self/fd``, whose path is short whatever the directory's is.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOCKET = "control.sock"
MAX_BYTES = 1 << 20

ORDERS = ("status", "drain", "respawn")


class ControlError(ValueError):
    """An order that cannot be followed; the message says why and what to do."""


@contextlib.contextmanager
def short_path(run_dir: Path) -> Iterator[str]:
    """A path of the socket that the system's limit on its length admits."""
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET}"
    finally:
        os.close(directory)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Write one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any]:
    """Read one message.

    Raises:
        ControlError: The other side closed, said too much, or did not speak JSON objects.
    """
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise ControlError("the other side closed the connection")
        data += part
        if len(data) > MAX_BYTES:
            raise ControlError(f"a message of more than {MAX_BYTES} bytes")
    try:
        message = json.loads(data)
    except ValueError as error:
        raise ControlError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ControlError(f"not a JSON object: {message!r}")
    return message


def ask(run_dir: Path, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send an order to the job of a run directory and wait for its answer.

    Raises:
        ControlError: There is no job, it refuses, or it does not answer in time.
    """
    if not run_dir.is_dir():
        raise ControlError(f"no run directory at {run_dir}")
    with socket.socket(socket.AF_UNIX) as connection, short_path(run_dir) as path:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
            send(connection, message)
            answer = receive(connection)
        except FileNotFoundError as error:
            raise ControlError(
                f"no job answers in {run_dir}: it has not begun to train, has ended, or runs "
                "without a strategy"
            ) from error
        except ConnectionRefusedError as error:
            raise ControlError(
                f"the job in {run_dir} does not listen any more: it ended without cleaning up, or "
                "its writer has just died and the next one listens in a moment"
            ) from error
        except TimeoutError as error:
            raise ControlError(
                f"no answer in {timeout_s:g} s, so it is taken back unless it has begun: an order "
                "is carried out between two steps, so give --timeout longer than a step"
            ) from error
    if "error" in answer:
        raise ControlError(str(answer["error"]))
    return answer
