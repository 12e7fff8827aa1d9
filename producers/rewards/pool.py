"""Computes rewards in separate processes. Every question gets a verdict, also when the task's code
raises, hangs or ends its process, and no rollout stops for it.

No call blocks: `submit` queues a question; `poll` exchanges bytes with the processes and returns
verdicts. A process writes a greeting when its task is built, then answers its questions in order,
so one that hangs or ends does so at its oldest unanswered question. That question gets a dead
verdict; the others go to the process's replacement.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.producers.rewards.process import RewardAnswer, RewardQuestion
from rollstream.producers.rewards.worker import RewardWorker
from rollstream.producers.scoring.functions import TrajectoryFacts
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Reply, Turns

_IN_FLIGHT_MAX = 64  # questions given to one process; the others wait in the pool for any process
_STARTS_MAX = 3  # processes in a row that end before their greeting


@dataclass(frozen=True, slots=True)
class RewardVerdict:
    """A reward with its named scores, or the `reason` why there will be none."""

    reward: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    reason: str = ""

    @property
    def dead(self) -> bool:
        return bool(self.reason)


RewardOutcome = RewardVerdict | Reply
"""A result of `poll`: a verdict for `submit`; a reply or a dead verdict for `submit_turn`."""


@dataclass(frozen=True, slots=True)
class _PendingQuestion:
    key: str
    line: bytes


class RewardPool:
    """Gives every submitted question exactly one outcome, in any order. Processes start with the
    first question.
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
        self._workers: list[RewardWorker[_PendingQuestion] | None] = [None] * task.reward_processes
        self._starts_failed = 0

    def can_submit(self) -> bool:
        """Whether the queue has room; `submit` asserts it."""
        return self._outstanding() < self._capacity

    def submit(self, key: str, reference: str, turns: Turns) -> None:
        """Queue a complete answer; its outcome is a verdict with the task's reward."""
        self._queue(key, RewardQuestion("judge", reference, "", _lists(turns)))

    def submit_turn(self, key: str, reference: str, state: str, turns: Turns) -> None:
        """Queue a turn for the task's environment; its outcome is the reply to the last of `turns`,
        or a dead verdict.
        """
        self._queue(key, RewardQuestion("reply", reference, state, _lists(turns)))

    def submit_finished(
        self, key: str, reference: str, turns: Turns, facts: TrajectoryFacts
    ) -> None:
        """Queue a finished trajectory for the scorer's function. Its numbers are the `scores` of
        the verdict; a single number has the name "".
        """
        self._queue(key, RewardQuestion("score", reference, "", _lists(turns), facts))

    def poll(self) -> list[tuple[str, RewardOutcome]]:
        """Return the outcomes since the last poll. Raises `ConfigurationError` if the task cannot
        be built.
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
        held = sum(len(worker.held) for worker in self._workers if worker is not None)
        return len(self._waiting) + held

    def _queue(self, key: str, question: RewardQuestion) -> None:
        assert self.can_submit(), "call can_submit() first"
        self._waiting.append(_PendingQuestion(key, self._encoder.encode(question) + b"\n"))

    def _serve_process(
        self, index: int, now: float, decided: list[tuple[str, RewardOutcome]]
    ) -> None:
        """Serve one process: read its answers, write questions, replace it if it ended or hangs."""
        worker = self._workers[index]
        if worker is None:
            if not self._waiting:
                return
            worker = self._workers[index] = RewardWorker[_PendingQuestion](
                self._task, now, self._function
            )
        # Checked before reading, so that no answer of a dying process is lost.
        ended = worker.has_ended()
        for question, line in worker.read(now):
            decided.append((question.key, self._outcome(line)))
        self._check_greeting(worker)
        if not ended:  # an equal share of the waiting questions, rounded up
            share = -(-len(self._waiting) // len(self._workers))
            while self._waiting and share and len(worker.held) < _IN_FLIGHT_MAX:
                question = self._waiting.popleft()
                worker.give(question, question.line, now)
                share -= 1
            worker.write(now)
        reason = worker.ended_reason() if ended else worker.overdue_reason(now)
        if reason:
            self._replace(index, worker, reason, decided)

    def _check_greeting(self, worker: RewardWorker[_PendingQuestion]) -> None:
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
        if answer.kind == "reply":
            return Reply(answer.tokens, answer.state)
        return RewardVerdict(answer.reward, answer.scores, answer.reason)

    def _replace(
        self,
        index: int,
        worker: RewardWorker[_PendingQuestion],
        reason: str,
        decided: list[tuple[str, RewardOutcome]],
    ) -> None:
        """Give the oldest question a dead verdict if the process had started it; the others return
        to the front of the queue.
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
