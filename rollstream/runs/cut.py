"""Fixes a consistent cut of a living run: a state that a crash of all its processes at one moment
could have left, so a run restored from it resumes as a crashed run does.

No process stops meanwhile; the order of reading makes the cut consistent (`fix_cut`). `backup.py`
copies the objects that the log names (large records, terms of roles) after the cut.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollstream.deadline import Deadline
from rollstream.errors import BusError, ObjectMissing, TopicMissing
from rollstream.runs.removal import plan_objects, version_folders
from rollstream.storage.checkpoints import CheckpointId, stored_checkpoints
from rollstream.storage.stores.base import ListedObject, ObjectStore
from rollstream.storage.stores.json_objects import decode_json
from rollstream.storage.weights.pointer import POINTER_KEY, Pointer
from rollstream.streams.bus import Bus
from rollstream.streams.records import Position
from rollstream.streams.removal import GROUPS, topic_names
from rollstream.streams.topics import Topic, catalogue

QUIET_S = 120.0  # one reading takes milliseconds; the topics compared get some records a second
SHARED_ORDER = ("dead", "annotations", "trajectories", "applied", "partials", "status")
NOT_READ = (
    "archive/", "weights/", "checkpoints/", "blobs/", "configurations/", "roles/", "probes/",
    "audit/",
)  # fmt: skip
"""Prefixes of objects whose content the cut does not keep: objects that never change, objects that
are read at another moment, and the audit's verdict (a restored run is audited from its begin).
"""


@dataclass(frozen=True, slots=True)
class CommittedPosition:
    """Holds a consumer group's position in one partition."""

    group: str
    partition: int
    at: Position


@dataclass(frozen=True, slots=True)
class TopicCut:
    """Holds a topic's settings and its part of the cut: first and end offset of each partition, and
    the positions that consumer groups had committed.
    """

    topic: Topic
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    commits: tuple[CommittedPosition, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Holds a consistent cut. `read` are the objects that the run replaces, with their content at
    the cut; `listed` are the others; `required` are the folders without which the run cannot
    resume. `step` is the newest version's, `checkpoint` the newest checkpoint's id, "" if none.
    """

    topics: tuple[TopicCut, ...]
    read: dict[str, bytes]
    listed: tuple[ListedObject, ...]
    required: tuple[str, ...]
    step: int
    checkpoint: str


def present_topics(bus: Bus) -> list[Topic]:
    """Returns the run's topics that exist in this log, with their settings."""
    writers = {topic.name: topic.writer for topic in catalogue()}
    found: list[Topic] = []
    for name in topic_names():
        with suppress(TopicMissing):
            found.append(dataclasses.replace(bus.settings(name), writer=writers.get(name, "")))
    return found


def fix_cut(bus: Bus, store: ObjectStore, run: str) -> Cut:
    """Fix a consistent cut of log and store. Raises `ObjectMissing` if the run deleted an object
    before it was read, `BusError` if the topics of single holders never stood still.

    1. Read the begins of topics, then the positions of consumer groups. In the other order the
       trainer could commit a position and truncate to it, and the copy would begin at a record
       whose fence is unknown: a zombie's record behind it would count (invariant 7).
    2. Read the objects that name positions in the log: checkpoints, files of the archive,
       dispatch's state. After 3, the archive could create a file with records behind the cut. The
       restored run writes other records at those offsets, and would never archive them.
    3. Read the ends of the topics and the pointer (`_fix_ends`).
    4. List the versions up to the pointer, after reading it: an earlier listing may lack the
       newest.
    """
    topics = present_topics(bus)
    begins = {topic.name: bus.begin(topic.name) for topic in topics}  # 1
    commits = {topic.name: tuple(_commits(bus, topic.name)) for topic in topics}
    whole = [stored.id for stored in stored_checkpoints(store) if stored.whole]  # 2
    listed = plan_objects(store.list(), run, (), ()).delete
    read: dict[str, bytes] = {}
    for entry in listed:
        if not entry.key.startswith(NOT_READ):
            with suppress(ObjectMissing):
                read[entry.key] = store.get(entry.key)
    ends, pointer = _fix_ends(bus, store, topics)  # 3
    if pointer:
        read[POINTER_KEY] = pointer
    version = decode_json(pointer, Pointer, POINTER_KEY).version if pointer else None
    number = version.number if version else 0
    versions = [one for one in store.list("weights/v") if _is_version(one.key, number)]  # 4
    kept = [*(one for one in listed if _is_kept(one.key, whole)), *versions]
    required = (*(f"{newest.folder}/" for newest in whole[-1:]), *version_folders(store, version))
    _check_complete(required, kept)
    cuts = tuple(
        TopicCut(
            topic,
            tuple(at for _, at in sorted(begins[topic.name].items())),
            tuple(at for _, at in sorted(ends[topic.name].items())),
            commits[topic.name],
        )
        for topic in topics
    )
    return Cut(cuts, read, tuple(kept), required, number, "".join(map(str, whole[-1:])))


def _commits(bus: Bus, topic: str) -> Iterator[CommittedPosition]:
    for group in GROUPS:
        for partition, at in sorted(bus.committed(group, topic).items()):
            yield CommittedPosition(group, partition, at)


def _fix_ends(
    bus: Bus, store: ObjectStore, topics: Sequence[Topic]
) -> tuple[dict[str, dict[int, int]], bytes]:
    """Returns the ends of all topics and the pointer's content (b"" if there is none), both of one
    moment. The pointer, which moves once a step, is compared separately: a request to a bucket
    takes longer than the pauses between dispatch's records.

    The ends of the topics of single holders are read, then those of the others, then the first
    again, until they are equal and the pointer has not moved. Otherwise the trainer may have
    published a version in between, and the cut has a trajectory of a version that its pointer and
    ledger do not know. Annotations come before trajectories: an annotation of a trajectory behind
    the cut would count for the trajectory that the restored run generates under that name.
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
    try:
        return store.get(POINTER_KEY)
    except ObjectMissing:
        return b""


def _is_kept(key: str, whole: Sequence[CheckpointId]) -> bool:
    """Returns whether an object that was listed before the cut belongs to the cut."""
    if key.startswith("checkpoints/"):
        return key.startswith(tuple(f"{one.folder}/" for one in whole))
    return key.startswith(("archive/", "configurations/"))


def _is_version(key: str, number_max: int) -> bool:
    digits = key.removeprefix("weights/v").partition("-")[0]
    return digits.isdecimal() and int(digits) <= number_max


def _check_complete(required: Iterable[str], kept: Iterable[ListedObject]) -> None:
    """Raise `ObjectMissing` if retention deleted a required folder before it was listed."""
    keys = {one.key for one in kept}
    for folder in required:
        if f"{folder}manifest.json" not in keys:
            raise ObjectMissing(f"no object {folder}manifest.json")
