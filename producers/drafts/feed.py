"""Fills a node's draft history from the log. Positions are not stored, so records may be read twice
or skipped: that changes a rollout's speed, never its tokens.
"""

import atexit
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollstream.errors import PositionLost, StoreError
from rollstream.producers.drafts.history import AnswerHistory, HistoryAnswer, prompt_key
from rollstream.producers.drafts.node import NodeHistory
from rollstream.producers.engines.base import DraftStats
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin, from_end
from rollstream.streams.records import (
    PROMPT,
    Annotation,
    Partial,
    Position,
    Prompt,
    Record,
    Trajectory,
)
from rollstream.streams.values import Tokens

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TopicFollower:
    """Reads a topic from about `back` records before its present end: up to that end from `earlier`
    (the log, perhaps with its archive), then from `bus`. Skips what cannot be read any more.
    """

    bus: Bus
    earlier: Bus
    topic: str
    back: int
    reader: TopicReader = field(init=False)
    _catching_up: dict[int, int] = field(init=False)
    """Offsets up to which `earlier` is read; empty afterwards."""

    def __post_init__(self) -> None:
        ends, begins = self.bus.end(self.topic), self._begins()
        back = max(1, self.back // len(ends))
        start = {p: Position(max(begins.get(p, 0), end - back)) for p, end in ends.items()}
        self.reader = TopicReader(self.earlier, self.topic, start)
        self._catching_up = ends

    def poll(self, records_max: int) -> list[Record]:
        """Raises `StoreError` only for a large record, which is in the store."""
        try:
            received = self.reader.follow(records_max=records_max)
        except (PositionLost, StoreError) as error:
            if isinstance(error, StoreError) and not self._catching_up:
                raise
            log.info("%s; drafts continue with the records that are left", error)
            self._continue_at(from_begin(self.bus, self.topic))
            self.reader.lost += isinstance(error, PositionLost)
            return []
        if self._catching_up and self._has_caught_up():
            self._continue_at(self.reader.positions)
        return [item.record for item in received]

    def skip_if_behind(self, behind_max: int) -> None:
        if self.reader.behind() > behind_max:
            self._continue_at(from_end(self.bus, self.topic))

    def _begins(self) -> Mapping[int, int]:
        try:
            return self.earlier.begin(self.topic)
        except StoreError as error:
            log.info("%s; drafts start with the records that the log keeps", error)
            # The archive is unreadable, so the log alone is read.
            self.earlier = self.bus
            return self.bus.begin(self.topic)

    def _continue_at(self, positions: Mapping[int, Position]) -> None:
        # The counters continue across readers.
        before, self.reader = self.reader, TopicReader(self.bus, self.topic, positions)
        self.reader.dead, self.reader.void = before.dead, before.void
        self.reader.lost = before.lost
        self._catching_up = {}

    def _has_caught_up(self) -> bool:
        at = self.reader.positions
        return all(at[p].offset >= end for p, end in self._catching_up.items())


GROUPS_MAX = 4096  # prompts kept: open groups are among the newest
RUNNING_MAX = 8192  # running trajectories whose last tokens are kept
POLL_PROMPTS_MAX, POLL_PARTIALS_MAX = 256, 32  # records per poll, between two polls of the engine
BEHIND_MAX = 512  # partials read late; older ones are of answers that are finished or nearly so
POLL_RECORDS_MAX = 32  # per poll: some milliseconds of work between two polls of the engine
RECORD_TOKENS_MIN = 16  # tokens that an answer is assumed to have, to bound how far back is read
REWARD_ANNOTATION = "reward"  # name of the annotation with the task's own reward
EARLY_REWARDS_MAX = 4096  # kept for answers that are not read yet

# While the engine drafts nothing, the pause after a poll is this multiple of the poll's duration,
# but at most this many seconds: the first poll opens an archive and takes long.
IDLE_POLL_FACTOR, IDLE_POLL_S_MAX = 50, 1.0


@dataclass(frozen=True, slots=True)
class _GroupPrompt:
    # From `prompt_key`.
    key: int
    length: int
    # The prompt's last `context` tokens.
    end: Tokens


@dataclass(slots=True)
class PartialFeed:
    """Turns partials of running trajectories into pieces of history, so that a sequence can draft
    from the running samples of its group (as in Seer). A partial of an unknown group is skipped.
    """

    bus: Bus
    context: int
    _prompts: TopicFollower = field(init=False)
    _partials: TopicFollower = field(init=False)
    _group_prompts: OrderedDict[int, _GroupPrompt] = field(
        default_factory=OrderedDict[int, _GroupPrompt]
    )
    _ends: OrderedDict[str, tuple[int, Tokens]] = field(
        default_factory=OrderedDict[str, tuple[int, Tokens]]
    )
    """The length, prompt included, and the last few tokens of each running trajectory."""

    def __post_init__(self) -> None:
        # A partial has no prompt, so the prompts are read too.
        self._prompts = TopicFollower(self.bus, self.bus, "prompts", GROUPS_MAX)
        self._partials = TopicFollower(self.bus, self.bus, "partials", BEHIND_MAX)

    def poll(self) -> list[HistoryAnswer]:
        """Returns the new pieces; more than `BEHIND_MAX` unread partials are all skipped."""
        for record in self._prompts.poll(POLL_PROMPTS_MAX):
            if isinstance(record, Prompt):
                self._add_prompt(record)
        partials = self._partials.poll(POLL_PARTIALS_MAX)
        if len(partials) == POLL_PARTIALS_MAX:
            self._partials.skip_if_behind(BEHIND_MAX)
        return self.pieces(partials)

    def pieces(self, records: Sequence[Record]) -> list[HistoryAnswer]:
        pieces = [self._piece(record) for record in records if isinstance(record, Partial)]
        return [piece for piece in pieces if piece is not None and piece.fresh]

    def finished(self, trajectory: str) -> None:
        self._ends.pop(trajectory, None)

    def readers(self) -> list[TopicReader]:
        return [self._prompts.reader, self._partials.reader]

    def _add_prompt(self, prompt: Prompt) -> None:
        tokens = prompt.tokens
        key = prompt_key(tokens, np.full(len(tokens), PROMPT, np.uint8))
        self._group_prompts[prompt.group] = _GroupPrompt(
            key, len(tokens), tokens[-self.context :].copy()
        )
        while len(self._group_prompts) > GROUPS_MAX:
            self._group_prompts.popitem(last=False)

    def _piece(self, partial: Partial) -> HistoryAnswer | None:
        prompt = self._group_prompts.get(partial.group)
        if prompt is None:
            return None
        length, before = self._ends.pop(partial.trajectory, (prompt.length, prompt.end))
        if length != partial.start:  # another attempt, or skipped partials
            before = prompt.end if partial.start == prompt.length else before[:0]
        # Patterns then reach across the boundary of two partials.
        tokens = np.concatenate((before, partial.tokens))
        end = partial.start + len(partial.tokens)
        self._ends[partial.trajectory] = (end, tokens[-self.context :].copy())
        while len(self._ends) > RUNNING_MAX:
            self._ends.popitem(last=False)
        return HistoryAnswer(prompt.key, partial.group, tokens, len(partial.tokens), runs=True)


@dataclass(slots=True)
class HistoryFeed:
    bus: Bus
    earlier: Bus
    history: AnswerHistory
    records: int = 0
    _trajectories: TopicFollower = field(init=False)
    _annotations: TopicFollower = field(init=False)
    _partials: PartialFeed = field(init=False)
    _early_rewards: OrderedDict[str, float] = field(default_factory=OrderedDict[str, float])

    def __post_init__(self) -> None:
        # Reads back as far as the history has room for.
        back = self.history.tokens_max // RECORD_TOKENS_MIN
        self._trajectories = TopicFollower(self.bus, self.earlier, "trajectories", back)
        self._annotations = TopicFollower(self.bus, self.earlier, "annotations", back)
        self._partials = PartialFeed(self.bus, self.history.context)

    def poll(self) -> None:
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
        readers = [self._trajectories.reader, self._annotations.reader]
        return [*readers, *self._partials.readers()]

    def _answer(self, record: Trajectory) -> HistoryAnswer:
        early = self._early_rewards.pop(record.trajectory, None)
        return answer_from_record(record, early)

    def _add_rewards(self, records: Sequence[Record]) -> None:
        for record in records:
            if not isinstance(record, Annotation) or record.name != REWARD_ANNOTATION:
                continue
            reward = float(record.values[0]) if len(record.values) else None
            if reward is None or not np.isfinite(reward):
                continue  # the annotation records that there is no reward
            # The reward may arrive before its answer.
            if not self.history.add_reward(record.trajectory, reward):
                self._early_rewards.setdefault(record.trajectory, reward)  # the first one counts
                while len(self._early_rewards) > EARLY_REWARDS_MAX:
                    self._early_rewards.popitem(last=False)


def answer_from_record(record: Trajectory, late: float | None = None) -> HistoryAnswer:
    """`late` is the reward of an annotation, used if the record has none."""
    fresh = len(record.tokens) - int(np.count_nonzero(record.sources == PROMPT))
    key = prompt_key(record.tokens, record.sources)
    reward = late if record.reward is None else record.reward
    return HistoryAnswer(key, record.group, record.tokens, fresh, reward, name=record.trajectory)


@dataclass(slots=True)
class DraftFeed:
    """Fills the node's history if no other process of the node does, or once that process has
    ended.
    """

    bus: Bus
    earlier: Callable[[], Bus]
    node: NodeHistory
    history_feed: HistoryFeed | None = None
    clock: Callable[[], float] = time.perf_counter
    idle_until_s: float = 0.0

    def __post_init__(self) -> None:
        # A killed process cannot leave, so its successor cleans up.
        atexit.register(self.node.leave)  # also after an engine's refusal, a higher term, an error

    def poll(self, drafts: bool = True) -> None:
        """Fill the history, or try to become the process that does. While the engine drafts
        nothing, calls do nothing for `IDLE_POLL_FACTOR` times the last poll's duration, at most
        `IDLE_POLL_S_MAX`.
        """
        began = self.clock()
        if drafts or began >= self.idle_until_s:
            self._poll()
            now = self.clock()
            self.idle_until_s = now + min(IDLE_POLL_FACTOR * (now - began), IDLE_POLL_S_MAX)

    def _poll(self) -> None:
        if self.history_feed is None:
            history = self.node.take_over()
            if history is None:
                return
            log.info("drafts: this process fills the history in %s", self.node.folder)
            self.history_feed = HistoryFeed(self.bus, self.earlier(), history)
        self.history_feed.poll()

    def close(self, drafts: DraftStats) -> None:
        """Log the engine's draft statistics and give up this process's part in the history."""
        records = 0 if self.history_feed is None else self.history_feed.records
        log.info(
            "drafts: %d answers in the history, %d of %d lookups found a draft, "
            "%d of %d draft tokens accepted, "
            "%.2f tokens per row and pass, %.2f s in lookups",
            records,
            drafts.found,
            drafts.asked,
            drafts.accepted,
            drafts.proposed,
            drafts.gained / max(1, drafts.rows),
            drafts.lookup_s,
        )
        atexit.unregister(self.node.leave)
        self.node.leave()

    def readers(self) -> list[TopicReader]:
        """Returns the readers of all topics, from any thread; [] while another process fills the
        history.
        """
        history_feed = self.history_feed
        return [] if history_feed is None else history_feed.readers()
