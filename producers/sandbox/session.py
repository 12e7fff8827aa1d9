"""Serves the verbs by messages to `inside.py`, which runs among hostile programs: an answer has a
bound in bytes and time, and one that breaks the protocol ends the sandbox.
"""

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol, cast

from rollstream.deadline import Deadline
from rollstream.foreign_json import parse_loose_json
from rollstream.producers.sandbox import inside
from rollstream.producers.sandbox.base import (
    ENVIRONMENT,
    KILLED,
    WORK_FOLDER,
    ClosedAfterBlock,
    SandboxFailed,
    SandboxFileError,
    SandboxLimits,
    SandboxResult,
    checked_path,
)

START_S = 60.0  # until the process in the sandbox answers, on a busy machine
GRACE_S = 60.0  # beyond the program's own bound, until the answer must be there
_HEADER_MAX = 1 << 16
_ENDINGS = ("exit", "time", "output")


def agent_command(interpreter: str) -> list[str]:
    """Returns the command that serves the verbs: Python without site packages."""
    # It first reads the source of `inside.py` from stdin, so the sandbox needs no file of this
    # program.
    size = len(_source())
    reader = f"import os\ns=b''\nwhile len(s)<{size}: s+=os.read(0,{size}-len(s))\n"
    return [interpreter, "-I", "-S", "-c", reader + "exec(compile(s,'inside.py','exec'))"]


@cache
def _source() -> bytes:
    return Path(inside.__file__).read_bytes()


class SessionProcess(Protocol):
    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]: ...
    def memory_kills(self) -> int: ...
    def close(self) -> None: ...


class SandboxSession(ClosedAfterBlock):
    """Its threads must outlive the one that opened it: the kernel ends a `bubblewrap` sandbox with
    the thread that started it.
    """

    def __init__(
        self,
        process: SessionProcess,
        limits: SandboxLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process, self._limits, self._clock = process, limits, clock
        self._is_open = True
        deadline = Deadline(START_S, clock)
        try:
            self._send(_source(), deadline)
            self._receive(deadline, 0)
        except BaseException:
            self.close()
            raise

    def exec(self, command: Sequence[str], stdin: bytes = b"") -> SandboxResult:
        assert command, "a command has at least one word"
        killed = self._process.memory_kills()
        header, body = self._ask(
            {
                "verb": "exec",
                "command": list(command),
                "environment": dict(ENVIRONMENT),
                "folder": WORK_FOLDER,
                "time_s": self._limits.time_s,
                "output_bytes": self._limits.output_bytes,
            },
            stdin,
            self._limits.time_s,
            self._limits.output_bytes,
        )
        if "error" in header:
            raise self._broken(f"it could not start a process: {header['error']}")
        try:
            out, code = int(header["stdout"]), int(header["code"])
            ended, seconds = str(header["ended"]), float(header["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken(f"its answer is malformed ({error})") from error
        if not 0 <= out <= len(body) or ended not in _ENDINGS:
            raise self._broken("its answer is malformed")
        if ended == "exit" and code == KILLED and self._process.memory_kills() > killed:
            ended = "memory"
        return SandboxResult(ended, code, body[:out], body[out:], seconds)

    def read(self, path: str) -> bytes:
        room = self._limits.output_bytes
        request = {"verb": "read", "folder": WORK_FOLDER, "path": checked_path(path)}
        header, body = self._ask({**request, "bytes_max": room}, b"", 0.0, room)
        if "error" in header:
            raise SandboxFileError(f"{path!r} in the sandbox cannot be read: {header['error']}")
        return body

    def write(self, path: str, data: bytes) -> None:
        request = {"verb": "write", "folder": WORK_FOLDER, "path": checked_path(path)}
        header, _ = self._ask(request, data, 0.0, 0)
        if "error" in header:
            raise SandboxFileError(f"{path!r} in the sandbox cannot be written: {header['error']}")

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._process.close()

    def _ask(
        self, request: Mapping[str, object], body: bytes, time_s: float, answer_max: int
    ) -> tuple[dict[str, Any], bytes]:
        if not self._is_open:
            raise SandboxFailed("the sandbox is closed")
        deadline = Deadline(time_s + GRACE_S, self._clock)
        self._send(inside.frame(dict(request), body), deadline)
        return self._receive(deadline, answer_max)

    def _send(self, message: bytes, deadline: Deadline) -> None:
        sink = self._process.pipes[0].fileno()
        os.set_blocking(sink, False)
        rest = memoryview(message)
        while rest:
            if not select.select([], [sink], [], deadline.remaining_s())[1]:
                raise self._broken("it reads nothing")
            try:
                rest = rest[os.write(sink, rest[: inside.CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._broken(str(error)) from error

    def _receive(self, deadline: Deadline, body_max: int) -> tuple[dict[str, Any], bytes]:
        header_size, body_size = inside.FRAME.unpack(self._exactly(inside.FRAME.size, deadline))
        if header_size > _HEADER_MAX or body_size > body_max:
            raise self._broken("its answer is too large")
        text, body = self._exactly(header_size, deadline), self._exactly(body_size, deadline)
        try:
            header: object = parse_loose_json(text)
        except ValueError as error:
            raise self._broken(f"its answer is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._broken("its answer is not an object")
        return cast(dict[str, Any], header), body

    def _exactly(self, size: int, deadline: Deadline) -> bytes:
        source, received = self._process.pipes[1].fileno(), bytearray()
        while len(received) < size:
            if not select.select([source], [], [], deadline.remaining_s())[0]:
                raise self._broken("it did not answer in time")
            piece = os.read(source, min(inside.CHUNK, size - len(received)))
            if not piece:
                raise self._broken(f"it ended {self._last_words()}".strip())
            received += piece
        return bytes(received)

    def _last_words(self) -> str:
        errors = self._process.pipes[2].fileno()
        os.set_blocking(errors, False)
        try:
            text = os.read(errors, 2000).decode(errors="replace").strip()
        except BlockingIOError:
            return ""
        return f"({text})" if text else ""

    def _broken(self, reason: str) -> SandboxFailed:
        self.close()
        return SandboxFailed(f"the sandbox failed: {reason}")
