"""One process (`environment.py`) waits for the replies of an `async def reply` and owns their
deadlines. Every question has exactly one outcome, unless it is cancelled.
"""

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.producers.rewards.environment import NumberedAnswer, ReplyQuestion
from rollstream.producers.rewards.worker import (
    READ_BYTES,
    START_S,
    STARTS_MAX,
    CodeProcess,
)
from rollstream.producers.settings import TaskSettings

GRACE_S = 5.0
"""Time after its deadline in which the process must end a reply itself."""
DEATHS_MAX = 3
"""A reply fails after so many deaths of its process: it may be their cause."""


@dataclass(slots=True)
class _PendingReply:
    key: str
    question: ReplyQuestion
    since: float = 0.0
    deaths: int = 0


class ReplyPool:
    def __init__(self, task: TaskSettings) -> None:
        self._task = task
        self._worker: _EnvironmentProcess | None = None
        self._waiting: deque[_PendingReply] = deque()
        self._held: dict[int, _PendingReply] = {}
        """By the question's number, in the order in which they were given to the process."""
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._starts_failed = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._held)

    def submit(self, key: str, reference: str, state: str, turns: list[list[int]]) -> None:
        """Queues a question under this key, which no other present question has."""
        self._next += 1
        self._numbers[key] = self._next
        self._waiting.append(_PendingReply(key, ReplyQuestion(self._next, reference, state, turns)))

    def cancel(self, key: str) -> None:
        """Drops a question, which then has no outcome. Ignores unknown keys."""
        number = self._numbers.pop(key, None)
        if number is None:
            return
        if self._held.pop(number, None) is None:
            self._waiting = deque(
                pending for pending in self._waiting if pending.question.number != number
            )
        elif self._worker is not None:
            self._worker.give(ReplyQuestion(number, cancelled=True))

    def poll(self, now: float) -> list[tuple[str, NumberedAnswer]]:
        """Returns new outcomes by key, without blocking. Raises `ConfigurationError` if the task
        cannot be built, or this machine lacks its sandbox.
        """
        if self._worker is None:
            if not self._waiting:
                return []
            self._worker = _EnvironmentProcess(self._task, now)
        worker, decided = self._worker, list[tuple[str, NumberedAnswer]]()
        has_ended = worker.has_ended()  # before the read, which then returns its last answers
        for answer in worker.read():
            pending = self._held.pop(answer.number, None)
            if pending is not None and answer.kind == "refused":
                self.close()
                raise ConfigurationError(answer.reason)
            if pending is not None:
                del self._numbers[pending.key]
                decided.append((pending.key, answer))
        if worker.refusal:
            self.close()
            raise ConfigurationError(worker.refusal)
        if worker.is_ready:
            self._starts_failed = 0
            while self._waiting and not has_ended:
                pending = self._waiting.popleft()
                pending.since = now
                self._held[pending.question.number] = pending
                worker.give(pending.question)
            worker.write()
        reason = worker.ended_reason() if has_ended else self._overdue(worker, now)
        if reason:
            self._replace(worker, reason, decided)
        return decided

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = None
        self._waiting.clear()
        self._held.clear()
        self._numbers.clear()

    def _overdue(self, worker: "_EnvironmentProcess", now: float) -> str:
        if not worker.is_ready:
            late = now - worker.started > START_S
            return f"its process was not ready after {START_S:g} s" if late else ""
        limit_s = self._task.reply_timeout_s
        oldest = next(iter(self._held.values()), None)
        if oldest is None or now - oldest.since <= limit_s + GRACE_S:
            return ""
        # The task's code blocks the event loop: the reply is not asked for again.
        oldest.deaths = DEATHS_MAX
        return f"took longer than {limit_s:g} s, and its process did not end it"

    def _replace(
        self,
        worker: "_EnvironmentProcess",
        reason: str,
        decided: list[tuple[str, NumberedAnswer]],
    ) -> None:
        worker.kill()
        self._worker = None
        if not worker.is_ready:
            self._starts_failed += 1
            if self._starts_failed >= STARTS_MAX:
                self.close()
                raise ConfigurationError(
                    f"{STARTS_MAX} environment processes in a row ended before they were ready "
                    f"({reason}); see what task {self._task.name!r} does when it is imported"
                )
        requeued: list[_PendingReply] = []
        for number, pending in self._held.items():
            pending.deaths += 1
            if pending.deaths < DEATHS_MAX:
                requeued.append(pending)
                continue
            del self._numbers[pending.key]
            decided.append((pending.key, NumberedAnswer(number, "failed", reason=reason)))
        self._held.clear()
        self._waiting.extendleft(reversed(requeued))


class _EnvironmentProcess(CodeProcess):
    def __init__(self, task: TaskSettings, now: float) -> None:
        self.started = now
        self.is_ready = False
        self.refusal = ""
        super().__init__("rollstream.producers.rewards.environment", task)
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(NumberedAnswer)

    def give(self, question: ReplyQuestion) -> None:
        self.queue(self._encoder.encode(question) + b"\n")

    def write(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # a broken pipe shows in has_ended()
            while self._outgoing:
                del self._outgoing[: os.write(self._into, self._outgoing[:READ_BYTES])]

    def read(self) -> list[NumberedAnswer]:
        with suppress(BlockingIOError):
            while data := os.read(self._out, READ_BYTES):
                self._incoming += data
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming[:] = rest
        answers: list[NumberedAnswer] = []
        # Other lines are the task's own output. The deadline ends the replies that they may have
        # replaced.
        for line in lines:
            with suppress(ValueError, RecursionError):
                answers.append(self._decoder.decode(line))
        if answers and not self.is_ready:
            greeting = answers.pop(0)
            self.is_ready, self.refusal = True, greeting.reason
        return answers
