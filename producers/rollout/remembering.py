"""What a rollout remembers of earlier answers: a consumer of `trajectories` that feeds the history
which drafts come from.

It begins as far back as the history holds, in the archive where the log was truncated, and follows
the log a few records at a time between two looks at the engine, so that generation neither waits
for it nor stops. Nothing is committed and nothing depends on it: a record that is read twice or
never changes the speed of a rollout, not what it generates.
"""

import logging
from dataclasses import dataclass, field

import numpy as np

from producers.engines.base import DraftStats
from producers.engines.drafts import Answer, History, prompt_key
from streams.bus import Bus
from streams.errors import PositionLost
from streams.reader import TopicReader, from_begin
from streams.records import PROMPT, Position, Trajectory

log = logging.getLogger(__name__)

TOPIC = "trajectories"
LOOK_RECORDS = 32  # remembered between two looks at the engine: some milliseconds of work
SHORTEST = 16  # tokens of a record on average, at least: how many may be worth reading again


@dataclass(slots=True)
class Remembering:
    """`earlier` is the log with its archive in front of it, or the log itself."""

    bus: Bus
    earlier: Bus
    history: History
    records: int = 0
    _reader: TopicReader = field(init=False)
    _catching_up: dict[int, int] = field(init=False)
    """Offsets up to which `earlier` is read; what comes after them is in the log."""

    def __post_init__(self) -> None:
        ends, begins = self.bus.end(TOPIC), self.earlier.begin(TOPIC)
        back = self.history.tokens_max // (SHORTEST * len(ends))
        start = {p: Position(max(begins.get(p, 0), end - back)) for p, end in ends.items()}
        self._reader = TopicReader(self.earlier, TOPIC, start)
        self._catching_up = ends

    def look(self) -> None:
        """Take in what has arrived, a bounded part of it."""
        try:
            received = self._reader.follow(records_max=LOOK_RECORDS)
        except PositionLost as error:
            log.info("%s; drafts go on with what is kept", error)
            self._reader = TopicReader(self.bus, TOPIC, from_begin(self.bus, TOPIC))
            return
        answers = [
            answer_of(one.record)
            for one in received
            if isinstance(one.record, Trajectory) and one.record.finish != "dead"
        ]
        self.history.insert_all(answers)
        self.records += len(answers)
        if self._catching_up and self._has_caught_up():
            self._reader = TopicReader(self.bus, TOPIC, self._reader.positions)
            self._catching_up = {}

    def conclude(self, drafts: DraftStats) -> None:
        """Say in the log what drafting came to."""
        log.info(
            "drafts: %d answers remembered, %d of %d drafts found, %d of %d tokens right, "
            "%.2f tokens per row and pass, %.2f s looking up",
            self.records,
            drafts.found,
            drafts.asked,
            drafts.accepted,
            drafts.proposed,
            drafts.gained / max(1, drafts.rows),
            drafts.lookup_s,
        )

    def readers(self) -> list[TopicReader]:
        return [self._reader]

    def _has_caught_up(self) -> bool:
        at = self._reader.positions
        return all(at[p].offset >= end for p, end in self._catching_up.items())


def answer_of(record: Trajectory) -> Answer:
    """All that came after the prompt, with its reward."""
    fresh = len(record.tokens) - int(np.count_nonzero(record.sources == PROMPT))
    key = prompt_key(record.tokens, record.sources)
    return Answer(key, record.group, record.tokens, fresh, record.reward)
