"""The archive of one topic: reads its partitions, writes files, goes on after whoever was faster.

Exactly-once rests on names alone. Every archiver's position in a partition is where a file ends (or
where the log began when there was none), a file's name is the offset it begins with, and `create`
has one winner: so no two files of a partition overlap, and each begins where another ended. A lease
only spares the work of losing.

1. Create the file. 2. Lost: read the winner's ending and go on after it. 3. Commit how far the
partition is archived, before which the log may be truncated. Killed between 1 and 3, the next start
finds the file (the commit only ever lags behind).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from consumers.archive.pending import Pending, due
from consumers.settings import ArchiveSettings
from storage.archive.names import ArchiveFile, key_of, parsed
from storage.archive.reading import Ending, ending, endings
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.errors import BusError, ObjectExists, ObjectMissing, PositionLost, SequenceGap
from streams.reader import from_begin
from streams.records import Position
from streams.truncation import ARCHIVING

log = logging.getLogger(__name__)
READ_BYTES, READ_RECORDS = 16 << 20, 8192  # of one read


@dataclass(frozen=True, slots=True)
class Written:
    """One file; `mine` False: another archiver had created it just before, so nothing was."""

    topic: str
    key: str
    records: int
    bytes: int
    seconds: float
    mine: bool


class TopicArchive:
    """One archiver of one topic; `start` comes first. `wrote` hears of each file."""

    def __init__(
        self,
        bus: Bus,
        store: ObjectStore,
        run: str,
        topic: str,
        settings: ArchiveSettings,
        monotonic: Callable[[], float] = time.monotonic,
        wrote: Callable[[Written], None] = lambda file: None,
    ) -> None:
        self._bus, self._store = bus, store
        self._run, self._topic = run, topic
        self._settings = settings
        self._monotonic = monotonic
        self._wrote = wrote
        self._archived: dict[int, Position] = {}
        self._next: dict[int, int] = {}
        self._pending: dict[int, Pending] = {}

    def start(self) -> None:
        """Find where each partition's last file ends; without files begin with what the log keeps.

        A log that no longer reaches back to there is `PositionLost`.
        """
        begins = from_begin(
            self._bus, self._topic
        )  # first: what goes meanwhile is in a file by then
        ends = endings(self._store, self._run, self._topic)
        for partition, begin in begins.items():
            where = f"{self._topic}/{partition}"
            if partition in ends:
                self._archived[partition] = _after(ends[partition])
                _check_kept(where, self._archived[partition].offset, begin.offset)
            else:
                self._archived[partition] = begin
                if begin.offset:
                    log.warning("%s: what lay before %d is not archived", where, begin.offset)
        self._next = {p: at.offset for p, at in self._archived.items()}
        self._bus.commit(ARCHIVING, self._topic, self._archived)

    def advance(self, *, exact: bool = False) -> bool:
        """Read once and write what is due; False when nothing new was there, or, unless `exact`,
        has not arrived yet.
        """
        found = self._read(exact)
        now_s = self._monotonic()
        s = self._settings
        while (partition := due(self._pending, s.roll_bytes, s.roll_s, now_s)) is not None:
            self._write(partition)
        return found

    def finish(self) -> None:
        """Archive everything up to the present end, in files however small."""
        ends = self._bus.end(self._topic)
        while any(self._next[partition] < end for partition, end in ends.items()):
            if not self.advance(exact=True):
                raise BusError(f"{self._topic}: asked to read to {ends}, but nothing comes")
        while self._pending:
            self._write(next(iter(self._pending)))

    def pending(self) -> int:
        """Records read and in no file yet; any thread may ask."""
        return sum(len(held.messages) for held in list(self._pending.values()))

    def behind(self) -> int:
        """Records of the log that are in no file yet; any thread may ask."""
        ends = self._bus.end(self._topic)
        return sum(max(0, ends[p] - at.offset) for p, at in dict(self._archived).items())

    def _read(self, exact: bool) -> bool:
        positions = self._rotated()
        try:
            messages = self._bus.read(
                self._topic,
                positions,
                records_max=READ_RECORDS,
                bytes_max=READ_BYTES,
                exact=exact,
            )
        except PositionLost as error:
            self._pass_truncated(error)
            return True
        now_s = self._monotonic()
        for message in messages:
            if message.offset != self._next[message.partition]:
                raise SequenceGap(
                    f"{self._topic}/{message.partition}: the log gives offset {message.offset} "
                    f"where {self._next[message.partition]} comes next; it lost records"
                )
            if message.partition not in self._pending:
                self._pending[message.partition] = Pending(now_s)
            self._pending[message.partition].add(message)
            self._next[message.partition] = message.offset + 1
        return bool(messages)

    def _pass_truncated(self, error: PositionLost) -> None:
        """Go on after another archiver's files where the log no longer reaches back to here.

        One that stood still while its successor archived, and the trainer truncated up to there,
        has lost nothing. `PositionLost` where no file has what is gone.
        """
        ends = endings(self._store, self._run, self._topic)
        for partition, begin in self._bus.begin(self._topic).items():
            if self._next[partition] >= begin:
                continue
            if partition not in ends or ends[partition].last + 1 < begin:
                text = f"records were truncated before they were archived: {error}"
                raise PositionLost(text) from error
            self._go_on(partition, _after(ends[partition]))

    def _rotated(self) -> dict[int, int]:
        """The positions to read from, each partition first in turn, so that none waits for long."""
        first, *others = self._next.items()
        self._next = dict([*others, first])
        return self._next

    def _write(self, partition: int) -> None:
        """Write a partition's next file, or go on after the one that is there."""
        from storage.archive.files import encoded

        messages = self._pending[partition].file()
        first, fence = messages[0], self._archived[partition].fence
        key = key_of(self._topic, self._run, partition, first.offset, first.timestamp_ms)
        started_s = self._monotonic()
        file = encoded(self._topic, messages, fence)
        there, mine = Ending(messages[-1].offset, file.fence), True
        try:
            self._store.create(key, file.data)  # 1
        except ObjectExists:
            there, mine = self._winner(key), False  # 2
            log.warning("%s: another archiver wrote it, up to offset %d", key, there.last)
        seconds = self._monotonic() - started_s
        size = len(file.data)
        self._wrote(Written(self._topic, key, len(messages), size, seconds, mine))
        self._go_on(partition, _after(there))
        self._bus.commit(ARCHIVING, self._topic, {partition: self._archived[partition]})  # 3

    def _winner(self, key: str) -> Ending:
        """How the file that is there ends."""
        listed = (parsed(entry.key, entry.bytes) for entry in self._store.list(key))
        file: ArchiveFile | None = next(listed, None)
        if file is None:
            raise ObjectMissing(f"{key} was there and is gone; who deletes files of the archive?")
        return ending(self._store, file)

    def _go_on(self, partition: int, archived: Position) -> None:
        self._archived[partition] = archived
        self._next[partition] = max(self._next[partition], archived.offset)
        if partition in self._pending:
            self._pending[partition].forget(archived.offset)
            if not self._pending[partition].messages:
                del self._pending[partition]


def _check_kept(where: str, archived: int, begin: int) -> None:
    if archived < begin:
        raise PositionLost(
            f"{where}: records {archived} to {begin - 1} were truncated before they were archived; "
            "the archive would have a gap. Put the log back from a copy, or go on without an "
            "archive (archive.enabled = false)"
        )


def _after(end: Ending) -> Position:
    return Position(end.last + 1, end.fence)
