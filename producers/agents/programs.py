"""Starts the programs that run episodes. They get none of the run's credentials, and end with the
rollout, child processes included.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.http_proxies import without_proxy
from rollstream.import_path import module_command
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.program_process import EpisodeOrder, EpisodeOutcome
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.code_environment import (
    allowed_variables,
    of_a_program,
    with_own_path,
)
from rollstream.producers.tasks.mixture import part_reference
from rollstream.streams.foreign_text import ForeignValueRefused, read_json, reason_text

_KEEPER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rollstream.producers.agents.program_keeper import main; sys.exit(main(sys.argv[2:]))"
)
"""Runs the keeper, which finds its modules without a variable that the program would inherit."""
POLL_S = 0.02  # between two looks at processes


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """A program's end: with a `reward` (None: it gave none) or the `reason` of its failure."""

    key: str
    reward: float | None = None
    reason: str = ""
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


class Programs(Protocol):
    """Runs the programs of episodes. `key` in an order names the episode's session."""

    def start(self, order: EpisodeOrder) -> None: ...

    def kill(self, key: str) -> None: ...

    def poll(self) -> list[ProgramEnd]: ...

    def close(self) -> None: ...


class ServicePrograms:
    """Implements `Programs` for a service elsewhere: episodes wait until it opens them."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()

    def start(self, order: EpisodeOrder) -> None:
        self._waiting.append(order.key)

    def next(self) -> str:
        # Threads may call it: each waiting episode is given away once.
        try:
            return self._waiting.popleft()
        except IndexError:
            return ""

    def claim(self, key: str) -> bool:
        """Removes a waiting episode; returns whether it waited."""
        try:
            self._waiting.remove(key)
        except ValueError:
            return False
        return True

    def kill(self, key: str) -> None:
        self.claim(key)

    def poll(self) -> list[ProgramEnd]:
        return []

    def close(self) -> None:
        self._waiting.clear()


def program_variables(order: EpisodeOrder, variable_names: Sequence[str]) -> dict[str, str]:
    variables = of_a_program(allowed_variables(os.environ, variable_names))
    return {
        **variables,
        **without_proxy(variables, order.base_url),
        "OPENAI_BASE_URL": order.base_url,
        "OPENAI_API_KEY": order.key,
        "ROLLSTREAM_TASK": json.dumps(order.task),
        "ROLLSTREAM_SESSION": order.session_url,
    }


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(slots=True)
class CommandPrograms:
    """A process of `command` for each episode."""

    command: Sequence[str]
    named: Sequence[str] = ()
    _running: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, subprocess.Popen[bytes]]
    )
    _unstarted: dict[str, ProgramEnd] = field(default_factory=dict[str, ProgramEnd])
    _polled_s: float = 0.0

    def start(self, order: EpisodeOrder) -> None:
        self.kill(order.key)
        # The keeper ends the command if the rollout is killed.
        keeper = [sys.executable, "-P", "-c", _KEEPER, json.dumps(sys.path), *self.command]
        try:
            self._running[order.key] = subprocess.Popen(
                keeper,
                stdin=subprocess.PIPE,  # its end is how the keeper learns that the rollout ended
                stdout=2,
                env=program_variables(order, self.named),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # a task above what a variable holds, say
            reason = f"its program cannot be started: {reason_text(error)}"
            self._unstarted[order.key] = ProgramEnd(order.key, reason=reason)

    def kill(self, key: str) -> None:
        self._unstarted.pop(key, None)
        process = self._running.pop(key, None)
        if process is not None:
            _close(process)

    def poll(self) -> list[ProgramEnd]:
        now = time.monotonic()
        if now - self._polled_s < POLL_S:
            return []
        self._polled_s = now
        ended = [key for key, process in self._running.items() if process.poll() is not None]
        unstarted, self._unstarted = list(self._unstarted.values()), {}
        return [*unstarted, *(ProgramEnd(key, reason=self._reason(key)) for key in ended)]

    def close(self) -> None:
        self._unstarted.clear()
        for key in list(self._running):
            self.kill(key)

    def _reason(self, key: str) -> str:
        process = self._running.pop(key)
        code = process.returncode
        _close(process)
        if not code:
            return ""
        return f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _close(process: subprocess.Popen[bytes]) -> None:
    _end_group(process)
    if process.stdin is not None:
        process.stdin.close()


class FunctionProcess:
    def __init__(self, function: str, variable_names: Sequence[str], sandbox: str) -> None:
        self.keys: set[str] = set()
        self.cancelled: dict[str, float] = {}  # by key when; until the process confirms it
        self.ready_s: float | None = None  # when its loop turned first; imports may take long
        self.aborted_s: float | None = None
        self._incoming = bytearray()
        self.outgoing = bytearray()
        self.process = subprocess.Popen(
            module_command("rollstream.producers.agents.program_process", function, sandbox),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=with_own_path(allowed_variables(os.environ, variable_names)),
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._into, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._into, False)
        os.set_blocking(self._out, False)

    def write(self) -> None:
        if self.outgoing:
            with suppress(BlockingIOError, BrokenPipeError):
                del self.outgoing[: os.write(self._into, self.outgoing)]

    def read(self) -> list[bytes]:
        with suppress(BlockingIOError):
            while data := os.read(self._out, 1 << 16):
                self._incoming += data
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming[:] = rest
        return lines

    def end_if_blocked(self, now: float) -> None:
        """Ends a ready process that left a cancellation unanswered for `BLOCKED_S`."""
        if self.ready_s is None:
            return
        if self.aborted_s is None:
            # An episode blocks the loop, and each later one would wait in vain. SIGABRT prints
            # where.
            since_s = (max(cancelled_s, self.ready_s) for cancelled_s in self.cancelled.values())
            if any(now - since > BLOCKED_S for since in since_s):
                self.aborted_s = now
                self.process.send_signal(signal.SIGABRT)
        elif now - self.aborted_s > ABORT_S:  # the user's code catches the signal
            self.process.kill()

    def reason(self) -> str:
        if self.aborted_s is None:
            return f"its process ended with code {self.process.returncode}"
        return (
            f"an episode blocked the process that they share for {BLOCKED_S:g} s: await what takes "
            "long, e.g. by asyncio.to_thread (the rollout's log shows the line)"
        )

    def end(self) -> None:
        _end_group(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


BLOCKED_S = 30.0  # without an answer of a process, which needs none but a turn of its loop
ABORT_S = 5.0  # from SIGABRT to SIGKILL
STARTS_MAX = 3  # processes in a row that end before an outcome


class FunctionPrograms:
    """Runs `processes` processes that call the async function `function` (`module:function`).
    `poll` raises `ConfigurationError` if the function cannot be imported, or this machine lacks the
    sandbox.
    """

    def __init__(
        self, function: str, processes: int, variable_names: Sequence[str] = (), sandbox: str = ""
    ) -> None:
        self._function, self._named, self._sandbox = function, tuple(variable_names), sandbox
        self._slots: list[FunctionProcess | None] = [None] * processes
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(EpisodeOutcome).decode
        self._unstarted: dict[str, ProgramEnd] = {}
        self._starts_failed = 0
        self._polled_s = 0.0

    def start(self, order: EpisodeOrder) -> None:
        index = min(range(len(self._slots)), key=self._load)
        process = self._slots[index]
        if process is None:
            try:
                process = FunctionProcess(self._function, self._named, self._sandbox)
            except OSError as error:  # the machine has no room for a process now
                reason = f"its process cannot be started: {reason_text(error)}"
                self._unstarted[order.key] = ProgramEnd(order.key, reason=reason)
                return
            self._slots[index] = process
        process.keys.add(order.key)
        process.outgoing += self._encode(order) + b"\n"
        process.write()

    def kill(self, key: str) -> None:
        self._unstarted.pop(key, None)
        for process in self._slots:
            if process is not None and key in process.keys:
                process.keys.discard(key)
                process.cancelled[key] = time.monotonic()
                process.outgoing += self._encode({"cancel": key}) + b"\n"
                process.write()

    def poll(self) -> list[ProgramEnd]:
        now = time.monotonic()
        if now - self._polled_s < POLL_S / 4:
            return []
        self._polled_s = now
        ended, self._unstarted = list(self._unstarted.values()), {}
        for index, process in enumerate(self._slots):
            if process is not None:
                ended += self._serve(index, process)
        return ended

    def close(self) -> None:
        for index, process in enumerate(self._slots):
            if process is not None:
                process.end()
            self._slots[index] = None

    def _load(self, index: int) -> int:
        process = self._slots[index]
        return 0 if process is None else len(process.keys)

    def _serve(self, index: int, process: FunctionProcess) -> list[ProgramEnd]:
        has_ended = process.process.poll() is not None  # before the read, which then gets all
        process.write()
        ended: list[ProgramEnd] = []
        for line in process.read():
            try:
                outcome = self._decode(line)
            except (ValueError, RecursionError):  # what the user's code wrote into the pipe
                continue
            if outcome.refused:
                self.close()
                raise ConfigurationError(outcome.refused)
            if not outcome.key:
                process.ready_s = self._polled_s
                continue
            self._starts_failed = 0
            process.cancelled.pop(outcome.key, None)
            if outcome.key in process.keys:
                process.keys.discard(outcome.key)
                end = ProgramEnd(outcome.key, outcome.reward, outcome.reason, outcome.scores)
                ended.append(end)
        if not has_ended:
            process.end_if_blocked(self._polled_s)
            return ended
        process.end()
        self._slots[index] = None
        # An aborted process had started well.
        self._starts_failed += process.aborted_s is None
        if self._starts_failed > STARTS_MAX:
            code = process.process.returncode
            raise ConfigurationError(
                f"{self._starts_failed} processes of agent.episode in a row ended before an "
                f"episode did (the last with code {code}); see what {self._function} imports"
            )
        reason = process.reason()
        return [*ended, *(ProgramEnd(key, reason=reason) for key in sorted(process.keys))]


def open_programs(settings: AgentSettings, task: TaskSettings) -> Programs:
    if settings.episode:
        sandbox = task.sandbox.model_dump_json()
        return FunctionPrograms(settings.episode, settings.processes, task.environment, sandbox)
    if settings.command:
        return CommandPrograms(settings.command, task.environment)
    return ServicePrograms()


def task_of(prompt: str, reference: str, label: str = "", system: str = "") -> Mapping[str, object]:
    """Returns the prompt's text, the task's own JSON, the system message and the label."""
    task_reference = part_reference(reference, label)
    try:
        decoded: object = read_json(task_reference) if task_reference else None
    except ForeignValueRefused:
        decoded = task_reference
    task: dict[str, object] = {"prompt": prompt, "reference": decoded}
    if system:
        task["system"] = system
    if task_reference is not reference:
        task["part"] = label
    return task
