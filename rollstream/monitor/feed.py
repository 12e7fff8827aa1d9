"""Brings a `RunState` up to date from the log and the metrics files, without writing.

Completions are fetched before the admissions and the ledger but applied after them. So a completion
is never applied to a state that is older than itself, and the counts are correct. Of an old run
only a tail is read: the last ledger records, the admissions since then, and the trajectories since
the admission of the oldest open group. Undecodable bytes are counted, never dead-lettered again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollstream.errors import PositionLost
from rollstream.monitor.groups import oldest
from rollstream.monitor.moves import MOVES_FILE
from rollstream.monitor.state import ArchiveBacklog, DeadLetters, RunState
from rollstream.streams.bus import Bus, Message
from rollstream.streams.dead_letters import DeadLetterReader
from rollstream.streams.reader import classify_message
from rollstream.streams.records import Fence, Opened, Record
from rollstream.streams.truncation import ARCHIVE_GROUP


class TimedRecord(msgspec.Struct, frozen=True, gc=False):
    """A record and its append time in seconds since the epoch."""

    record: Record
    time_s: float


class TopicWatcher:
    """Reads one topic from `positions` on: in order, without void records, without any write.

    `newest_s` is the append time of the newest message of any kind, None before the first;
    `unreadable` counts messages that do not decode to a record.
    """

    def __init__(self, bus: Bus, topic: str, positions: Mapping[int, int]) -> None:
        settings = bus.settings(topic)
        self.positions = dict(positions)
        self.newest_s: float | None = None
        self.unreadable = 0
        self._bus, self._topic = bus, topic
        self._fences = dict.fromkeys(positions, Fence())
        self._fenced, self._compacted = bool(settings.writer), settings.cleanup == "compact"
        self._first = 0  # rotates, so that a full partition does not starve the others

    def poll(self, records_max: int, *, exact: bool = True) -> list[TimedRecord]:
        """Returns the next records (`exact`: see `Bus.read`). If a position was truncated, reading
        continues at the topic's begin.
        """
        try:
            messages = self._bus.read(
                self._topic, self._offsets(), records_max=records_max, exact=exact
            )
        except PositionLost:
            self.positions = dict(self._bus.begin(self._topic))
            self._fences = dict.fromkeys(self.positions, Fence())
            return []
        return self._classify(messages)

    def is_behind(self, ends: Mapping[int, int]) -> bool:
        """True if a record below these end offsets is unread."""
        return any(offset < ends.get(p, 0) for p, offset in self.positions.items())

    def _offsets(self) -> dict[int, int]:
        partitions = list(self.positions)
        self._first = (self._first + 1) % max(1, len(partitions))
        turned = partitions[self._first :] + partitions[: self._first]
        return {partition: self.positions[partition] for partition in turned}

    def _classify(self, messages: Sequence[Message]) -> list[TimedRecord]:
        seen: list[TimedRecord] = []
        for message in messages:
            self.positions[message.partition] = message.offset + 1
            time_s = message.timestamp_ms / 1000
            self.newest_s = max(time_s, self.newest_s or time_s)
            if message.value is None:
                continue
            self._fences[message.partition], classified = classify_message(
                message.value,
                self._fences[message.partition],
                topic=self._topic,
                fenced=self._fenced,
                compacted=self._compacted,
            )
            self.unreadable += bool(classified.reason)
            record = classified.record
            if record is not None and not classified.void and not isinstance(record, Opened):
                seen.append(TimedRecord(record, time_s))
        return seen


def tail_positions(bus: Bus, topic: str, records_max: int) -> dict[int, int]:
    """Positions before the last `records_max` records, divided evenly among partitions."""
    begin, end = bus.begin(topic), bus.end(topic)
    share = max(1, records_max // max(1, len(end)))
    return {p: max(begin[p], last - share) for p, last in end.items()}


def positions_since(bus: Bus, topic: str, time_s: float) -> dict[int, int]:
    """Positions of the first records appended at or after `time_s`, by bisection.

    Append times in a partition may be slightly out of order: the position is as inexact as the
    writers' clocks.
    """
    begin, end = bus.begin(topic), bus.end(topic)
    return {p: _bisect(bus, topic, p, begin[p], end[p], time_s) for p in end}


def time_at(bus: Bus, topic: str, partition: int, offset: int) -> float | None:
    """Returns the append time of the first kept record from `offset` on; None without one."""
    try:
        messages = bus.read(topic, {partition: offset}, records_max=1)
    except PositionLost:
        return None
    return messages[0].timestamp_ms / 1000 if messages else None


def newest_time(bus: Bus, topic: str) -> float | None:
    """Returns the append time of the topic's newest record; None if it holds none."""
    last = {p: end - 1 for p, end in bus.end(topic).items() if end}
    times = [time_at(bus, topic, partition, offset) for partition, offset in last.items()]
    return max((time_s for time_s in times if time_s is not None), default=None)


def _bisect(bus: Bus, topic: str, partition: int, low: int, high: int, time_s: float) -> int:
    while low < high:
        middle = (low + high) // 2
        at_s = time_at(bus, topic, partition, middle)
        if at_s is not None and at_s < time_s:
            low = middle + 1
        else:
            high = middle
    return low


TAIL_BYTES = 1 << 18  # a few thousand lines; the monitor ignores the earlier ones of an old run


@dataclass(slots=True)
class JsonLinesTail:
    """Reads a growing file of JSON lines, starting from a bounded tail.

    `path` may not exist yet and may be replaced by a shorter file. An incomplete last line (in
    progress, or truncated by a kill) is read once its newline arrives. A line that is not a JSON
    object is counted and skipped: a monitor must not fail on a foreign file.
    """

    path: Path
    at: int = -1
    broken: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete lines since the previous call, oldest first."""
        try:
            size = self.path.stat().st_size
            if size == self.at:
                return []
            with self.path.open("rb") as file:
                return self._lines(file.read(TAIL_BYTES) if self._seek(file, size) else b"")
        except OSError:  # missing or not readable: nothing to show
            return []

    def _seek(self, file: Any, size: int) -> bool:
        if size < self.at:
            self.at = -1
        start = self.at
        if start < 0 or size - start > TAIL_BYTES:
            start = max(0, size - TAIL_BYTES)
            file.seek(max(0, start - 1))
            if start:
                file.readline()  # skip the rest of a partial line
            self.at = file.tell() if start else 0
        file.seek(self.at)
        return size > self.at

    def _lines(self, data: bytes) -> list[dict[str, Any]]:
        whole = data[: data.rfind(b"\n") + 1]
        self.at += len(whole)
        found: list[dict[str, Any]] = []
        for line in whole.splitlines():
            try:
                found.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                self.broken += 1
        return found


CONTEXT_TOPICS = ("prompts", "admissions", "ledger", "weights", "status", "applied")
COMPLETION_TOPICS = ("trajectories", "annotations")
FIRST_TOPICS = ("prompts", "admissions", "ledger")  # hold the run's first records
AGE_ONLY_TOPICS = ("assignments", "partials")  # only the age of their newest record is used
ARCHIVED_TOPICS = ("trajectories", "annotations", "ledger", "admissions", "applied")
RECORDS_MAX = 4096  # per topic and refresh
TAIL_RECORDS = 20_000  # newest records per topic behind a new state: takes of a thousand steps
TRAJECTORIES_MIN, TRAJECTORIES_MAX = 1024, 16_384  # for histograms; bound for open groups
SLOW_REFRESH_S = 10.0  # between two refreshes of slowly changing values


class RunFeed:
    """Call `follow` often. One call reads at most `RECORDS_MAX` records per topic, so the view of a
    large run stays responsive while it catches up.
    """

    def __init__(self, bus: Bus, metrics: Path, tail: int = TAIL_RECORDS) -> None:
        self._bus, self._tail = bus, tail
        self._evaluations = JsonLinesTail(metrics / "eval.jsonl")
        self._events = JsonLinesTail(metrics / "supervisor.jsonl")
        self._moves = JsonLinesTail(metrics / MOVES_FILE)
        self._watchers: dict[str, TopicWatcher] = {}
        self._ends: dict[str, dict[int, int]] = {}
        self._dead_letters: DeadLetterReader | None = None
        self._slow_s = float("-inf")

    def follow(self, state: RunState, now_s: float) -> bool:
        """Read once; returns True while records remain that were in the log at the start. The
        caller should then call again at once.
        """
        if not self._watchers:
            self._open_explaining(state)
        elif COMPLETION_TOPICS[0] not in self._watchers and not self._is_behind():
            self._open_explained(state)
        explained = [one for topic in COMPLETION_TOPICS for one in self._poll(topic, exact=False)]
        for topic in CONTEXT_TOPICS:
            self._apply(state, self._poll(topic, exact=bool(explained)))
        self._apply(state, explained)
        for line in self._evaluations.read():
            state.apply_evaluation(line)
        for line in self._events.read():
            state.apply_event(line)
        for line in self._moves.read():
            state.apply_move(line)
        self._update_ages(state)
        if now_s - self._slow_s >= SLOW_REFRESH_S:
            self._slow_s = now_s
            self._refresh_slowly(state)
        return COMPLETION_TOPICS[0] not in self._watchers or self._is_behind()

    def _open_explaining(self, state: RunState) -> None:
        """Start at the ledger's tail, and at the admissions of the same period."""
        bus = self._bus
        positions = {topic: tail_positions(bus, topic, self._tail) for topic in CONTEXT_TOPICS}
        begin = bus.begin("ledger")
        state.is_tail = positions["ledger"] != begin or bus.begin("ledger").get(0, 0) > 0
        if positions["ledger"] != begin:
            # Start an eighth of the tail later. Otherwise a group that ended before the tail would
            # stay open for ever, because writers' clocks differ. A group that is still open was
            # admitted more recently than that.
            later = ((p, at + self._tail // 8) for p, at in positions["ledger"].items())
            start_s = oldest(time_at(bus, "ledger", p, at) for p, at in later)
            if start_s is not None:
                positions["admissions"] = positions_since(bus, "admissions", start_s)
        for topic, at in positions.items():
            self._watch(topic, at)

    def _open_explained(self, state: RunState) -> None:
        """Start at the admission of the oldest open group, within bounds."""
        opened_s = oldest(group.admitted_s for group in state.groups.open.values())
        for topic in COMPLETION_TOPICS:
            fewest = tail_positions(self._bus, topic, TRAJECTORIES_MIN)
            most = tail_positions(self._bus, topic, TRAJECTORIES_MAX)
            wanted = fewest if opened_s is None else positions_since(self._bus, topic, opened_s)
            self._watch(topic, {p: max(most[p], min(fewest[p], wanted[p])) for p in fewest})

    def _watch(self, topic: str, positions: dict[int, int]) -> None:
        self._ends[topic] = self._bus.end(topic)
        self._watchers[topic] = TopicWatcher(self._bus, topic, positions)

    def _poll(self, topic: str, *, exact: bool) -> list[TimedRecord]:
        watcher = self._watchers.get(topic)
        return watcher.poll(RECORDS_MAX, exact=exact) if watcher else []

    def _is_behind(self) -> bool:
        return any(one.is_behind(self._ends[topic]) for topic, one in self._watchers.items())

    def _apply(self, state: RunState, seen: list[TimedRecord]) -> None:
        for one in seen:
            state.apply(one.record, one.time_s)

    def _update_ages(self, state: RunState) -> None:
        if state.began_s is None:
            first = ((t, *at) for t in FIRST_TOPICS for at in self._bus.begin(t).items())
            state.began_s = oldest(time_at(self._bus, *at) for at in first)
        for topic, watcher in self._watchers.items():
            if watcher.newest_s is not None:
                state.newest_s[topic] = watcher.newest_s
        state.unreadable = sum(watcher.unreadable for watcher in self._watchers.values())

    def _refresh_slowly(self, state: RunState) -> None:
        for topic in AGE_ONLY_TOPICS:
            newest_s = newest_time(self._bus, topic)
            if newest_s is not None:
                state.newest_s[topic] = newest_s
        topics = (*CONTEXT_TOPICS, *COMPLETION_TOPICS, *AGE_ONLY_TOPICS)
        self._dead_letters = self._dead_letters or DeadLetterReader(self._bus, topics)
        for dead in self._dead_letters.read():
            before = state.dead_letters.get(dead.source, DeadLetters(0, ""))
            state.dead_letters[dead.source] = DeadLetters(before.count + 1, dead.reason)
        left = {topic: unarchived(self._bus, topic) for topic in ARCHIVED_TOPICS}
        state.unarchived = {topic: one for topic, one in left.items() if one is not None}


def unarchived(bus: Bus, topic: str) -> ArchiveBacklog | None:
    """Returns the records that the archive has not committed. None if it committed all of them, or
    none ever (the run has no archive).
    """
    committed = bus.committed(ARCHIVE_GROUP, topic)
    if not committed:
        return None
    end = bus.end(topic)
    # Only archived records are truncated, so a committed position is never below the begin.
    begin = dict.fromkeys(end, 0) if committed.keys() >= end.keys() else bus.begin(topic)
    at = {p: committed[p].offset if p in committed else begin[p] for p in end}
    behind = {p: offset for p, offset in at.items() if offset < end[p]}
    if not behind:
        return None
    times = (time_at(bus, topic, p, max(begin[p], offset)) for p, offset in behind.items())
    since_s = oldest(times)
    records = sum(end[p] - offset for p, offset in behind.items())
    return None if since_s is None else ArchiveBacklog(records, since_s)
