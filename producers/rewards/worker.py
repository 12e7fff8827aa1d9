"""Processes that run a task's own code, without the run's credentials. Each leads a process group,
which ends with it.
"""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from rollstream.import_path import module_command
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.code_environment import allowed_variables, with_own_path
from rollstream.program_output import OutputPipe

START_S = 60.0  # until a process must be ready: the imports of a heavy task on a busy machine
READ_BYTES = 1 << 16  # of one read from a pipe
STDERR = 2  # the log of the role
IN_FLIGHT_MAX = 64  # questions given to one process; the others wait in the pool for any process
STARTS_MAX = 3  # processes in a row that end before their greeting


@dataclass(frozen=True, slots=True)
class PendingQuestion:
    """A key, a line, and the most seconds for the answer."""

    key: str
    line: bytes
    limit_s: float


class CodeProcess:
    """Runs a module with a task's own code; its pipes do not block. Prints reach this role's log,
    as many bytes as `queue` makes room for.
    """

    def __init__(self, module: str, task: TaskSettings, *arguments: str) -> None:
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._printed = OutputPipe(STDERR)
        self._process = spawn_process(module, task, *arguments, stderr=self._printed.writer)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)
        os.set_blocking(self._out, False)

    def queue(self, line: bytes) -> None:
        self._printed.output.allow()
        self._outgoing += line

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ended_reason(self) -> str:
        """Returns how the process ended; call it after `has_ended` returned True."""
        return ended_reason(self._process)

    def kill(self) -> None:
        end_process(self._process)
        self._printed.close()


class RewardWorker(CodeProcess):
    """`greeting` is the process's first line, b"" until its task is built or refused. It answers in
    order: a process that hangs or ends does so at `held[0]`, the oldest unanswered question.
    """

    def __init__(self, task: TaskSettings, now: float, function: str = "") -> None:
        self.held: deque[PendingQuestion] = deque()
        self.greeting = b""
        self._progress_s = now
        self._was_full = False
        super().__init__("rollstream.producers.rewards.process", task, function)

    def give(self, question: PendingQuestion, now: float) -> None:
        # The time limit of an idle process runs from now, else from the last bytes that it writes
        # before it takes up the question.
        if self.greeting and not self.held:
            self._progress_s = now
        self.held.append(question)
        self.queue(question.line)

    def write(self, now: float) -> None:
        if not self._outgoing:
            return
        count = 0
        with suppress(BlockingIOError, BrokenPipeError):  # a broken pipe shows in has_ended()
            count = os.write(self._into, self._outgoing)
        # A full pipe that accepts bytes again was read, which restarts the time limit as an answer
        # does.
        if count and self._was_full:
            self._progress_s = now
        del self._outgoing[:count]
        self._was_full = bool(self._outgoing)

    def read(self, now: float) -> Iterator[tuple[PendingQuestion, bytes]]:
        with suppress(BlockingIOError):
            while data := os.read(self._out, READ_BYTES):
                self._incoming += data
                self._progress_s = now
        if b"\n" not in self._incoming:
            return
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming[:] = rest
        if not self.greeting:
            self.greeting = lines.pop(0)
        for line in lines:
            if not self.held:  # the task's code wrote more lines into the pipe than were asked for
                self._incoming.clear()
                return
            yield self.held.popleft(), line

    def overdue_reason(self, now: float) -> str:
        """Returns why the process must be replaced: not ready, or no progress, within its time
        limit; "" else.
        """
        if not self.greeting:
            late = now - self._progress_s > START_S
            return f"its process was not ready after {START_S:g} s" if late else ""
        if not self.held or now - self._progress_s <= self.held[0].limit_s:
            return ""
        return f"took longer than {self.held[0].limit_s:g} s"


def spawn_process(
    module: str, task: TaskSettings, *arguments: str, stderr: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    """`stderr` gets the prints of the user's code."""
    return subprocess.Popen(
        module_command(module, task.model_dump_json(), *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        bufsize=0,
        env=with_own_path(allowed_variables(os.environ, task.environment)),
        # Ctrl-C in the terminal reaches only the parent.
        start_new_session=True,
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def ended_reason(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if code == -signal.SIGVTALRM:
        how += ": it used all cores for longer than twice the time limit of a call"
    return f"its process ended ({how})"
