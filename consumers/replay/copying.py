"""A run's records published again into another bus: the same bytes in the same partitions and in
the same order, at new offsets.

A topic that one role writes is copied whole, its void records and `Opened` too, with the fence at
its first record: so a reader of the copy takes as void exactly what a reader of the source does
(invariant 7). A chosen part of it would be a log that lost records, and is refused. Compacted
topics say what is, not what was, and are not copied.

1. What a topic may hold already is checked to be ours. 2. It is marked as begun. 3. The fence. 4.
The records. 5. All of them are read again and compared. Killed anywhere, the same call goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from consumers.replay.continued import BYTES_MAX, Contents, Continued, begin, refuse_others
from streams.bus import Bus, Entry, Message
from streams.errors import BusError, ConfigurationError
from streams.records import Fence, Position
from streams.topics import catalogue
from streams.truncation import TRUNCATED, truncated_begin

HISTORY = ("admissions", "trajectories", "annotations", "applied", "ledger")
"""What is copied unless topics are named: what an archive keeps."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A topic of the copy: its records and their hash, equal to the source's; `left_out` by the
    filter, `already` there before, `forgotten` by the source itself before the first it has.
    """

    topic: str
    records: int
    content_hash: str
    left_out: int
    already: int
    forgotten: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """`keep` None: everything. `where` is how errors name the target."""

    topics: Sequence[str]
    where: str
    keep: Callable[[Message], bool] | None = None


def prepare_target(source: Bus, target: Bus, wanted: Wanted) -> None:
    """Make the topics; `ConfigurationError` for what cannot be copied or must not be written to."""
    for topic in wanted.topics:
        settings = source.settings(topic)
        if settings.cleanup == "compact":
            raise ConfigurationError(
                f"{topic} is compacted: it says how things stand, not what happened, and is not "
                "copied"
            )
        if settings.writer and wanted.keep is not None:
            raise ConfigurationError(
                f"{topic} is numbered by its one writer ({settings.writer}): a part of it would be "
                "a log that lost records; copy it without --where, or choose other topics"
            )
    dead = {f"{topic}.dead" for topic in wanted.topics}
    beside = [topic for topic in catalogue() if topic.name in dead]
    try:
        target.create([*(source.settings(topic) for topic in wanted.topics), *beside])
    except BusError as error:
        raise ConfigurationError(
            f"{wanted.where} has such topics with other settings ({error}); give another bus"
        ) from error
    refuse_others(target, wanted.topics, wanted.where)  # 1


def records_of(source: Bus, topics: Sequence[str]) -> int:
    """How many records there are to read, for a progress bar."""
    return sum(
        end - source.begin(topic)[partition]
        for topic in topics
        for partition, end in source.end(topic).items()
    )


def copy_topic(
    source: Bus, target: Bus, topic: str, wanted: Wanted, tell: Callable[[int], None]
) -> Copied:
    """Copy it up to its present end and read the copy again; `tell` hears how many records were
    read. `BusError` if the copy is not what was written.
    """
    starts, ends = truncated_begin(source, topic), source.end(topic)
    begin(target, topic)  # 2
    _set_fences(target, topic, starts)  # 3
    contents, left_out = Contents(), 0
    writer = Continued(target, topic, wanted.where)
    for partition, start in starts.items():
        for messages in batches(source, topic, partition, start.offset, ends[partition]):
            for message in messages:
                if wanted.keep is not None and not wanted.keep(message):
                    left_out += 1
                    continue
                contents.add(partition, message.key, message.value)
                writer.put(Entry(message.key, message.value, partition))  # 4
            tell(len(messages))
    writer.close()
    found = contents_of(target, topic)
    if found.digest() != contents.digest():  # 5
        raise BusError(
            f"{wanted.where}: {topic} is not what was written; does anybody else write there?"
        )
    forgotten = sum(start.offset for start in starts.values())
    digest = contents.digest()
    return Copied(topic, contents.records, digest, left_out, writer.already, forgotten)


def contents_of(bus: Bus, topic: str) -> Contents:
    """Of all that a topic holds."""
    ends = bus.end(topic)
    contents = Contents()
    for partition, first in bus.begin(topic).items():
        for messages in batches(bus, topic, partition, first, ends[partition]):
            for message in messages:
                contents.add(partition, message.key, message.value)
    return contents


def batches(
    bus: Bus, topic: str, partition: int, start: int, end: int
) -> Iterator[Sequence[Message]]:
    """The records of a partition from `start` to below `end`, some at a time."""
    at = start
    while at < end:
        read = bus.read(topic, {partition: at}, bytes_max=BYTES_MAX)
        if not read:
            raise BusError(f"{topic} {partition}: asked to read to {end}, but it ends at {at}")
        at = read[-1].offset + 1
        yield [message for message in read if message.offset < end]


def _set_fences(target: Bus, topic: str, starts: dict[int, Position]) -> None:
    """What the source forgot had fenced earlier terms: so it does in the copy."""
    fences = {p: Position(0, at.fence) for p, at in starts.items() if at.fence != Fence()}
    if fences:
        target.commit(TRUNCATED, topic, fences)
