"""Fixes a consistent cut of a living run: a state of log and store that a crash of all the run's
processes at one moment could have left. A backup copies such a cut, so a run that is restored from
it resumes as a crashed run does.

`fix_cut` decides which offsets and objects belong to the cut. No process stops meanwhile: the order
in which log and store are read makes the cut consistent. Afterwards `backup.py` copies them, and
the objects that the log names (large records, terms of roles).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollstream.deadline import Deadline
from rollstream.errors import BusError, ObjectMissing, TopicMissing
from rollstream.runs.own import declared_keys, manifest_names, sort_objects
from rollstream.runs.removal import version_folders
from rollstream.storage.checkpoints import CheckpointId, stored_checkpoints
from rollstream.storage.stores.base import ListedObject, ObjectStore
from rollstream.storage.stores.json_objects import decode_json
from rollstream.storage.weights.pointer import POINTER_KEY, Pointer
from rollstream.streams.bus import Bus
from rollstream.streams.foreign_text import whole_number
from rollstream.streams.records import Position
from rollstream.streams.removal import GROUPS, topic_names
from rollstream.streams.topics import Topic, catalogue

QUIET_S = 120.0
"""Longest wait for a moment without a record of a single holder. A look takes milliseconds, and
these topics get some records a second.
"""
SHARED_ORDER = ("dead", "annotations", "trajectories", "applied", "partials", "status")
"""Order in which the ends of the topics with many writers are read (`_fix_ends`)."""


@dataclass(frozen=True, slots=True)
class CommittedPosition:
    """Holds a consumer group's position in one partition."""

    group: str
    partition: int
    at: Position


@dataclass(frozen=True, slots=True)
class TopicCut:
    """Holds a topic's settings and its part of the cut: first offset and end of each partition, and
    the positions that consumer groups had committed.
    """

    topic: Topic
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    commits: tuple[CommittedPosition, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Holds a consistent cut: a part of each topic, and objects of the store."""

    topics: tuple[TopicCut, ...]
    read: dict[str, bytes]
    """The objects that the run replaces, with their content at the cut."""
    listed: tuple[ListedObject, ...]
    """The objects that never change; their content is copied later."""
    required: tuple[str, ...]
    """The folders in the store without which the run cannot resume."""
    step: int
    """The step of the newest version; 0 if there is none."""
    checkpoint: str
    """The id of the newest checkpoint; "" if there is none."""


def present_topics(bus: Bus) -> list[Topic]:
    """Returns the run's topics that exist in this log, with their settings."""
    writers = {topic.name: topic.writer for topic in catalogue()}
    topics: list[Topic] = []
    for name in topic_names():
        with suppress(TopicMissing):
            topics.append(dataclasses.replace(bus.settings(name), writer=writers.get(name, "")))
    return topics


def fix_cut(bus: Bus, store: ObjectStore, run: str) -> Cut:
    """Fix a consistent cut of log and store. Raises `ObjectMissing` if the run deleted a required
    object meanwhile (another attempt may succeed), `BusError` if the roles with a single holder
    never stopped writing for a moment.

    1. Read the first offsets of the topics, then the positions of consumer groups. Why in this
       order: a truncation commits the position with its fence first. If the positions were read
       first, a truncation in between would make the copy begin at a record whose fence is unknown,
       and a zombie's record after it would count (invariant 7).
    2. List and read the objects that name positions in the log: checkpoints, files of the archive,
       dispatch's state. Why before 3: a file that the archive creates later may hold records after
       the cut's end. The restored run writes other records at these offsets, which the archive
       would then take for archived.
    3. Read the ends of the topics and the pointer (`_fix_ends`).
    4. List the versions up to the pointer. Why after 3: an earlier listing may lack the newest.
    """
    topics = present_topics(bus)
    begins = {topic.name: bus.begin(topic.name) for topic in topics}  # 1
    commits = {topic.name: tuple(_commits(bus, topic.name)) for topic in topics}
    checkpoints = [stored.id for stored in stored_checkpoints(store) if stored.whole]  # 2
    every = list(store.list())
    names = manifest_names(store, every)
    own_objects = sort_objects(every, run, names).own
    read: dict[str, bytes] = {}
    for entry, keys in own_objects:
        if keys.copied == "cut" and entry.key != POINTER_KEY:
            with suppress(ObjectMissing):
                read[entry.key] = store.get(entry.key)
    ends, pointer = _fix_ends(bus, store, topics)  # 3
    if pointer:
        read[POINTER_KEY] = pointer
    version = decode_json(pointer, Pointer, POINTER_KEY).version if pointer else None
    number = version.number if version else 0
    names |= manifest_names(store, weight_objects := list(store.list("weights/v")))  # 4
    versions = [
        candidate for candidate in weight_objects if declared_keys(candidate.key, names) and _is_version(candidate.key, number)
    ]
    listed = [entry for entry, keys in own_objects if keys.copied == "later"]
    cut_objects = [*(candidate for candidate in listed if _is_kept(candidate.key, checkpoints)), *versions]
    required = (*(f"{newest.folder}/" for newest in checkpoints[-1:]), *version_folders(store, version))
    _check_complete(required, cut_objects)
    cuts = tuple(
        TopicCut(
            topic,
            tuple(at for _, at in sorted(begins[topic.name].items())),
            tuple(at for _, at in sorted(ends[topic.name].items())),
            commits[topic.name],
        )
        for topic in topics
    )
    return Cut(cuts, read, tuple(cut_objects), required, number, "".join(map(str, checkpoints[-1:])))


def _commits(bus: Bus, topic: str) -> Iterator[CommittedPosition]:
    for group in GROUPS:
        for partition, at in sorted(bus.committed(group, topic).items()):
            yield CommittedPosition(group, partition, at)


def _fix_ends(
    bus: Bus, store: ObjectStore, topics: Sequence[Topic]
) -> tuple[dict[str, dict[int, int]], bytes]:
    """Returns the ends of all topics and the pointer's content (b"" if there is none), all of one
    moment.

    The ends of the topics with a single writer are read, then those of the others, then the first
    again; this is repeated until they are equal and the pointer has not moved. So no version is
    published in between; otherwise the cut could have a trajectory of a version that its pointer
    and ledger do not know. The pointer is not read in each round, because a request to a bucket
    takes longer than the pauses between dispatch's records.

    Of the other topics, annotations are read before trajectories: if the cut had an
    annotation without its trajectory, the annotation would count for the trajectory that the
    restored run generates under that name.
    """
    single = [topic.name for topic in topics if topic.writer]
    shared = [topic.name for topic in topics if not topic.writer]
    shared.sort(key=lambda name: SHARED_ORDER.index(name) if name in SHARED_ORDER else 0)
    deadline = Deadline(QUIET_S)
    pointer = _pointer(store)
    while not deadline.passed():
        before = {name: bus.end(name) for name in single}
        ends = {name: bus.end(name) for name in shared}
        if before == {name: bus.end(name) for name in single}:
            now = _pointer(store)
            if now == pointer:
                return ends | before, pointer
            pointer = now
    raise BusError(
        f"no cut in {QUIET_S:.0f} s: trainer or dispatch wrote during each look at the ends; "
        "repeat the backup on a machine nearer to the log, or while the run is idle"
    )


def _pointer(store: ObjectStore) -> bytes:
    """Returns the content of the pointer to the believed version; b"" if there is none."""
    try:
        return store.get(POINTER_KEY)
    except ObjectMissing:
        return b""


def _is_kept(key: str, checkpoints: Sequence[CheckpointId]) -> bool:
    """Returns whether a listed object that never changes belongs to the cut. Of checkpoints those
    that are whole (`whole`) do; versions are listed again.
    """
    if key.startswith("checkpoints/"):
        return key.startswith(tuple(f"{checkpoint.folder}/" for checkpoint in checkpoints))
    return not key.startswith("weights/")


def _is_version(key: str, number_max: int) -> bool:
    """Returns whether the object belongs to a version of at most this number."""
    number = whole_number(key.removeprefix("weights/v").partition("-")[0])
    return number is not None and number <= number_max


def _check_complete(required: Iterable[str], objects: Iterable[ListedObject]) -> None:
    """Raise `ObjectMissing` if the run deleted a required folder before it was listed: it lacks the
    manifest.
    """
    keys = {entry.key for entry in objects}
    for folder in required:
        if f"{folder}manifest.json" not in keys:
            raise ObjectMissing(f"no object {folder}manifest.json")
