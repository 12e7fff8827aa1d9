"""Passes the output of a user's code on to its rollout's log: whole lines, printable, and at most
so many bytes for each episode, reward or reply; the bytes left out are counted.
"""

import os
import threading
from collections.abc import Callable

from rollstream.printable import printable

# Most bytes of one episode or call that reach the log, some 600 lines: a log is rotated at 8 MB,
# and a program that prints in a loop would push everything else out of it.
EPISODE_BYTES = 64 << 10
LINE_BYTES = 4096
READ_BYTES = 1 << 16
DRAIN_S = 1.0


class ProgramOutput:
    """Gives printable lines to `write`. The room of an ended episode or call is not added to the
    next one's.
    """

    def __init__(self, write: Callable[[bytes], object], room: int = EPISODE_BYTES) -> None:
        self._write, self._room, self._left_out = write, room, 0
        self._line = bytearray()
        # The last line that was not empty: the reason why a program ended.
        self.last = ""

    def allow(self) -> None:
        self._room = EPISODE_BYTES

    def take(self, data: bytes) -> None:
        """Passes on whole lines."""
        if not self._room:
            self._left_out += len(data)
            return
        self._line += data
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        for line in lines:
            self._pass(bytes(line))
        if len(self._line) > LINE_BYTES:
            self._pass(bytes(self._line))
            self._line = bytearray()

    def end(self) -> None:
        """Passes on the last line, and how much was left out."""
        if self._line:
            self._pass(bytes(self._line))
            self._line = bytearray()
        self._state_left_out()

    def _pass(self, line: bytes) -> None:
        if self._left_out and self._room == EPISODE_BYTES:
            self._state_left_out()  # of the episodes before
        if len(line) > LINE_BYTES:
            self._left_out += len(line) - LINE_BYTES
        text = line[:LINE_BYTES].removesuffix(b"\r").decode(errors="replace")
        self.last = printable(text).strip() or self.last
        shown = printable(text).encode() + b"\n"
        if len(shown) > self._room:
            self._room = 0
            self._left_out += len(line) + 1
            return
        self._room -= len(shown)
        self._write(shown)

    def _state_left_out(self) -> None:
        if self._left_out:
            line = f"{self._left_out:,} bytes of a program's output left out\n"
            self._write(line.encode())
            self._left_out = 0


class OutputPipe:
    """A thread passes the content of the pipe `writer` on to the file `sink`."""

    def __init__(self, sink: int) -> None:
        self._reader, self.writer = os.pipe()
        self.output = ProgramOutput(lambda line: os.write(sink, line))
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        while data := os.read(self._reader, READ_BYTES):
            self.output.take(data)
        self.output.end()

    def close(self) -> None:
        """Closes without a wait for a child that still has the pipe."""
        os.close(self.writer)
        self._thread.join(DRAIN_S)
