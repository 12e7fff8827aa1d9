"""The bus over SQLite in a folder. Several processes may use it, and threads a bus; after a fork
the child must open its own. Appended records survive the death of any process; with `sync="full"`
power loss too.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollstream.deadline import Deadline
from rollstream.errors import BusError
from rollstream.os_failures import explain_os_error
from rollstream.streams.bus import LEASE_S, AppendEntry, GroupReader, Message
from rollstream.streams.bus_checks import missing_topic
from rollstream.streams.records import Position
from rollstream.streams.sqlite.database import Database, Sync, network_file_system, read_mounts
from rollstream.streams.sqlite.groups import LeasedGroupReader, SqliteGroups
from rollstream.streams.sqlite.topic_log import TopicLog
from rollstream.streams.topics import Topic

POLL_S = 0.001  # a waiting reader's first pause between two reads; each pause is twice the last
POLL_S_MAX = 0.008  # the longest pause, and so the longest delay of a record by the waiting
_TOPIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def network_refusal(folder: Path) -> str:
    """Returns "" unless the folder, which need not exist, is on a network file system."""
    kind = network_file_system(str(folder.resolve()), read_mounts())
    if kind is None:
        return ""
    return (
        f"{folder.absolute()} is on a network file system ({kind}), where SQLite loses data; "
        "use a local folder, or a Kafka bus to span machines"
    )


class SqliteTopics:
    """Raises `BusError` if the folder is on a network file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._lock = threading.Lock()
        self._logs: dict[str, TopicLog] = {}
        self._empty_reads: dict[str, tuple[tuple[int, int], dict[int, int]]] = {}
        """By topic, the file's state and the positions of the last read without records. While both
        are the same, a read is spared: idle readers poll often, and checking the state costs a
        tenth of a read.
        """
        if refusal := network_refusal(self._folder):
            raise BusError(refusal)

    def settings(self, topic: str) -> Topic:
        return self._log(topic).settings

    def partitions(self, topic: str) -> int:
        return self._log(topic).settings.partitions

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        records_max: int = 512,
        bytes_max: int = 16 << 20,
        wait_s: float = 0.0,
        exact: bool = True,
    ) -> list[Message]:
        log, deadline, pause_s = self._log(topic), Deadline(wait_s), POLL_S
        while True:
            state = log.changes()
            if self._empty_reads.get(topic) != (state, positions):
                messages = log.read(positions, records_max, bytes_max)
                if messages:
                    return messages
                self._empty_reads[topic] = (state, dict(positions))
            if deadline.passed():
                return []
            time.sleep(min(pause_s, deadline.remaining_s()))
            pause_s = min(2 * pause_s, POLL_S_MAX)

    def begin(self, topic: str) -> dict[int, int]:
        return self._log(topic).begin()

    def end(self, topic: str) -> dict[int, int]:
        return self._log(topic).end()

    def close(self) -> None:
        with self._lock:
            for log in self._logs.values():
                log.close()
            self._logs.clear()

    def _path(self, topic: str) -> Path:
        return self._folder / f"{topic}.db"

    def _opened(self, path: Path) -> TopicLog:
        raise NotImplementedError

    def _log(self, topic: str) -> TopicLog:
        log = self._logs.get(topic)
        if log is not None:
            return log
        with self._lock:
            # Another process may have created the file.
            if topic not in self._logs:
                path = self._path(topic)
                if _TOPIC_NAME.fullmatch(topic) is None or not path.exists():
                    raise missing_topic(topic, str(self._folder))
                self._logs[topic] = self._opened(path)
            return self._logs[topic]


class SqliteBus(SqliteTopics):
    """Over the files of one folder, which the constructor creates. A group's member that does not
    poll for `lease_s` loses its partitions. `clock` gives seconds since 1970, for records and
    leases.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        *,
        sync: Sync = "normal",
        lease_s: float = LEASE_S,
    ) -> None:
        self._clock = clock
        self._sync: Sync = sync
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BusError(
                f"cannot make the bus's folder {folder.absolute()}: {explain_os_error(error)}"
            ) from error
        super().__init__(folder)
        self._groups = SqliteGroups(self._folder / "groups.db", sync, lease_s, clock)

    def create(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            if _TOPIC_NAME.fullmatch(topic.name) is None or topic.name == "groups":
                raise BusError(f"{topic.name!r} cannot name a topic; use letters, digits, . _ -")
            log = TopicLog.create(self._path(topic.name), topic, self._sync)
            with self._lock:
                if self._logs.setdefault(topic.name, log) is not log:
                    log.close()

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        return self._log(topic).append(entries, int(self._clock() * 1000))

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        self._groups.commit(group, topic, positions)

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        return self._groups.committed(group, topic)

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        self._log(topic).truncate(before)

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        return LeasedGroupReader(self, self._groups, group, topic, member)

    def close(self) -> None:
        super().close()
        self._groups.close()

    def _opened(self, path: Path) -> TopicLog:
        return TopicLog(Database(path, self._sync))
