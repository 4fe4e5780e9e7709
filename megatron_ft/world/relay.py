"""What mpirun and its ranks print, in readable form."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import BinaryIO

TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>: ?")
RULE = re.compile(rb"-{70,}\n")
DEATH_NOTICE = re.compile(rb"\S+ (noticed that|has exited due to) process ")


class Relay:
    """Copies one stream of mpirun line by line, its tags shortened to ``[rank] ``.

    mpirun's boxed messages of dead processes are kept in ``notices`` instead: they are noise where
    the job went on without those processes.
    """

    def __init__(self, sink: BinaryIO) -> None:
        self.notices = b""
        self._sink = sink
        self._partial_line = b""
        self._rule = b""
        self._in_notice = False

    def feed(self, data: bytes) -> None:
        """Take what was read, in pieces of any size; no data means the end of the stream."""
        if not data:
            if self._partial_line:
                self._line(self._partial_line + b"\n")
            self._write(self._rule)
            return
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._line(line + b"\n")

    def _line(self, line: bytes) -> None:
        if self._in_notice:
            self.notices += line
            self._in_notice = RULE.fullmatch(line) is None
            return
        rule, self._rule = self._rule, b""
        if rule and DEATH_NOTICE.match(line):
            self.notices += rule + line
            self._in_notice = True
            return
        self._write(rule)
        if RULE.fullmatch(line):
            self._rule = line  # until the next line says what it is the top of
        elif b"]<std" in line:
            # A rank's last line may lack its newline, so that another's tag follows in mid-line.
            self._write(TAG.sub(rb"\n[\1] ", line).removeprefix(b"\n"))
        else:
            self._write(line)

    def _write(self, text: bytes) -> None:
        try:
            self._sink.write(text)
            self._sink.flush()
        except OSError as error:
            # The reader has gone (`| head`), or the disk is full: the job goes on, and its output
            # must be drained.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._sink.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                with contextlib.suppress(OSError):  # stderr may be on the same disk
                    print(f"megatron-ft-run: output is lost from here: {error}", file=sys.stderr)
