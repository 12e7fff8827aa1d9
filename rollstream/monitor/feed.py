"""Reads a run's log and metrics files and applies them to its `RunState`, from which
`rollstream top` and the report are made (`RunFeed`). It writes nothing to the run: bytes that are
no record are counted, not dead-lettered a second time.

A live view of an old run reads only a tail: the last ledger records, the admissions since then, and
the trajectories since the admission of the oldest open group. A report reads everything, archive
included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.errors import PositionLost, StoreError
from rollstream.foreign_json import parse_json
from rollstream.monitor.groups import oldest
from rollstream.monitor.state import MOVES_FILE, PROMPTS_FILE, ArchiveBacklog, DeadLetters, RunState
from rollstream.runs.parentage import read_parentage
from rollstream.storage.archive.segments import LogRecord
from rollstream.storage.log_view import LogView, TopicView
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import read_role
from rollstream.streams.bus import Bus
from rollstream.streams.dead_letters import DeadLetterReader
from rollstream.streams.fence import ARCHIVE_GROUP
from rollstream.streams.records import Record
from rollstream.streams.topics import ARCHIVED_TOPICS


def tail_positions(bus: Bus, topic: str, records_max: int) -> dict[int, int]:
    """Returns the positions at which the last `records_max` records of the topic begin; each
    partition gets an equal share of them.
    """
    begin, end = bus.begin(topic), bus.end(topic)
    share = max(1, records_max // max(1, len(end)))
    return {p: max(begin[p], last - share) for p, last in end.items()}


def positions_since(bus: Bus, topic: str, time_s: float) -> dict[int, int]:
    """Returns, for each partition, the position of the first record that was appended at or after
    `time_s`, found by bisection. Clocks of writers differ, so append times may be slightly out of
    order and a position is as inexact as the clocks.
    """
    begin, end = bus.begin(topic), bus.end(topic)
    return {p: _bisect(bus, topic, p, begin[p], end[p], time_s) for p in end}


def time_at(bus: Bus, topic: str, partition: int, offset: int) -> float | None:
    """Returns the append time of the first record from `offset` on; None if there is none or the
    record at `offset` was truncated.
    """
    try:
        messages = bus.read(topic, {partition: offset}, records_max=1)
    except PositionLost:
        return None
    return messages[0].timestamp_ms / 1000 if messages else None


def newest_time(bus: Bus, topic: str) -> float | None:
    """Returns the append time of the topic's newest record; None if the topic has no record."""
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


TAIL_BYTES = 1 << 18  # a few thousand lines; earlier lines of a long file are not read


@dataclass(slots=True)
class JsonLinesTail:
    """Reads a growing file of JSON lines from its last `TAIL_BYTES` on; `at` is the offset of the
    next byte to read, -1 before the first call.

    `path` may not exist yet. Its writer may replace the file by one with fewer of the old lines;
    reading then continues after the last line that was read. An incomplete last line (in progress,
    or cut off by a kill) is read once its newline arrives. A line that is not a JSON object is
    skipped and counted in `broken`: a monitor must not fail on a foreign file.
    """

    path: Path
    at: int = -1
    broken: int = 0
    _inode: int = 0
    _last: bytes = b""

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete lines since the previous call, oldest first."""
        try:
            found = self.path.stat()
            if (found.st_size, found.st_ino) == (self.at, self._inode):
                return []
            is_replaced = self._inode not in (0, found.st_ino) or found.st_size < self.at
            self.at, self._inode = -1 if is_replaced else self.at, found.st_ino
            with self.path.open("rb") as file:
                data = file.read(TAIL_BYTES) if self._seek(file, found.st_size) else b""
            return self._lines(data, is_replaced)
        except OSError:  # missing or not readable: nothing to show
            return []

    def _seek(self, file: Any, size: int) -> bool:
        start = self.at
        if start < 0 or size - start > TAIL_BYTES:
            start = max(0, size - TAIL_BYTES)
            file.seek(max(0, start - 1))
            if start:
                file.readline()  # skip the rest of a partial line
            self.at = file.tell() if start else 0
        file.seek(self.at)
        return size > self.at

    def _lines(self, data: bytes, is_replaced: bool) -> list[dict[str, Any]]:
        whole = data[: data.rfind(b"\n") + 1]
        self.at += len(whole)
        found: list[dict[str, Any]] = []
        lines = whole.splitlines()
        if is_replaced and self._last in lines:
            del lines[: lines.index(self._last) + 1]
        self._last = lines[-1] if lines else self._last
        for line in lines:
            try:
                found.append(parse_json(line, dict[str, Any]))
            except ValueError:
                self.broken += 1
        return found


CONTEXT_TOPICS = ("ledger", "admissions", "prompts", "weights", "status", "applied")
"""Topics that are read before the completions: they show which groups are open."""
COMPLETION_TOPICS = ("trajectories", "annotations")
"""Topics whose records (completions) the state adds to their groups."""
FIRST_TOPICS = ("prompts", "admissions", "ledger")  # one of them holds the run's first record
AGE_ONLY_TOPICS = ("assignments", "partials")  # only the age of their newest record is used
RECORDS_MAX = 4096  # per topic and call of `RunFeed.follow`
TAIL_RECORDS = 20_000  # newest records per topic that a live view reads: takes of a thousand steps
# Old completions per topic that a live view reads: at least the first number, for its histograms,
# and at most the second, however old the oldest open group is.
TRAJECTORIES_MIN, TRAJECTORIES_MAX = 1024, 16_384
LIVE_S = 3.0  # between two reads: what the second one returns was appended since the first
SLOW_REFRESH_S = 10.0  # between two refreshes of slowly changing values


class RunFeed:
    """Applies a run's new records and metrics lines to a state at each call of `follow`. One call
    reads about `RECORDS_MAX` records per topic, so the view of a large run stays responsive while
    it catches up.

    The first calls read the context topics up to their ends, from `tail` records before these.
    After that the open groups are known, and so is where to start in the completion topics. If
    `tail` is None, the feed reads everything from the begin, archive included, except old prompts
    and annotations. `also` is called with each record after the state has applied it.
    """

    def __init__(
        self,
        view: LogView,
        metrics: Path,
        tail: int | None = TAIL_RECORDS,
        also: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._view, self._tail, self._also = view, tail, also
        self._log: Bus = view.bus or view
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
        """Why the store could not be read at the last attempt; the log was read all the same."""

    def follow(self, state: RunState, now_s: float) -> bool:
        """Read new records and lines once and apply them to `state`, always the same one. Returns
        True while records remain that a topic held when the feed opened it; the caller should then
        call again at once.

        Completions (trajectories and annotations) are fetched before the admissions and the ledger,
        and applied after them. So no completion is applied to a state that is older than the
        completion, and the counts are correct.
        """
        is_live = self._has_caught_up and now_s - self._read_s < LIVE_S
        self._read_s, state.live_s = now_s, now_s if is_live else None
        if not self._topics:
            self._open_context(state)
        elif COMPLETION_TOPICS[0] not in self._topics and not self._is_behind():
            self._open_completions(state)
        completed = [one for t in COMPLETION_TOPICS for one in self._read(state, t)]
        is_idle = not completed
        for topic in CONTEXT_TOPICS:
            found = self._read(state, topic)
            is_idle = is_idle and not found
            self._apply(state, found)
        self._apply(state, completed)
        if is_idle:  # the last offsets of a compacted topic may hold no record
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
        """Open the context topics: each at its tail, but `admissions` at the time at which the
        ledger's tail begins.
        """
        log, tail = self._log, self._tail or TAIL_RECORDS
        positions = {topic: tail_positions(log, topic, tail) for topic in CONTEXT_TOPICS}
        if self._tail is not None:
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
                positions["admissions"] = positions_since(log, "admissions", start_s)
        for topic, at in positions.items():
            self._open(state, topic, None if self._tail is None and topic != "prompts" else at)

    def _open_completions(self, state: RunState) -> None:
        """Open the completion topics at the admission of the oldest open group, within
        `TRAJECTORIES_MIN` and `TRAJECTORIES_MAX` records.
        """
        opened_s = oldest(group.admitted_s for group in state.groups.open.values())
        for topic in COMPLETION_TOPICS:
            fewest = tail_positions(self._log, topic, TRAJECTORIES_MIN)
            most = tail_positions(self._log, topic, TRAJECTORIES_MAX)
            wanted = fewest if opened_s is None else positions_since(self._log, topic, opened_s)
            start = {p: max(most[p], min(fewest[p], wanted[p])) for p in fewest}
            is_whole = self._tail is None and topic == "trajectories"
            self._open(state, topic, None if is_whole else start)

    def _open(self, state: RunState, topic: str, start: Mapping[int, int] | None) -> None:
        self._ends[topic] = self._log.end(topic)
        self._topics[topic] = self._view.topic(
            topic, start, on_hole=state.apply_hole, skip_damaged=True
        )

    def _read(self, state: RunState, topic: str) -> list[LogRecord]:
        """Returns the topic's new records: all that it has by now, or `RECORDS_MAX` and more.

        One poll would return what a broker sent after the poll before it. Then all that is shown is
        a refresh or two old, and heartbeats seem to be missing where refreshes take seconds.
        """
        view, found = self._topics.get(topic), list[LogRecord]()
        while view and len(found) < RECORDS_MAX and (more := view.poll(RECORDS_MAX)):
            found += more
        if found:
            newest_s = max(record.time_s for record in found)
            state.newest_s[topic] = max(newest_s, state.newest_s.get(topic, newest_s))
            state.heard_s = state.live_s or state.heard_s
        return found

    def _is_behind(self) -> bool:
        return any(view.is_behind(self._ends[topic]) for topic, view in self._topics.items())

    def _apply(self, state: RunState, found: Sequence[LogRecord]) -> None:
        for one in found:
            if one.kind == "records" and one.record is not None:
                state.apply(one.record, one.time_s)
                self._also(one.record)

    def _update(self, state: RunState) -> None:
        """Give `state` the roles' terms and the number of unreadable messages, which the topics'
        views know.
        """
        for topic, view in self._topics.items():
            writer = self._log.settings(topic).writer
            if writer:
                state.apply_term(writer, max(at.fence.term for at in view.positions.values()))
        state.unreadable = sum(view.counts["unreadable"] for view in self._topics.values())

    def _refresh_slowly(self, state: RunState) -> None:
        """Refresh the values that change slowly or cost many requests: ages, dead letters, records
        that are not archived, and roles.
        """
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
        left = {topic: unarchived(bus, topic) for topic in ARCHIVED_TOPICS}
        state.unarchived = {topic: one for topic, one in left.items() if one is not None}

    def _read_roles(self, state: RunState, store: ObjectStore) -> None:
        """Read two facts from the store that the log lacks: the archive's term, and whether the run
        is a fork.
        """
        self.store_trouble = ""
        try:
            state.is_fork = state.is_fork or read_parentage(store) is not None
            archive = read_role(store, "archive")
        except StoreError as error:
            self.store_trouble = str(error)
            return
        if archive is not None:
            state.apply_term("archive", archive[0].term)


def unarchived(bus: Bus, topic: str) -> ArchiveBacklog | None:
    """Returns the number of the topic's records that the archive has not committed, and the append
    time of the oldest. None if it has committed all, or never any: the run has no archive.
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
