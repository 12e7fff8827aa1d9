"""Computes rewards in reward processes (`process.py`), which run the task's code without the run's
credentials. Every question (an answer to judge, a turn to reply to, or a trajectory to score) gets
an outcome, also if the task's code raises, hangs or ends its process.

`RewardPool.submit`, `submit_turn` and `submit_finished` queue a question. Each `poll` hands
questions to the processes (`RewardWorker`), reads their answers, replaces processes that ended or
hang, and returns outcomes. No call waits for an answer, so a rollout generates meanwhile.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.import_path import module_command
from rollstream.producers.rewards.process import RewardAnswer, RewardQuestion
from rollstream.producers.scoring.functions import TrajectoryFacts
from rollstream.producers.settings import OWN_VARIABLES, TaskSettings
from rollstream.producers.tasks.base import Reply, Turns

_START_S = 60.0  # until a process must be ready: the imports of a heavy task on a busy machine
_READ_BYTES = 1 << 16  # of one read from a pipe

_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR
    VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD CUDA_HOME CUDA_VISIBLE_DEVICES
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE TOKENIZERS_PARALLELISM
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    TORCH_HOME XDG_CACHE_HOME
"""
_ALLOWED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_")


def allowed_variables(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Return those variables of `environment` that a task's code gets: paths of programs, libraries
    and caches, language, threads, and those that `task.environment` names (`named`). Variables of
    the run's credentials and settings (`OWN_VARIABLES`) are left out even if they are named.

    A task's code may execute a part of a model's answer. An answer that prints its environment
    finds neither the broker's password nor the store's keys.
    """
    wanted = {*_NAMES.split(), *named}
    return {
        name: text
        for name, text in environment.items()
        if (name in wanted or name.startswith(_ALLOWED_PREFIXES))
        and not name.startswith(OWN_VARIABLES)
    }


@dataclass(frozen=True, slots=True)
class _PendingQuestion:
    """Holds a question without an outcome: its caller's key and the line for a process."""

    key: str
    line: bytes


class RewardWorker:
    """Runs one reward process and exchanges lines with it, without blocking. The process writes a
    first line when its task is built or cannot be built: `greeting`, b"" until then. After that it
    answers its questions in order. `held` are the unanswered ones, oldest first, so a process that
    hangs or ends does so at `held[0]`.
    """

    def __init__(self, task: TaskSettings, now: float, function: str = "") -> None:
        self.held: deque[_PendingQuestion] = deque()
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

    def give(self, question: _PendingQuestion, now: float) -> None:
        """Queue a question for the process. If the process is idle its time limit runs from now,
        else from the last bytes that the process writes before it takes up the question.
        """
        if self.greeting and not self.held:
            self._progress_s = now
        self.held.append(question)
        self._outgoing += question.line

    def write(self, now: float) -> None:
        """Write as many queued bytes as the pipe accepts. If the pipe was full and accepts bytes
        again, the process has read from it; this restarts its time limit, as an answer does.
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

    def read(self, now: float) -> Iterator[tuple[_PendingQuestion, bytes]]:
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
        """Return how the process ended; to be called after `has_ended` returned True."""
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process ended ({how})"

    def overdue_reason(self, now: float) -> str:
        """Return why the process must be replaced: it was not ready, or made no progress, within
        its time limit. Return "" if it need not be replaced.
        """
        if not self.greeting:
            late = now - self._progress_s > _START_S
            return f"its process was not ready after {_START_S:g} s" if late else ""
        late = bool(self.held) and now - self._progress_s > self._limit_s
        return f"took longer than {self._limit_s:g} s" if late else ""

    def kill(self) -> None:
        """End the process and all processes that it started (it leads a process group), and reap
        it.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _spawn(task: TaskSettings, function: str) -> subprocess.Popen[bytes]:
    """Start a reward process. It is in a session of its own, so that Ctrl-C in the terminal reaches
    only the parent.
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


_IN_FLIGHT_MAX = 64  # questions given to one process; the others wait in the pool for any process
_STARTS_MAX = 3  # processes in a row that end before their greeting


@dataclass(frozen=True, slots=True)
class RewardVerdict:
    """Holds a reward with its named scores, or the `reason` why there will be none: then it is a
    dead verdict.
    """

    reward: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""

    @property
    def dead(self) -> bool:
        return bool(self.reason)


RewardOutcome = RewardVerdict | Reply
"""A result of `poll`: a verdict for `submit` and `submit_finished`; a reply or a dead verdict for
`submit_turn`.
"""


class RewardPool:
    """Gives every submitted question exactly one outcome, in any order; `key` names a question in
    `poll`. It runs `task.reward_processes` processes and starts each when a question waits for it.
    At most `capacity` questions are unanswered. `function` is the import path of the scorer's
    function, "" in a rollout.
    """

    def __init__(
        self,
        task: TaskSettings,
        capacity: int = 8192,
        clock: Callable[[], float] = time.monotonic,
        function: str = "",
    ) -> None:
        self._task = task
        self._function = function
        self._capacity = capacity
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(RewardAnswer)
        self._waiting: deque[_PendingQuestion] = deque()
        self._workers: list[RewardWorker | None] = [None] * task.reward_processes
        self._starts_failed = 0

    def can_submit(self) -> bool:
        """Return whether another question may be submitted; the `submit` methods assert it."""
        return self._outstanding() < self._capacity

    def submit(self, key: str, reference: str, turns: Turns) -> None:
        """Queue a complete answer to judge; its outcome is a verdict with the task's reward.
        `turns` are all tokens after the prompt, `reference` is that of the prompt (`TaskPrompt`).
        """
        self._queue(key, RewardQuestion("judge", reference, "", _lists(turns)))

    def submit_turn(self, key: str, reference: str, state: str, turns: Turns) -> None:
        """Queue a turn for the task's environment; its outcome is the reply to the last of `turns`,
        or a dead verdict. `state` is that of the environment's previous reply, "" at first.
        """
        self._queue(key, RewardQuestion("reply", reference, state, _lists(turns)))

    def submit_finished(
        self, key: str, reference: str, turns: Turns, facts: TrajectoryFacts
    ) -> None:
        """Queue a finished trajectory for the scorer's function. The numbers that the function
        returns are the `scores` of the verdict; if it returns a single one, its name is "".
        """
        self._queue(key, RewardQuestion("score", reference, "", _lists(turns), facts))

    def poll(self) -> list[tuple[str, RewardOutcome]]:
        """Serve all processes and return the new outcomes, each with its question's key. Raises
        `ConfigurationError` if the task cannot be built, or if this machine cannot provide the
        sandbox that its code needs.
        """
        decided: list[tuple[str, RewardOutcome]] = []
        if not self._outstanding():
            return decided
        now = self._clock()
        for index in range(len(self._workers)):
            self._serve_process(index, now, decided)
        return decided

    def close(self) -> None:
        """End the processes; unanswered questions are dropped."""
        for index, worker in enumerate(self._workers):
            if worker is not None:
                worker.kill()
            self._workers[index] = None
        self._waiting.clear()

    def _outstanding(self) -> int:
        """Return the number of questions without an outcome."""
        held = sum(len(worker.held) for worker in self._workers if worker is not None)
        return len(self._waiting) + held

    def _queue(self, key: str, question: RewardQuestion) -> None:
        assert self.can_submit(), "call can_submit() first"
        self._waiting.append(_PendingQuestion(key, self._encoder.encode(question) + b"\n"))

    def _serve_process(
        self, index: int, now: float, decided: list[tuple[str, RewardOutcome]]
    ) -> None:
        """Start the process if it is needed, read its answers into `decided`, write questions to
        it, and replace it if it ended or hangs.
        """
        worker = self._workers[index]
        if worker is None:
            if not self._waiting:
                return
            worker = self._workers[index] = RewardWorker(self._task, now, self._function)
        # Before the read: if the process has ended by now, this read returns all of its answers.
        ended = worker.has_ended()
        for question, line in worker.read(now):
            decided.append((question.key, self._outcome(line)))
        self._check_greeting(worker)
        if not ended:  # an equal share of the waiting questions, rounded up
            share = -(-len(self._waiting) // len(self._workers))
            while self._waiting and share and len(worker.held) < _IN_FLIGHT_MAX:
                question = self._waiting.popleft()
                worker.give(question, now)
                share -= 1
            worker.write(now)
        reason = worker.ended_reason() if ended else worker.overdue_reason(now)
        if reason:
            self._replace(index, worker, reason, decided)

    def _check_greeting(self, worker: RewardWorker) -> None:
        """Raise `ConfigurationError` if the greeting states that the task could not be built."""
        if worker.greeting:
            refusal = self._decoder.decode(worker.greeting).reason
            if refusal:
                self.close()
                raise ConfigurationError(refusal)
            self._starts_failed = 0

    def _outcome(self, line: bytes) -> RewardOutcome:
        try:
            answer = self._decoder.decode(line)
        except msgspec.MsgspecError as error:  # only if the task's code wrote to the pipe
            return RewardVerdict(reason=f"its answer cannot be read: {error}")
        if answer.kind == "refused":  # this machine has no sandbox: no other question can succeed
            self.close()
            raise ConfigurationError(answer.reason)
        if answer.kind == "reply":
            return Reply(answer.tokens, answer.state)
        return RewardVerdict(answer.reward, answer.scores, answer.reason)

    def _replace(
        self,
        index: int,
        worker: RewardWorker,
        reason: str,
        decided: list[tuple[str, RewardOutcome]],
    ) -> None:
        """End the process, which ended or hangs. If it was ready, it did so at its oldest question:
        that one gets a dead verdict with this `reason`. Its other questions return to the front of
        the queue, for any process. Raises `ConfigurationError` after `_STARTS_MAX` processes in a
        row that were never ready.
        """
        worker.kill()
        self._workers[index] = None
        held = list(worker.held)
        if not worker.greeting:
            self._starts_failed += 1
            if self._starts_failed >= _STARTS_MAX:
                self.close()
                raise ConfigurationError(
                    f"{_STARTS_MAX} reward processes in a row ended before they were ready "
                    f"({reason}); see what task {self._task.name!r} does when it is imported"
                )
        elif held:
            decided.append((held.pop(0).key, RewardVerdict(reason=reason)))
        self._waiting.extendleft(reversed(held))


def _lists(turns: Turns) -> list[list[int]]:
    return [list(turn) for turn in turns]
