"""Reads a topic from a bounded distance before its end, without guarantees of completeness.

The reader starts in the archive where the log is already truncated, and continues in the log. It
commits nothing. It may deliver a record twice or skip records (truncated ones, an unreadable
archive); its user must tolerate both.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.errors import PositionLost, StoreError
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin, from_end
from rollstream.streams.records import Position, Record

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TopicFollower:
    """At most `back` records of the topic lie between the start and the topic's end. `earlier` is
    the log with its archive in front of it, or the log itself.
    """

    bus: Bus
    earlier: Bus
    topic: str
    back: int
    reader: TopicReader = field(init=False)
    _catching_up: dict[int, int] = field(init=False)
    """Offsets up to which `earlier` is read; later records are read from the log."""

    def __post_init__(self) -> None:
        ends, begins = self.bus.end(self.topic), self._begins()
        back = max(1, self.back // len(ends))
        start = {p: Position(max(begins.get(p, 0), end - back)) for p, end in ends.items()}
        self.reader = TopicReader(self.earlier, self.topic, start)
        self._catching_up = ends

    def poll(self, most: int) -> list[Record]:
        """Return at most `most` of the next records that have arrived."""
        try:
            received = self.reader.follow(records_max=most)
        except (PositionLost, StoreError) as error:
            if isinstance(error, StoreError) and not self._catching_up:
                raise
            log.info("%s; drafts continue with the records that are left", error)
            self._continue_at(from_begin(self.bus, self.topic))
            self.reader.lost += isinstance(error, PositionLost)
            return []
        if self._catching_up and self._has_caught_up():
            self._continue_at(self.reader.positions)
        return [one.record for one in received]

    def skip_if_behind(self, behind_max: int) -> None:
        """Skip to the end of the topic if more than `behind_max` records are unread."""
        if self.reader.behind() > behind_max:
            self._continue_at(from_end(self.bus, self.topic))

    def _begins(self) -> Mapping[int, int]:
        """Return the first readable offsets; without a readable archive, those of the log."""
        try:
            return self.earlier.begin(self.topic)
        except StoreError as error:
            log.info("%s; drafts start with the records that the log keeps", error)
            self.earlier = self.bus
            return self.bus.begin(self.topic)

    def _continue_at(self, positions: Mapping[int, Position]) -> None:
        """Continue in the log at `positions`; counters carry over."""
        before, self.reader = self.reader, TopicReader(self.bus, self.topic, positions)
        self.reader.dead, self.reader.void = before.dead, before.void
        self.reader.lost = before.lost
        self._catching_up = {}

    def _has_caught_up(self) -> bool:
        at = self.reader.positions
        return all(at[p].offset >= end for p, end in self._catching_up.items())
