"""Feeds the draft history from the log: finished answers from `trajectories`, late rewards from
`annotations`, and answers in progress from `partials`.

Reading starts as far back as the history holds, in the archive where the log is truncated, and then
follows the log a few records at a time between two polls of the engine. Nothing is committed and
nothing depends on completeness: a record that is read twice or never changes a rollout's speed,
never its tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollstream.producers.drafts.history import HistoryAnswer, AnswerHistory, prompt_key
from rollstream.producers.drafts.topic_follower import TopicFollower
from rollstream.producers.drafts.siblings import PartialFeed
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader
from rollstream.streams.records import PROMPT, Annotation, Record, Trajectory

POLL_RECORDS_MAX = 32  # per poll: some milliseconds of work between two polls of the engine
RECORD_TOKENS_MIN = 16  # assumed mean; bounds how many records are read again at the start
REWARD_ANNOTATION = "reward"  # name of the annotation with the task's own reward
EARLY_REWARDS_MAX = 4096  # kept for answers that are not read yet


@dataclass(slots=True)
class HistoryFeed:
    """`earlier` is the log with its archive in front of it, or the log itself."""

    bus: Bus
    earlier: Bus
    history: AnswerHistory
    records: int = 0
    _trajectories: TopicFollower = field(init=False)
    _annotations: TopicFollower = field(init=False)
    _partials: PartialFeed = field(init=False)
    _early_rewards: OrderedDict[str, float] = field(default_factory=OrderedDict[str, float])

    def __post_init__(self) -> None:
        back = self.history.tokens_max // RECORD_TOKENS_MIN
        self._trajectories = TopicFollower(self.bus, self.earlier, "trajectories", back)
        self._annotations = TopicFollower(self.bus, self.earlier, "annotations", back)
        self._partials = PartialFeed(self.bus, self.history.context)

    def poll(self) -> None:
        """Read a bounded number of records into the history."""
        finished = [
            record
            for record in self._trajectories.poll(POLL_RECORDS_MAX)
            if isinstance(record, Trajectory)
        ]
        pieces = self._partials.poll()
        answers = [self._answer(record) for record in finished if record.finish != "dead"]
        self.history.insert_all([*pieces, *answers])
        self.records += len(answers)
        for record in finished:
            self._partials.finished(record.trajectory)
        self._add_rewards(self._annotations.poll(POLL_RECORDS_MAX))

    def readers(self) -> list[TopicReader]:
        """The readers of all topics. Any thread may call it."""
        own = [self._trajectories.reader, self._annotations.reader]
        return [*own, *self._partials.readers()]

    def _answer(self, record: Trajectory) -> HistoryAnswer:
        early = self._early_rewards.pop(record.trajectory, None)
        return answer_from_record(record, early)

    def _add_rewards(self, records: Sequence[Record]) -> None:
        for record in records:
            if not isinstance(record, Annotation) or record.name != REWARD_ANNOTATION:
                continue
            reward = float(record.values[0]) if len(record.values) else None
            if reward is None or not np.isfinite(
                reward
            ):  # the annotation records that there is no reward
                continue
            if not self.history.judged(record.trajectory, reward):
                self._early_rewards.setdefault(record.trajectory, reward)  # the first one counts
                while len(self._early_rewards) > EARLY_REWARDS_MAX:
                    self._early_rewards.popitem(last=False)


def answer_from_record(record: Trajectory, late: float | None = None) -> HistoryAnswer:
    """All tokens after the prompt with their reward; `late` is the reward of an annotation."""
    fresh = len(record.tokens) - int(np.count_nonzero(record.sources == PROMPT))
    key = prompt_key(record.tokens, record.sources)
    reward = late if record.reward is None else record.reward
    return HistoryAnswer(key, record.group, record.tokens, fresh, reward, name=record.trajectory)
