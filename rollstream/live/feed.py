"""Reading what the live view shows: topics and metrics files, from the beginning and then on.

It only reads. Finished trajectories are counted by their keys without decoding them.
"""

from pathlib import Path
from typing import Any

from rollstream.live.state import RunState
from storage.metrics import read_metrics
from streams.bus import Bus
from streams.errors import PositionLost
from streams.reader import TopicReader, from_begin

TOPICS = ("admissions", "ledger", "status", "weights")
RECORDS_MAX = 4096  # of a topic, per look


class Feed:
    """`follow` brings a state up to what is in the log and in `metrics/eval.jsonl` now."""

    def __init__(self, bus: Bus, metrics: Path) -> None:
        self._bus, self._evaluations = bus, metrics / "eval.jsonl"
        self._readers = {topic: TopicReader(bus, topic, from_begin(bus, topic)) for topic in TOPICS}
        self._finished = dict(bus.begin("trajectories"))
        self._size = -1

    def follow(self, state: RunState) -> None:
        """One look; at most `RECORDS_MAX` records of a topic, so that a view of an old run stays
        alive while it catches up.
        """
        for topic, reader in self._readers.items():
            try:
                received = reader.poll(0.0, RECORDS_MAX)
            except PositionLost:  # truncated or compacted meanwhile: the rest is all that there is
                self._readers[topic] = TopicReader(self._bus, topic, from_begin(self._bus, topic))
                continue
            for one in received:
                state.apply(one.record)
        self._count_finished(state)
        self._read_evaluations(state)

    def _count_finished(self, state: RunState) -> None:
        try:
            messages = self._bus.read("trajectories", self._finished, records_max=RECORDS_MAX)
        except PositionLost:
            self._finished = dict(self._bus.begin("trajectories"))
            return
        for message in messages:
            self._finished[message.partition] = message.offset + 1
            if message.key.isdigit():
                state.apply_finished(int(message.key))

    def _read_evaluations(self, state: RunState) -> None:
        size = self._evaluations.stat().st_size if self._evaluations.exists() else -1
        if size != self._size:
            self._size = size
            lines: list[dict[str, Any]] = read_metrics(self._evaluations)
            state.apply_evaluations(lines)
