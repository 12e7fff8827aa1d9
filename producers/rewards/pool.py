"""Computes rewards by the task's code: every question gets an outcome, also if the code raises,
hangs or ends its process. No call waits for an answer.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.producers.rewards.environment import NumberedAnswer
from rollstream.producers.rewards.facts import TrajectoryFacts
from rollstream.producers.rewards.process import RewardAnswer, RewardQuestion
from rollstream.producers.rewards.replies import ReplyPool
from rollstream.producers.rewards.worker import (
    IN_FLIGHT_MAX,
    STARTS_MAX,
    PendingQuestion,
    RewardWorker,
)
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Reply, Turns
from rollstream.streams.foreign_text import reason_text
from rollstream.streams.values import Floats


@dataclass(frozen=True, slots=True)
class RewardVerdict:
    """A reward, or the `reason` why there will be none (a dead verdict). `vectors` are scores of
    several values, which only a scorer's model gives.
    """

    reward: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""
    vectors: Mapping[str, Floats] = field(default_factory=dict[str, Floats])

    @property
    def dead(self) -> bool:
        return bool(self.reason)


CAPACITY = 8192  # questions without an outcome, by default

RewardOutcome = RewardVerdict | Reply
"""A verdict for `submit` and `submit_finished`; a reply or a dead verdict for `submit_turn`."""


class RewardPool:
    """Gives every submitted question exactly one outcome, in any order, under its `key`. At most
    `capacity` questions are unanswered; `function` is the scorer's import path, "" in a rollout.
    """

    def __init__(
        self,
        task: TaskSettings,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
        function: str = "",
        is_asynchronous: bool = False,
    ) -> None:
        self._task = task
        self._replies = ReplyPool(task) if is_asynchronous else None
        self._function = function
        self._capacity = capacity
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(RewardAnswer)
        self._waiting: deque[PendingQuestion] = deque()
        self._workers: list[RewardWorker | None] = [None] * task.reward_processes
        self._starts_failed = 0

    def can_submit(self) -> bool:
        """Returns whether another question may be submitted; the `submit` methods assert it."""
        return self._outstanding() < self._capacity

    def submit(self, key: str, reference: str, turns: Turns) -> None:
        """`turns` are all tokens after the prompt, `reference` is the prompt's (`TaskPrompt`)."""
        self._queue(key, RewardQuestion("judge", reference, "", _lists(turns)))

    def submit_turn(self, key: str, reference: str, state: str, turns: Turns) -> None:
        """Queues a turn: the outcome is the reply to the last of `turns`, or a dead verdict.
        `state` is that of the previous reply, "" at first.
        """
        if self._replies is not None:
            assert self.can_submit(), "call can_submit() first"
            self._replies.submit(key, reference, state, _lists(turns))
            return
        self._queue(key, RewardQuestion("reply", reference, state, _lists(turns)))

    def cancel(self, key: str) -> None:
        """Stops working on a question; its outcome may still arrive, unless the reply is an `async
        def`.
        """
        if self._replies is not None:
            self._replies.cancel(key)
        self._waiting = deque(question for question in self._waiting if question.key != key)

    def submit_finished(
        self, key: str, reference: str, turns: Turns, facts: TrajectoryFacts
    ) -> None:
        """Queues a finished trajectory: the scorer's numbers are the verdict's `scores`, and the
        name of a single one is "".
        """
        self._queue(key, RewardQuestion("score", reference, "", _lists(turns), facts))

    def poll(self) -> list[tuple[str, RewardOutcome]]:
        """Returns new outcomes by key. Raises `ConfigurationError` if the task cannot be built, or
        this machine lacks its sandbox.
        """
        decided: list[tuple[str, RewardOutcome]] = []
        if not self._outstanding():
            return decided
        now = self._clock()
        if self._replies is not None:
            decided += [(key, _reply_outcome(answer)) for key, answer in self._replies.poll(now)]
        for index in range(len(self._workers)):
            self._serve_process(index, now, decided)
        return decided

    def close(self) -> None:
        if self._replies is not None:
            self._replies.close()
        for index, worker in enumerate(self._workers):
            if worker is not None:
                worker.kill()
            self._workers[index] = None
        self._waiting.clear()

    def _outstanding(self) -> int:
        in_flight = sum(len(worker.held) for worker in self._workers if worker is not None)
        return len(self._waiting) + in_flight + (0 if self._replies is None else len(self._replies))

    def _queue(self, key: str, question: RewardQuestion) -> None:
        assert self.can_submit(), "call can_submit() first"
        is_reply = question.kind == "reply"
        limit_s = self._task.reply_timeout_s if is_reply else self._task.reward_timeout_s
        line = self._encoder.encode(question) + b"\n"
        self._waiting.append(PendingQuestion(key, line, limit_s))

    def _serve_process(
        self, index: int, now: float, decided: list[tuple[str, RewardOutcome]]
    ) -> None:
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
            while self._waiting and share and len(worker.held) < IN_FLIGHT_MAX:
                question = self._waiting.popleft()
                worker.give(question, now)
                share -= 1
            worker.write(now)
        reason = worker.ended_reason() if ended else worker.overdue_reason(now)
        if reason:
            self._replace(index, worker, reason, decided)

    def _check_greeting(self, worker: RewardWorker) -> None:
        if worker.greeting:
            try:
                refusal = self._decoder.decode(worker.greeting).reason
            except (ValueError, RecursionError):
                refusal = (
                    f"task {self._task.name!r}: something wrote to the pipe of its reward process "
                    f"before the task did: {reason_text(worker.greeting[:80])}"
                )
            if refusal:
                self.close()
                raise ConfigurationError(refusal)
            self._starts_failed = 0

    def _outcome(self, line: bytes) -> RewardOutcome:
        try:
            answer = self._decoder.decode(line)
        except (ValueError, RecursionError) as error:  # the task's code wrote to the pipe
            return RewardVerdict(reason=f"its answer cannot be read: {reason_text(error)}")
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
        worker.kill()
        self._workers[index] = None
        questions = list(worker.held)
        if not worker.greeting:
            self._starts_failed += 1
            if self._starts_failed >= STARTS_MAX:
                self.close()
                raise ConfigurationError(
                    f"{STARTS_MAX} reward processes in a row ended before they were ready "
                    f"({reason}); see what task {self._task.name!r} does when it is imported"
                )
        elif questions:
            # The process ended or hangs at its oldest question; the others return to the front of
            # the queue, for any process.
            decided.append((questions.pop(0).key, RewardVerdict(reason=reason)))
        self._waiting.extendleft(reversed(questions))


def _lists(turns: Turns) -> list[list[int]]:
    return [list(turn) for turn in turns]


def _reply_outcome(answer: NumberedAnswer) -> RewardOutcome:
    if answer.kind == "failed":
        return RewardVerdict(reason=answer.reason)
    return Reply(answer.tokens, answer.state)
