"""Lists and removes the topics and consumer groups of one run in a log (`rollstream rm`), and
nothing of another run: only names that the catalogue of topics gives a run with this prefix.

Runs on one Kafka cluster differ in the prefix of their names, and one prefix may begin with another
(`a` and `a.b`). Which groups are whose follows from the topics (`own_groups`), so groups are
removed first. On SQLite each topic is a file, removed after its side files. After an interruption
the same calls remove the rest.
"""

import os
import sqlite3
import time
from collections.abc import Collection, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from rollstream.contained_folder import ContainedFolder, check_regular
from rollstream.deadline import Deadline
from rollstream.errors import BusError, LeaseHeld, OutsideRun
from rollstream.streams.connect import open_bus_for_reading
from rollstream.streams.fence import ARCHIVE_GROUP, DISPATCH_GROUP, TRUNCATED_GROUP
from rollstream.streams.topics import catalogue

if TYPE_CHECKING:
    from rollstream.streams.bus import Bus
    from rollstream.streams.kafka.admin import RetryingAdmin
    from rollstream.streams.records import Record

GROUPS = (TRUNCATED_GROUP, DISPATCH_GROUP, ARCHIVE_GROUP, "scoring", "replay")
"""Consumer groups of a run's own programs; programs of users add others."""
SQLITE_SUFFIXES = (".db-wal", ".db-shm", ".db")  # the topic's file last
SCHEMA_BYTES = 64 << 10
LOG_TABLES = (b"CREATE TABLE settings (topic", b"CREATE TABLE members")
"""Statements in the files of a topic and of the groups (`streams/sqlite`), which are at the begin
unless a topic has many partitions.
"""
CONFIGURED_MAX = 2048
"""Records at the begin of a ledger among which the run's id is looked for."""
GONE_S = 60.0
"""Longest wait for deleted topics to leave the listing; brokers take seconds."""


def topic_names() -> tuple[str, ...]:
    """Returns the name of every topic that a run of this or an earlier release may have. Runs of
    0.1.0 have a `<topic>.dead` for each topic.
    """
    names = [topic.name for topic in catalogue()]
    return tuple(dict.fromkeys([*names, *(f"{n}.dead" for n in names if not n.endswith("dead"))]))


@dataclass(frozen=True, slots=True)
class LogContents:
    """Lists the topics and consumer groups of one run by their full names in the log. `bytes` is
    the size of all topics, `where` the folder or the cluster. False if there are none.
    """

    where: str
    topics: tuple[str, ...]
    groups: tuple[str, ...]
    bytes: int

    def __bool__(self) -> bool:
        return bool(self.topics or self.groups)

    @property
    def has_ledger(self) -> bool:
        """Whether the run's ledger is there, by which a log is known as one."""
        return any(name.rpartition(".")[2] == "ledger" for name in self.topics)


def own_topics(prefix: str, present: Collection[str]) -> tuple[str, ...]:
    """Returns the topics among `present` that a run with this prefix uses. Pure."""
    names = (f"{prefix}.{name}" if prefix else name for name in topic_names())
    return tuple(name for name in names if name in present)


def own_groups(prefix: str, topics: Collection[str], groups: Iterable[str]) -> tuple[str, ...]:
    """Returns the consumer groups of the run with this prefix, among `groups`. Pure.

    A group is named `PREFIX.GROUP.TOPIC`. Where the prefixes of several runs fit, it belongs to the
    longest of them; a prefix is a run's if `topics` has its ledger. A run without a prefix owns
    only the groups of its own programs (`GROUPS`), because other programs use such names too.
    """
    ledgers = (name for name in topics if name.endswith(".ledger"))
    others = {name.removesuffix(".ledger") for name in ledgers} - {prefix}
    start = f"{prefix}." if prefix else ""
    longer = tuple(f"{other}." for other in others if other.startswith(start))
    ends = tuple(f".{name}" for name in topic_names())
    own = {f"{group}.{name}" for group in GROUPS for name in topic_names()}
    return tuple(
        sorted(
            group
            for group in groups
            if group.startswith(start)
            and group.endswith(ends)
            and not group.startswith(longer)
            and (prefix or group in own)
        )
    )


def log_contents(url: str) -> LogContents:
    """Returns the topics and groups of the run at this URL; empty if nothing is left. Raises
    `LeaseHeld` if a consumer group on Kafka has members. SQLite keeps all groups in one file, which
    is listed as the group `groups`.
    """
    if url.startswith("kafka://"):
        return _kafka_contents(url)
    folder = Path(url.partition(":")[2])
    files = list(_sqlite_files(folder))
    topics = tuple(f.stem for f in files if f.suffix == ".db" and f.stem != "groups")
    groups = ("groups",) if any(f.stem == "groups" for f in files) else ()
    return LogContents(str(folder), topics, groups, sum(f.stat().st_size for f in files))


def remove_log(url: str, contents: LogContents) -> None:
    """Remove the run's topics and groups; objects that are missing are no error. `contents` must
    come from `log_contents` of the same URL. Raises `BusError` if the brokers keep some.
    """
    if url.startswith("kafka://"):
        _remove_from_kafka(url, contents)
        return
    folder = Path(contents.where)
    for path in _sqlite_files(folder):
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.resolve().rmdir()
        if folder.is_symlink():  # the user had moved the log to another disk
            folder.unlink()


def _sqlite_files(folder: Path) -> list[Path]:
    """Returns the files of topics and groups in the folder, the ledger's last: it proves that the
    others are a run's. A file of such a name that is no file of a log is not the run's.
    """
    names = [name for name in (*topic_names(), "groups") if name != "ledger"]
    return [
        path
        for name in (*names, "ledger")
        if _is_log_file(folder / name)
        for suffix in SQLITE_SUFFIXES
        if (path := folder / f"{name}{suffix}").is_symlink() or path.exists()
    ]


def _is_log_file(path: Path) -> bool:
    """Returns whether `path`, with the suffix `.db`, is a file of a log, whose tables SQLite states
    at the begin of the file or, before the first checkpoint, of its side file. An empty file is one
    whose creation was interrupted; a side file alone is left by an interrupted removal. A pipe or
    device is none.
    """
    starts: list[bytes] = []
    try:
        check_regular(*(f"{path}{suffix}" for suffix in SQLITE_SUFFIXES))
    except OutsideRun:
        return False
    for suffix in (".db", ".db-wal"):
        with suppress(OSError), open(f"{path}{suffix}", "rb") as file:
            starts.append(file.read(SCHEMA_BYTES))
    if not any(starts) or any(table in start for start in starts for table in LOG_TABLES):
        return True
    with suppress(sqlite3.Error), closing(sqlite3.connect(_immutable(path), uri=True)) as there:
        names = {str(name) for (name,) in there.execute("SELECT name FROM sqlite_master")}
        return {"settings", "begins"} <= names or {"commits", "members"} <= names
    return False


def _immutable(path: Path) -> str:
    """Returns the URI by which SQLite reads the file without a lock or a side file."""
    return f"file:{quote(f'{path.absolute()}.db')}?mode=ro&immutable=1"


def log_run_id(url: str) -> str:
    """Returns the id of the run whose log this is, as its ledger has it; "" if the log has no
    ledger or its first `CONFIGURED_MAX` records do not state it.
    """
    from rollstream.streams.reader import TopicReader, from_begin
    from rollstream.streams.records import Configured

    if not log_contents(url).has_ledger:
        return ""
    bus = _opened(url)
    try:
        begin, end = bus.begin("ledger"), bus.end("ledger")
        until = {p: min(end[p], at + CONFIGURED_MAX) for p, at in begin.items()}
        reader = TopicReader(bus, "ledger", from_begin(bus, "ledger"))
        records = (received.record for received in reader.read_to(until))
        named = (r.run_id for r in records if isinstance(r, Configured) and r.run_id)
        return next(named, "")
    finally:
        bus.close()


def _opened(url: str) -> "Bus":
    folder = None if url.startswith("kafka://") else ContainedFolder(Path(url.partition(":")[2]))
    return open_bus_for_reading(url, folder)


def living_rollouts(url: str, watch_s: float) -> bool:
    """Returns whether a rollout or relay of the run lives: whether a record arrives in its topic
    `status` within `watch_s`. Returns False at once if the newest status of each states that it is
    leaving.
    """
    from rollstream.streams.reader import TopicReader, from_begin

    contents = log_contents(url)
    if not any(name.rpartition(".")[2] == "status" for name in contents.topics):
        return False
    bus = _opened(url)
    try:
        reader, before = TopicReader(bus, "status", from_begin(bus, "status")), bus.end("status")
        newest = {r.key: r.record for r in reader.read_to(before)}
        if not any(map(_is_present, newest.values())):
            return False
        deadline = Deadline(watch_s)
        while not deadline.passed():
            if bus.end("status") != before:
                return True
            time.sleep(min(0.5, watch_s))
        return False
    finally:
        bus.close()


def _is_present(record: "Record") -> bool:
    """Whether this is the status of a rollout or relay that does not state that it is leaving."""
    from rollstream.streams.records import RelayStatus, RolloutStatus

    match record:
        case RolloutStatus(health=health):
            return health != "leaving"
        case RelayStatus(url=url):
            return url != ""
        case _:
            return False


def _kafka_contents(url: str) -> LogContents:
    from rollstream.streams.kafka.address import parse_kafka_url

    prefix = parse_kafka_url(url).prefix
    admin = _admin(url)
    try:
        present = admin.call("list topics", lambda a: a.topic_names())
        named = admin.call("list consumer groups", lambda a: a.group_names())
        topics, groups = own_topics(prefix, present), own_groups(prefix, present, named)
        members = admin.call("look up members", lambda a: a.members(groups))
        if busy := [name for name, count in members.items() if count]:
            raise LeaseHeld(
                f"consumer groups of the run have members ({', '.join(busy)}); stop those programs"
            )
        sizes = admin.call("look up sizes", lambda a: a.log_bytes(topics)) if topics else {}
    finally:
        admin.close()
    return LogContents(str(parse_kafka_url(url)), topics, groups, sum(sizes.values()))


def _remove_from_kafka(url: str, contents: LogContents) -> None:
    admin = _admin(url)
    try:
        groups, topics = contents.groups, contents.topics
        left = admin.call("delete consumer groups", lambda a: a.delete_groups(groups))
        if left:
            raise BusError(f"cannot delete consumer groups at {contents.where}: {left}")
        admin.call("delete topics", lambda a: a.delete_topics(topics))
        deadline = Deadline(GONE_S)
        while set(topics) & set(admin.call("list topics", lambda a: a.topic_names())):
            if deadline.passed():
                raise BusError(
                    f"{contents.where}: topics are still listed {GONE_S:.0f} s after their "
                    "deletion; is delete.topic.enable set on the brokers?"
                )
            time.sleep(0.1)
    finally:
        admin.close()


def _admin(url: str) -> "RetryingAdmin":
    from rollstream.streams.kafka.address import parse_kafka_url, read_secrets
    from rollstream.streams.kafka.admin import ANSWER_S, RetryingAdmin
    from rollstream.streams.kafka.client import Admin, base_settings

    address = parse_kafka_url(url)
    settings = base_settings(address, read_secrets(address, os.environ))
    return RetryingAdmin(str(address), lambda: Admin(settings), ANSWER_S)
