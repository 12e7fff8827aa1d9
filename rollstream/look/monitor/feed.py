"""Applies a run's log and metrics files to its `RunState`, and writes nothing to the run: bytes
that are no record are counted, not dead-lettered again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.errors import PositionLost, StoreError
from rollstream.foreign_json import parse_json
from rollstream.look.index.parentage import read_parentage
from rollstream.look.monitor.groups import oldest
from rollstream.look.monitor.state import (
    MOVES_FILE,
    PROMPTS_FILE,
    ArchiveBacklog,
    DeadLetters,
    RunState,
)
from rollstream.storage.archive.log_view import LogView, TopicView
from rollstream.storage.archive.segments import LogRecord
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import read_role
from rollstream.streams.bus import Bus
from rollstream.streams.dead_letters import DeadLetterReader
from rollstream.streams.fence import ARCHIVE_GROUP
from rollstream.streams.topics import ARCHIVED_TOPICS


def tail_positions(bus: Bus, topic: str, records_max: int) -> dict[int, int]:
    """Returns the tail positions of the last `records_max` records, in equal shares by
    partition.
    """
    begin, end = bus.begin(topic), bus.end(topic)
    share = max(1, records_max // max(1, len(end)))
    return {p: max(begin[p], last - share) for p, last in end.items()}


def positions_since(bus: Bus, topic: str, time_s: float) -> dict[int, int]:
    """Returns the positions by partition, of the first record appended at or after `time_s`."""
    begin, end = bus.begin(topic), bus.end(topic)
    # Clocks of writers differ, so append times may be slightly out of order, and a position is as
    # inexact as the clocks.
    return {p: _bisect(bus, topic, p, begin[p], end[p], time_s) for p in end}


def time_at(bus: Bus, topic: str, partition: int, offset: int) -> float | None:
    """Returns the time of the first record from `offset` on; None if there is none or the record at
    `offset` was truncated.
    """
    try:
        messages = bus.read(topic, {partition: offset}, records_max=1)
    except PositionLost:
        return None
    return messages[0].timestamp_ms / 1000 if messages else None


def newest_time(bus: Bus, topic: str) -> float | None:
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


# A few thousand lines; earlier lines of a long file are not read.
TAIL_BYTES = 1 << 18


@dataclass(slots=True)
class JsonLinesTail:
    """Reads a growing file, which may not exist yet, from its last `TAIL_BYTES` on; `at` is the
    offset of the next byte, -1 before the first call. An incomplete last line is read once its
    newline arrives. A line that is no JSON object is counted in `broken`.
    """

    path: Path
    at: int = -1
    broken: int = 0
    _inode: int = 0
    _last: bytes = b""

    def read(self) -> list[dict[str, Any]]:
        try:
            stat = self.path.stat()
            if (stat.st_size, stat.st_ino) == (self.at, self._inode):
                return []
            is_replaced = self._inode not in (0, stat.st_ino) or stat.st_size < self.at
            self.at, self._inode = -1 if is_replaced else self.at, stat.st_ino
            with self.path.open("rb") as file:
                data = file.read(TAIL_BYTES) if self._seek(file, stat.st_size) else b""
            return self._lines(data, is_replaced)
        except OSError:
            # The file is missing or not readable: there is nothing to show.
            return []

    def _seek(self, file: Any, size: int) -> bool:
        start = self.at
        if start < 0 or size - start > TAIL_BYTES:
            start = max(0, size - TAIL_BYTES)
            file.seek(max(0, start - 1))
            if start:
                # The rest of a partial line is skipped.
                file.readline()
            self.at = file.tell() if start else 0
        file.seek(self.at)
        return size > self.at

    def _lines(self, data: bytes, is_replaced: bool) -> list[dict[str, Any]]:
        complete = data[: data.rfind(b"\n") + 1]
        self.at += len(complete)
        objects: list[dict[str, Any]] = []
        lines = complete.splitlines()
        # The writer may replace the file by one with fewer of the old lines: reading continues
        # after the last line that was read.
        if is_replaced and self._last in lines:
            del lines[: lines.index(self._last) + 1]
        self._last = lines[-1] if lines else self._last
        for line in lines:
            try:
                objects.append(parse_json(line, dict[str, Any]))
            except ValueError:
                # A monitor must not fail on a foreign file.
                self.broken += 1
        return objects


# Read before the completions: they show which groups are open.
CONTEXT_TOPICS = ("ledger", "admissions", "prompts", "weights", "status", "applied")
# The state adds their records (completions) to the groups.
COMPLETION_TOPICS = ("trajectories", "annotations")
# One of them holds the run's first record.
FIRST_TOPICS = ("prompts", "admissions", "ledger")
# Only the age of their newest record is used.
AGE_ONLY_TOPICS = ("assignments", "partials")
RECORDS_MAX = 4096  # per topic and call of `RunFeed.follow`
# Newest records per topic that a live view reads: takes of a thousand steps.
TAIL_RECORDS = 20_000
# Old completions per topic that a live view reads: at least the first number, for its histograms,
# and at most the second, however old the oldest open group is.
TRAJECTORIES_MIN, TRAJECTORIES_MAX = 1024, 16_384
# Between two reads: the second one returns what was appended since the first.
LIVE_S = 3.0
# Between two refreshes of slowly changing values.
SLOW_REFRESH_S = 10.0


class RunFeed:
    """Applies new records and metrics lines at each call of `follow`, about `RECORDS_MAX` per
    topic, so the view stays responsive while it catches up. It begins `tail` records before the
    ends; with `with_archive` also where the log was truncated behind them.
    """

    def __init__(
        self,
        view: LogView,
        metrics: Path,
        tail: int = TAIL_RECORDS,
        with_archive: bool = False,
    ) -> None:
        self._view, self._tail = view, tail
        self._log: Bus = view if with_archive or view.bus is None else view.bus
        self._store = view.store
        self._evaluations = JsonLinesTail(metrics / "eval.jsonl")
        self._events = JsonLinesTail(metrics / "supervisor.jsonl")
        self._moves = JsonLinesTail(metrics / MOVES_FILE)
        self._prompts = JsonLinesTail(metrics / PROMPTS_FILE)
        self._topics: dict[str, TopicView] = {}
        self._ends: dict[str, Mapping[int, int]] = {}
        self._dead_letters: DeadLetterReader | None = None
        self._slow_s = float("-inf")
        self._has_caught_up, self._read_s = False, float("-inf")
        self.store_trouble = ""
        """At the last attempt; the log was read all the same."""

    def follow(self, state: RunState, now_s: float) -> bool:
        """Reads once and applies to `state`, always the same one. Returns True while records remain
        that a topic held when the feed opened it; the caller should then call again at once.
        """
        is_live = self._has_caught_up and now_s - self._read_s < LIVE_S
        self._read_s, state.live_s = now_s, now_s if is_live else None
        if not self._topics:
            self._open_context(state)
        elif COMPLETION_TOPICS[0] not in self._topics and not self._is_behind():
            self._open_completions(state)
        # Completions are fetched before the admissions and the ledger and applied after them: no
        # completion meets a state that is older than it, and the counts are correct.
        completed = [message for t in COMPLETION_TOPICS for message in self._read(state, t)]
        is_idle = not completed
        for topic in CONTEXT_TOPICS:
            messages = self._read(state, topic)
            is_idle = is_idle and not messages
            self._apply(state, messages)
        self._apply(state, completed)
        # The last offsets of a compacted topic may hold no record.
        if is_idle:
            self._ends = {topic: {} for topic in self._ends}
        for line in self._evaluations.read():
            state.apply_evaluation(line)
        for line in self._events.read():
            state.apply_event(line)
        for line in self._moves.read():
            state.apply_move(line)
        for line in self._prompts.read():
            state.apply_prompts(line)
        self._update(state)
        if now_s - self._slow_s >= SLOW_REFRESH_S:
            self._slow_s = now_s
            self._refresh_slowly(state)
        self._has_caught_up = COMPLETION_TOPICS[0] in self._topics and not self._is_behind()
        return not self._has_caught_up

    def _open_context(self, state: RunState) -> None:
        log = self._log
        positions = {topic: tail_positions(log, topic, self._tail) for topic in CONTEXT_TOPICS}
        state.is_tail = any(positions["ledger"].values())
        if state.is_tail:
            # Start an eighth of the read part later. Otherwise a group could be read as admitted
            # that ended before that part, since writers' clocks differ, and since the ledger may be
            # truncated further than the admissions are: it would stay open for ever. Groups that
            # are still open were admitted later than that.
            end = log.end("ledger")
            later = ((p, at + (end[p] - at) // 8) for p, at in positions["ledger"].items())
            start_s = oldest(time_at(log, "ledger", p, at) for p, at in later)
            if start_s is not None:
                # Admissions begin at the time at which the ledger's tail begins.
                positions["admissions"] = positions_since(log, "admissions", start_s)
        for topic, at in positions.items():
            self._open(state, topic, at)

    def _open_completions(self, state: RunState) -> None:
        opened_s = oldest(group.admitted_s for group in state.groups.open.values())
        for topic in COMPLETION_TOPICS:
            latest = tail_positions(self._log, topic, TRAJECTORIES_MIN)
            earliest = tail_positions(self._log, topic, TRAJECTORIES_MAX)
            admitted = latest if opened_s is None else positions_since(self._log, topic, opened_s)
            # From the admission of the oldest open group, within `TRAJECTORIES_MIN` and
            # `TRAJECTORIES_MAX` records.
            start = {p: max(earliest[p], min(latest[p], admitted[p])) for p in latest}
            self._open(state, topic, start)

    def _open(self, state: RunState, topic: str, start: Mapping[int, int]) -> None:
        self._ends[topic] = self._log.end(topic)
        self._topics[topic] = self._view.topic(
            topic, start, on_hole=state.apply_hole, skip_damaged=True
        )

    def _read(self, state: RunState, topic: str) -> list[LogRecord]:
        view, messages = self._topics.get(topic), list[LogRecord]()
        # One poll would return the records that a broker sent after the poll before it. Then all
        # that is shown is a refresh or two old, and heartbeats seem to be missing where refreshes
        # take seconds.
        while view and len(messages) < RECORDS_MAX and (more := view.poll(RECORDS_MAX)):
            messages += more
        if messages:
            newest_s = max(message.time_s for message in messages)
            state.newest_s[topic] = max(newest_s, state.newest_s.get(topic, newest_s))
            state.heard_s = state.live_s or state.heard_s
        return messages

    def _is_behind(self) -> bool:
        return any(view.is_behind(self._ends[topic]) for topic, view in self._topics.items())

    def _apply(self, state: RunState, messages: Sequence[LogRecord]) -> None:
        for message in messages:
            if message.kind == "records" and message.record is not None:
                state.apply(message.record, message.time_s)

    def _update(self, state: RunState) -> None:
        for topic, view in self._topics.items():
            writer = self._log.settings(topic).writer
            if writer:
                state.apply_term(writer, max(at.fence.term for at in view.positions.values()))
        state.unreadable = sum(view.counts["unreadable"] for view in self._topics.values())

    def _refresh_slowly(self, state: RunState) -> None:
        log = self._log
        if state.began_s is None:
            first = ((t, *at) for t in FIRST_TOPICS for at in log.begin(t).items())
            state.began_s = oldest(time_at(log, *at) for at in first)
        for topic in AGE_ONLY_TOPICS:
            newest_s = newest_time(log, topic)
            if newest_s is not None:
                state.newest_s[topic] = newest_s
        if self._view.bus is not None:
            self._read_letters_and_backlog(state, self._view.bus)
        if self._store is not None:
            self._read_roles(state, self._store)

    def _read_letters_and_backlog(self, state: RunState, bus: Bus) -> None:
        topics = (*CONTEXT_TOPICS, *COMPLETION_TOPICS, *AGE_ONLY_TOPICS)
        self._dead_letters = self._dead_letters or DeadLetterReader(bus, topics)
        for dead in self._dead_letters.read():
            before = state.dead_letters.get(dead.source, DeadLetters(0, ""))
            state.dead_letters[dead.source] = DeadLetters(before.count + 1, dead.reason)
        backlogs = {topic: unarchived(bus, topic) for topic in ARCHIVED_TOPICS}
        state.unarchived = {
            topic: backlog for topic, backlog in backlogs.items() if backlog is not None
        }

    def _read_roles(self, state: RunState, store: ObjectStore) -> None:
        self.store_trouble = ""
        try:
            state.is_fork = state.is_fork or read_parentage(store) is not None
            # The log lacks the archive's term.
            archive = read_role(store, "archive")
        except StoreError as error:
            self.store_trouble = str(error)
            return
        if archive is not None:
            state.apply_term("archive", archive[0].term)


def unarchived(bus: Bus, topic: str) -> ArchiveBacklog | None:
    """Returns records that the archive has not committed; None if it has committed all, or never
    any: the run has no archive.
    """
    committed = bus.committed(ARCHIVE_GROUP, topic)
    if not committed:
        return None
    end = bus.end(topic)
    # Only archived records are truncated, so a committed position is never below the begin.
    begin = dict.fromkeys(end, 0) if committed.keys() >= end.keys() else bus.begin(topic)
    at = {p: committed[p].offset if p in committed else begin[p] for p in end}
    pending = {p: offset for p, offset in at.items() if offset < end[p]}
    if not pending:
        return None
    times = (time_at(bus, topic, p, max(begin[p], offset)) for p, offset in pending.items())
    since_s = oldest(times)
    records = sum(end[p] - offset for p, offset in pending.items())
    return None if since_s is None else ArchiveBacklog(records, since_s)
