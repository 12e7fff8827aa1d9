"""Removes one run's topics and groups, and nothing of another: one prefix on a cluster may begin
with another (`a` and `a.b`).

The topics decide which groups are whose, so groups are removed first.
"""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.contained_folder import ContainedFolder
from rollstream.deadline import Deadline
from rollstream.streams.connect import open_bus_for_reading
from rollstream.streams.fence import ARCHIVE_GROUP, DISPATCH_GROUP, TRUNCATED_GROUP
from rollstream.streams.kind import LogContents, bus_kind
from rollstream.streams.topics import catalogue, run_topic

if TYPE_CHECKING:
    from rollstream.streams.bus import Bus
    from rollstream.streams.records import Record

GROUPS = (TRUNCATED_GROUP, DISPATCH_GROUP, ARCHIVE_GROUP, "scoring", "replay")
"""Consumer groups of a run's own programs; programs of users add others."""
CONFIGURED_MAX = 2048
"""Records at the begin of a ledger among which the run's id is looked for."""


def remove_empty_folder(folder: Path) -> None:
    """Removes an empty folder, with the link through which it was named. A mount point, or a folder
    in a read-only one, stays.
    """
    with suppress(OSError):
        folder.resolve().rmdir()
    if folder.is_symlink() and not folder.exists():
        folder.unlink()


def topic_names() -> tuple[str, ...]:
    """Returns the topics of this or an earlier release, without named weight streams; runs of 0.1.0
    have a `<topic>.dead` for each topic.
    """
    names = [topic.name for topic in catalogue()]
    return tuple(dict.fromkeys([*names, *(f"{n}.dead" for n in names if not n.endswith("dead"))]))


def names_of_topics(present: Iterable[str]) -> tuple[str, ...]:
    """Returns those of `topic_names` in its order, then those of named weight streams."""
    names, fixed = {*present}, topic_names()
    streams = sorted(name for name in names.difference(fixed) if run_topic(name))
    return (*(name for name in fixed if name in names), *streams)


def own_topics(prefix: str, present: Collection[str]) -> tuple[str, ...]:
    """Returns the topics among `present` that a run with this prefix uses. Pure."""
    start = f"{prefix}." if prefix else ""
    names = (name.removeprefix(start) for name in present if name.startswith(start))
    return tuple(f"{start}{name}" for name in names_of_topics(names))


def own_groups(prefix: str, topics: Collection[str], groups: Iterable[str]) -> tuple[str, ...]:
    """Returns the run's groups: `PREFIX.GROUP.TOPIC` belongs to the longest prefix of a run that
    fits; a prefix is a run's if `topics` has its ledger. A run without a prefix owns only the
    groups of its own programs (`GROUPS`).
    """
    ledgers = (name for name in topics if name.endswith(".ledger"))
    others = {name.removesuffix(".ledger") for name in ledgers} - {prefix}
    start = f"{prefix}." if prefix else ""
    longer = tuple(f"{other}." for other in others if other.startswith(start))
    program_groups = {f"{group}.{name}" for group in GROUPS for name in topic_names()}
    return tuple(
        sorted(
            group
            for group in groups
            if group.startswith(start)
            and run_topic(group.rpartition(".")[2])
            and not group.startswith(longer)
            and (prefix or group in program_groups)
        )
    )


def log_contents(url: str) -> LogContents:
    """Raises `LeaseHeld` if a consumer group on Kafka has members."""
    kind = bus_kind(url)
    return LogContents(url, (), (), 0) if kind is None else kind.contents(url)


def remove_log(url: str, contents: LogContents) -> None:
    """Removes a run's topics and groups; missing ones are no error. `contents` must come from
    `log_contents` of the same URL. Raises `BusError` if the brokers keep some.
    """
    if (kind := bus_kind(url)) is not None:
        kind.remove(url, contents)


def log_run_id(url: str) -> str:
    """Returns "" if the log has no ledger or its first `CONFIGURED_MAX` records do not state it."""
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
        run_ids = (r.run_id for r in records if isinstance(r, Configured) and r.run_id)
        return next(run_ids, "")
    finally:
        bus.close()


def _opened(url: str) -> "Bus":
    kind = bus_kind(url)
    folder = None if kind is None else kind.folder(url)
    return open_bus_for_reading(url, None if folder is None else ContainedFolder(folder))


def living_rollouts(url: str, watch_s: float) -> bool:
    """Returns whether a record arrives in `status` within `watch_s`; False at once if the newest
    status of each rollout and relay states that it is leaving.
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
    from rollstream.streams.records import RelayStatus, RolloutStatus

    match record:
        case RolloutStatus(health=health):
            return health != "leaving"
        case RelayStatus(url=url):
            return url != ""
        case _:
            return False
