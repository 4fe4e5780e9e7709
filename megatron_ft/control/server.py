"""The elected process listens on the socket in the run directory while it is elected."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.control.protocol import SOCKET, ControlError, receive, send, short_path

logger = logging.getLogger("megatron_ft.control")

ANSWER_S = 600.0
"""How long a connection waits for its order to be carried out."""

FINISH_S = 1.0

Handler = Callable[[dict[str, Any], Callable[[], bool]], dict[str, Any]]
"""From an order, and whether who asked has gone since, to its answer; raises ControlError."""


class ControlServer:
    """Answers orders, each in a thread of its own.

    Args:
        run_dir: Where the socket file goes.
        handle: Called with each order.
    """

    def __init__(self, run_dir: Path, handle: Handler) -> None:
        self._run_dir = run_dir
        self._handle = handle
        self._socket: socket.socket | None = None
        self._answering: set[threading.Thread] = set()

    def open(self) -> None:
        """Listen, in the place of whoever did before. Does nothing if this server does already."""
        if self._socket is not None:
            return
        listener = socket.socket(socket.AF_UNIX)
        # Made beside and renamed: a client finds the old socket or the new one, never none.
        beside = f".{SOCKET}.{os.getpid()}"
        try:
            with short_path(self._run_dir) as path:
                temporary = path.replace(SOCKET, beside)
                listener.bind(temporary)
                os.chmod(temporary, 0o600)  # whoever can connect can make replicas leave
                listener.listen(8)
                os.replace(temporary, path)
        except OSError as error:  # a file system without sockets, or a full one
            logger.warning("no orders are taken (tools/ft_ctl.py): %s", error)
            listener.close()
            return
        self._socket = listener
        threading.Thread(
            target=self._accept, args=(listener,), name="ft-control", daemon=True
        ).start()

    def close(self, *, last: bool) -> None:
        """Stop listening.

        Args:
            last: Whether the job ends, so that the socket file goes too; else the next elected
                process has put its own in its place.
        """
        listener, self._socket = self._socket, None
        if listener is None:
            return
        # Closing alone does not wake a thread that waits in accept.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if last:
            (self._run_dir / SOCKET).unlink(missing_ok=True)

    def finish(self) -> None:
        """Let answers that are under way get through, for this process is about to end."""
        for thread in list(self._answering):
            thread.join(FINISH_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._answering.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(ANSWER_S)
            try:
                try:
                    message = receive(connection)
                    answer = self._handle(message, lambda: _has_gone(connection))
                except ControlError as error:
                    answer = {"error": str(error)}
                send(connection, answer)
            except OSError as error:
                logger.warning("a control connection broke: %s", error)
            finally:
                self._answering.discard(threading.current_thread())


def _has_gone(connection: socket.socket) -> bool:
    """Whether the other side has closed: it says nothing after its order."""
    # A socket with a timeout would wait for something to read, whatever flags recv is given.
    said = select.poll()
    said.register(connection, select.POLLIN)
    if not said.poll(0):
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True
