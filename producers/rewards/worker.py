"""Starts one reward process and exchanges lines with it over pipes that never block. It also keeps
the time of the process's last progress, so that one that hangs is replaced.

The process runs the task's code and any part of a model's answer that this code executes. It gets
only the environment variables that `allowed_variables` names, so an answer that prints its
environment finds neither the broker's password nor the store's keys.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from rollstream.import_path import module_command
from rollstream.producers.settings import OWN_VARIABLES, TaskSettings

_START_S = 60.0  # for the imports of a heavy task on a busy machine
_READ_BYTES = 1 << 16

_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR
    VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD CUDA_HOME CUDA_VISIBLE_DEVICES
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE TOKENIZERS_PARALLELISM
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    TORCH_HOME XDG_CACHE_HOME
"""
_ALLOWED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_")

HeldQuestion = TypeVar("HeldQuestion")


def allowed_variables(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The variables that a task's code gets: paths of programs, libraries and caches, language,
    threads, and those that `task.environment` names.
    """
    wanted = {*_NAMES.split(), *named}
    return {
        name: text
        for name, text in environment.items()
        if (name in wanted or name.startswith(_ALLOWED_PREFIXES))
        and not name.startswith(OWN_VARIABLES)
    }


class RewardWorker(Generic[HeldQuestion]):
    """One reward process. `held` are its unanswered questions, oldest first. `greeting` is its
    first line, b"" until the process is ready for questions.
    """

    def __init__(self, task: TaskSettings, now: float, function: str = "") -> None:
        self.held: deque[HeldQuestion] = deque()
        self.greeting = b""
        self._limit_s = task.reward_timeout_s
        self._progress_s = now
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._was_full = False
        self._process = _spawn(task, function)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)
        os.set_blocking(self._out, False)

    def give(self, held: HeldQuestion, line: bytes, now: float) -> None:
        """Queue a question. Its time starts when the questions before it are answered."""
        if self.greeting and not self.held:
            self._progress_s = now
        self.held.append(held)
        self._outgoing += line

    def write(self, now: float) -> None:
        """Write as many queued bytes as the pipe accepts. If the pipe was full and accepts more,
        the process has read from it, which counts as progress.
        """
        if not self._outgoing:
            return
        count = 0
        with suppress(BlockingIOError, BrokenPipeError):  # a broken pipe shows in has_ended()
            count = os.write(self._into, self._outgoing)
        if count and self._was_full:
            self._progress_s = now
        del self._outgoing[:count]
        self._was_full = bool(self._outgoing)

    def read(self, now: float) -> Iterator[tuple[HeldQuestion, bytes]]:
        """Yield the answers that have arrived, each with its question."""
        with suppress(BlockingIOError):
            while data := os.read(self._out, _READ_BYTES):
                self._incoming += data
                self._progress_s = now
        if b"\n" not in self._incoming:
            return
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming[:] = rest
        if not self.greeting:
            self.greeting = lines.pop(0)
        for line in lines:
            yield self.held.popleft(), line

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ended_reason(self) -> str:
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process ended ({how})"

    def overdue_reason(self, now: float) -> str:
        """The reason why the process must be replaced; empty if it need not."""
        if not self.greeting:
            late = now - self._progress_s > _START_S
            return f"its process was not ready after {_START_S:g} s" if late else ""
        late = bool(self.held) and now - self._progress_s > self._limit_s
        return f"took longer than {self._limit_s:g} s" if late else ""

    def kill(self) -> None:
        """End the process and everything that it started (it leads a process group),
        and reap it.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _spawn(task: TaskSettings, function: str) -> subprocess.Popen[bytes]:
    """Start the process in its own session, so that Ctrl-C in the terminal reaches only
    the parent.
    """
    return subprocess.Popen(
        module_command("rollstream.producers.rewards.process", task.model_dump_json(), function),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=allowed_variables(os.environ, task.environment)
        | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
