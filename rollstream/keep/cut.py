"""A consistent cut of a living run: a state of log and store that a crash of all processes at one
moment could have left. No process stops: the order in which log and store are read makes it
consistent.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollstream.deadline import Deadline
from rollstream.errors import BusError, ObjectMissing, TopicMissing
from rollstream.keep.own import declared_keys, manifest_names, sort_objects
from rollstream.keep.removal import version_folders
from rollstream.storage.stores.base import ListedObject, ObjectStore
from rollstream.storage.stores.json_objects import decode_json
from rollstream.storage.weights.checkpoints import CheckpointId, stored_checkpoints
from rollstream.storage.weights.named_streams import (
    POLICY,
    WeightStream,
    run_streams,
    split_key,
)
from rollstream.storage.weights.pointer import POINTER_KEY, Pointer
from rollstream.streams.bus import Bus
from rollstream.streams.foreign_text import whole_number
from rollstream.streams.records import Position
from rollstream.streams.removal import GROUPS, topic_names
from rollstream.streams.topics import Topic, run_topic
from rollstream.streams.values import Version

QUIET_S = 120.0
"""For a moment without a record of a single holder. A look takes milliseconds, and these topics get
some records a second.
"""
SHARED_ORDER = ("dead", "annotations", "trajectories", "applied", "partials", "status")
"""In which the ends of topics with many writers are read (`_fix_ends`)."""


@dataclass(frozen=True, slots=True)
class CommittedPosition:
    group: str
    partition: int
    at: Position


@dataclass(frozen=True, slots=True)
class TopicCut:
    """Settings, first offset and end of each partition, and committed positions of
    consumer groups.
    """

    topic: Topic
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    commits: tuple[CommittedPosition, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    topics: tuple[TopicCut, ...]
    read: dict[str, bytes]
    """Objects that the run replaces, as of the cut."""
    listed: tuple[ListedObject, ...]
    """Objects that never change, to be copied later."""
    required: tuple[str, ...]
    """Folders of the store that a resumed run needs."""
    step: int
    """Of the policy's newest version; 0 without one."""
    checkpoint: str
    """Id of the newest checkpoint; "" without one."""


def present_topics(bus: Bus, streams: Iterable[WeightStream]) -> list[Topic]:
    """Returns the present topics with their settings; those of these weight streams among them."""
    topics: list[Topic] = []
    for name in dict.fromkeys((*topic_names(), *(stream.topic.name for stream in streams))):
        own = run_topic(name)
        with suppress(TopicMissing):
            settings = bus.settings(name)
            topics.append(dataclasses.replace(settings, writer=own.writer if own else ""))
    return topics


def fix_cut(bus: Bus, store: ObjectStore, run: str) -> Cut:
    """Fix a consistent cut of log and store. Raises `ObjectMissing` if the run deleted a required
    object meanwhile (another attempt may succeed), `BusError` if the single holders never paused.

    1. Read the first offsets of the topics, then the positions of consumer groups.
    2. List and read the objects that name positions in the log: checkpoints, archive, dispatch's
       state.
    3. Read the ends of the topics and the pointers of the weight streams (`_fix_ends`).
    4. List the versions up to the pointers.

    A weight stream that begins after 1 is not in the cut.
    """
    streams = run_streams(store)
    topics = present_topics(bus, streams)
    # A truncation commits the position with its fence first. If positions were read first, a
    # truncation in between would make the copy begin at a record of unknown fence, and a zombie's
    # record after it would count (invariant 7).
    begins = {topic.name: bus.begin(topic.name) for topic in topics}  # 1
    commits = {topic.name: tuple(_commits(bus, topic.name)) for topic in topics}
    # Before 3: a file that the archive creates later may hold records after the cut's end. The
    # restored run writes other records at these offsets, which the archive would take for archived.
    checkpoints = [stored.id for stored in stored_checkpoints(store) if stored.whole]  # 2
    every = list(store.list())
    names = manifest_names(store, every)
    own_objects, _ = sort_objects(every, run, names)
    read: dict[str, bytes] = {}
    for entry, keys in own_objects:
        if keys.copied == "cut" and split_key(entry.key)[1] != POINTER_KEY:
            with suppress(ObjectMissing):
                read[entry.key] = store.get(entry.key)
    ends, pointers = _fix_ends(bus, store, topics, streams)  # 3
    read |= {stream.prefix + POINTER_KEY: data for stream, data in pointers.items() if data}
    believed = {
        stream: decode_json(data, Pointer, stream.prefix + POINTER_KEY).version if data else None
        for stream, data in pointers.items()
    }
    # After 3: an earlier listing may lack the newest version.
    versions = [e for item in believed.items() for e in _versions(store, *item, names)]  # 4
    listed = [entry for entry, keys in own_objects if keys.copied == "later"]
    cut_objects = [
        *(candidate for candidate in listed if _is_kept(candidate.key, checkpoints)),
        *versions,
    ]
    required = (
        *(f"{newest.folder}/" for newest in checkpoints[-1:]),
        *(folder for item in believed.items() for folder in version_folders(store, *item)),
    )
    _check_complete(required, cut_objects)
    cuts = tuple(
        TopicCut(
            topic, _offsets(begins[topic.name]), _offsets(ends[topic.name]), commits[topic.name]
        )
        for topic in topics
    )
    newest, checkpoint = believed[POLICY], "".join(map(str, checkpoints[-1:]))
    step = newest.number if newest else 0
    return Cut(cuts, read, tuple(cut_objects), required, step, checkpoint)


def _offsets(of_partitions: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(at for _, at in sorted(of_partitions.items()))


def _commits(bus: Bus, topic: str) -> Iterator[CommittedPosition]:
    for group in GROUPS:
        for partition, at in sorted(bus.committed(group, topic).items()):
            yield CommittedPosition(group, partition, at)


def _fix_ends(
    bus: Bus, store: ObjectStore, topics: Sequence[Topic], streams: Sequence[WeightStream]
) -> tuple[dict[str, dict[int, int]], Mapping[WeightStream, bytes]]:
    """The ends of all topics and each stream's pointer (b"" without one), all of one moment."""
    single = [topic.name for topic in topics if topic.writer]
    shared = [topic.name for topic in topics if not topic.writer]
    # An annotation without its trajectory in the cut would count for the trajectory that the
    # restored run generates under that name: annotations are read first.
    shared.sort(key=lambda name: SHARED_ORDER.index(name) if name in SHARED_ORDER else 0)
    deadline = Deadline(QUIET_S)
    pointers = _pointers(store, streams)
    while not deadline.passed():
        before = {name: bus.end(name) for name in single}
        ends = {name: bus.end(name) for name in shared}
        # No version is published in between; otherwise the cut could have a trajectory of a version
        # that its pointer and ledger lack.
        if before == {name: bus.end(name) for name in single}:
            # Not in each round: a request to a bucket takes longer than the pauses between
            # dispatch's records.
            now = _pointers(store, streams)
            if now == pointers:
                return ends | before, pointers
            pointers = now
    raise BusError(
        f"no cut in {QUIET_S:.0f} s: trainer or dispatch wrote during each look at the ends; "
        "repeat the backup on a machine nearer to the log, or while the run is idle"
    )


def _pointers(store: ObjectStore, streams: Sequence[WeightStream]) -> dict[WeightStream, bytes]:
    pointers = dict.fromkeys(streams, b"")
    for stream in streams:
        with suppress(ObjectMissing):
            pointers[stream] = stream.part(store).get(POINTER_KEY)
    return pointers


def _is_kept(key: str, checkpoints: Sequence[CheckpointId]) -> bool:
    # Only complete checkpoints; versions are listed again.
    if key.startswith("checkpoints/"):
        return key.startswith(tuple(f"{checkpoint.folder}/" for checkpoint in checkpoints))
    return not split_key(key)[1].startswith("weights/")


def _versions(
    store: ObjectStore, stream: WeightStream, believed: Version | None, names: Collection[str]
) -> Iterator[ListedObject]:
    """Yields the objects of versions up to the believed one."""
    number_max = believed.number if believed else 0
    listed = list(store.list(f"{stream.prefix}weights/v"))
    every_name = {*names, *manifest_names(store, listed)}
    for entry in listed:
        key = split_key(entry.key)[1]
        if declared_keys(entry.key, every_name) and _is_version(key, number_max):
            yield entry


def _is_version(key: str, number_max: int) -> bool:
    number = whole_number(key.removeprefix("weights/v").partition("-")[0])
    return number is not None and number <= number_max


def _check_complete(required: Iterable[str], objects: Iterable[ListedObject]) -> None:
    keys = {entry.key for entry in objects}
    for folder in required:
        # The run deleted the folder before it was listed.
        if f"{folder}manifest.json" not in keys:
            raise ObjectMissing(f"no object {folder}manifest.json")
