"""Backs up a run, living or not: a consistent cut (`cut.py`) of log and store, and the files that a
resumed run reads. `backup.json` lists every object with its hash and is written last.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec

from rollstream import errors
from rollstream.contained_folder import ContainedFolder
from rollstream.keep.backup_keys import (
    BACKUP_KEY,
    BEGUN_KEY,
    FOLDER,
    LOG,
    STORE,
    LogSegment,
    is_backup_key,
    parse_segment,
)
from rollstream.keep.cut import Cut, TopicCut, fix_cut
from rollstream.keep.own import declared_keys, manifest_names
from rollstream.keep.private_objects import put_private
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_files import COPIED, COPIED_FOLDERS, declared_files
from rollstream.storage.claim_check import is_claim, parse_blob_key
from rollstream.storage.identity import DELETED, RunIdentity, read_identity
from rollstream.storage.stores.base import ListedObject, ObjectStore, check_key
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import FORMAT, encode_json, seal
from rollstream.storage.stores.read_only import open_store_for_reading
from rollstream.storage.terms import is_generation
from rollstream.storage.weights.named_streams import run_streams, split_key
from rollstream.streams.bus import Bus, Message
from rollstream.streams.codec import decode
from rollstream.streams.reader import read_range
from rollstream.streams.records import Claim
from rollstream.streams.release import RELEASE
from rollstream.streams.values import Address

SEGMENT_BYTES = 32 << 20
CUTS_MAX = 200  # attempts; each copies less than the one before, even if every step truncates
TRUNCATED_FIRST = ("partials", "assignments", "prompts")
"""Dispatch truncates them every few seconds."""
_ROWS = msgspec.msgpack.Decoder(list[tuple[int, int, bytes, bytes | None]])


@dataclass(frozen=True, slots=True)
class BackupObject:
    key: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Backup:
    """The content of `backup.json`. `id` and `needs` are the run's (`storage/identity.py`),
    `release` is the program's, `time_s` the end of the copy.
    """

    run: str
    id: str
    release: str
    needs: tuple[str, ...]
    time_s: float
    step: int
    checkpoint: str
    """A restored run resumes from it; "" without one."""
    topics: tuple[TopicCut, ...]
    objects: tuple[BackupObject, ...]
    format: int = FORMAT


def encode_segment(messages: Sequence[Message]) -> bytes:
    """Returns MessagePack: a list of (offset, timestamp in ms, key, value or nil)."""
    return msgspec.msgpack.encode([(m.offset, m.timestamp_ms, m.key, m.value) for m in messages])


def decode_segment(segment: LogSegment, data: bytes) -> list[Message]:
    return [
        Message(segment.topic, segment.partition, offset, timestamp_ms, key, value)
        for offset, timestamp_ms, key, value in _ROWS.decode(data)
    ]


def missing_ranges(begin: int, end: int, present: Iterable[LogSegment]) -> list[tuple[int, int]]:
    """Returns offsets of `[begin, end)` that no segment holds."""
    ranges: list[tuple[int, int]] = []
    at = begin
    for segment in sorted(present, key=lambda part: part.first):
        if segment.end <= at:
            continue
        if segment.first >= end:
            break
        if segment.first > at:
            ranges.append((at, segment.first))
        at = segment.end
    if at < end:
        ranges.append((at, end))
    return ranges


@dataclass(slots=True)
class BackupCopy:
    """Copies a run without the segments and objects that `target` has already: `present` maps its
    keys to sizes in bytes. `progress` gets the name of each part before its copy.
    """

    bus: Bus
    store: ObjectStore
    target: ObjectStore
    progress: Callable[[str], None]
    present: dict[str, int]
    _made: dict[str, BackupObject] = field(default_factory=dict[str, BackupObject])
    _claims: dict[str, list[tuple[Address, str]]] = field(
        default_factory=dict[str, list[tuple[Address, str]]]
    )

    def copy(self, cut: Cut) -> dict[str, BackupObject]:
        """Copies log and store; returns the objects by key. Raises `PositionLost` or
        `ObjectMissing` if the run removed a part before it was copied.
        """
        # Steps 2 and 3 of `back_up`.
        objects: dict[str, BackupObject] = {}
        for topic in sorted(cut.topics, key=lambda part: part.topic.name not in TRUNCATED_FIRST):
            self.progress(f"{LOG}{topic.topic.name}")
            objects |= self._topic(topic)  # 2
        for key, data in cut.read.items():
            objects[STORE + key] = self._write(STORE + key, data)
        for unit, entries in _units(cut):  # 3
            self.progress(f"{STORE}{unit}")
            try:
                copied = [self._object(entry) for entry in entries]
            except errors.ObjectMissing:
                if unit.endswith("/") and unit not in cut.required:
                    continue  # retention deletes the oldest; the run resumes without it
                raise
            objects |= {part.key: part for part in copied}
        # Terms last: a term that was read before the cut may be below an `Opened` of the log, and a
        # role would draw that term a second time.
        roles = [entry for entry in self.store.list("roles/") if declared_keys(entry.key)]
        for role in sorted(roles, key=lambda entry: is_generation(entry.key)):
            with suppress(errors.ObjectMissing):  # a name that was retired meanwhile
                objects[STORE + role.key] = self._write(STORE + role.key, self.store.get(role.key))
        return objects

    def files(self, folder: ContainedFolder) -> dict[str, BackupObject]:
        """Returns those that a resumed run reads, by key. Raises `OutsideRun` if one is behind a
        link that leaves the folder.
        """
        prefixes = ("model/", *(f"{s.prefix}weights/v" for s in run_streams(self.store)))
        listed = [entry for prefix in prefixes for entry in self.store.list(prefix)]
        names = manifest_names(self.store, listed)
        objects: dict[str, BackupObject] = {}
        paths = [name for name in COPIED if folder.has_file(name)]
        for part in COPIED_FOLDERS:
            paths += [path for path, _ in folder.walk(part, skip=lambda name: False)]
        for path in paths:
            declared = declared_files(path, names)
            if declared is not None and declared.copied:
                key = check_key(f"{FOLDER}{path}")
                objects[key] = self._write(key, _content(folder, path))
        return objects

    def check_history(self, cut: Cut) -> None:
        """Raises `ConfigurationError` if the last copied record of a partition is not the run's."""
        for topic in cut.topics:
            for partition, begin in enumerate(topic.begins):
                segments = self._segments(topic, partition)
                last = max(segments, key=lambda segment: segment.end, default=None)
                if last is None or last.end <= begin:
                    continue
                # A run that was restored after this backup had begun wrote other records at its
                # offsets.
                message = decode_segment(last, self.target.get(last.key))[-1]
                where = {partition: message.offset}
                ahead = message.offset >= topic.ends[partition]
                now = [] if ahead else self.bus.read(topic.topic.name, where, records_max=1)
                if now[:1] != [message]:
                    raise errors.ConfigurationError(
                        f"{last.key} of the destination holds other records than "
                        f"{topic.topic.name}/{partition} of the run: it was begun before the run "
                        "was restored; give a new destination"
                    )

    def _segments(self, cut: TopicCut, partition: int) -> list[LogSegment]:
        # Compaction also removes records that a segment holds.
        if cut.topic.cleanup == "compact":
            return []
        segments = (parse_segment(key) for key in self.present)
        return [s for s in segments if s and (s.topic, s.partition) == (cut.topic.name, partition)]

    def _topic(self, cut: TopicCut) -> dict[str, BackupObject]:
        name, objects = cut.topic.name, dict[str, BackupObject]()
        for partition, (begin, end) in enumerate(zip(cut.begins, cut.ends, strict=True)):
            segments = [
                s for s in self._segments(cut, partition) if s.end > begin and s.first < end
            ]
            for start, stop in missing_ranges(begin, end, segments):
                segments += self._range(name, partition, start, stop)
            for segment in segments:
                objects[segment.key] = self._segment(segment)
                self._blobs(segment, begin, end, objects)
        return objects

    def _range(self, topic: str, partition: int, start: int, end: int) -> Iterator[LogSegment]:
        first, size, batch = start, 0, list[Message]()
        for messages in read_range(self.bus, topic, partition, start, end):
            batch += messages
            size += sum(len(m.key) + len(m.value or b"") for m in messages)
            if size >= SEGMENT_BYTES and batch[-1].offset + 1 < end:
                yield self._add(LogSegment(topic, partition, first, batch[-1].offset + 1), batch)
                first, size, batch = batch[-1].offset + 1, 0, []
        yield self._add(LogSegment(topic, partition, first, end), batch)

    def _add(self, segment: LogSegment, messages: Sequence[Message]) -> LogSegment:
        self._made[segment.key] = self._write(segment.key, encode_segment(messages))
        self._claims[segment.key] = list(_claims(messages))
        return segment

    def _segment(self, segment: LogSegment) -> BackupObject:
        if segment.key not in self._made:
            # An earlier process copied it.
            data = self.target.get(segment.key)
            self._made[segment.key] = described(segment.key, data)
            self._claims[segment.key] = list(_claims(decode_segment(segment, data)))
        return self._made[segment.key]

    def _blobs(
        self, segment: LogSegment, begin: int, end: int, objects: dict[str, BackupObject]
    ) -> None:
        for at, key in self._claims[segment.key]:
            if not begin <= at.offset < end:
                continue
            try:
                copied = self._object(ListedObject(key, -1))
            except errors.ObjectMissing:
                # While the log keeps the claim of a missing record, readers dead-letter it.
                if self.bus.begin(segment.topic)[at.partition] > at.offset:
                    raise
                continue
            objects[copied.key] = copied

    def _object(self, entry: ListedObject) -> BackupObject:
        key = STORE + entry.key
        if key not in self._made:
            size = self.present.get(key)
            # Objects never change; -1 is an unknown size.
            if size is not None and entry.bytes in (size, -1):
                self._made[key] = described(key, self.target.get(key))
            else:
                self._made[key] = self._write(key, self.store.get(entry.key))
        return self._made[key]

    def _write(self, key: str, data: bytes) -> BackupObject:
        put_private(self.target, key, data, key.removeprefix(STORE))
        self.present[key] = len(data)
        return described(key, data)


def _content(folder: ContainedFolder, path: str) -> bytes:
    with folder.open(path) as file:
        return file.read()


def described(key: str, data: bytes) -> BackupObject:
    return BackupObject(key, len(data), sha256(data).hexdigest())


def _claims(messages: Iterable[Message]) -> Iterator[tuple[Address, str]]:
    """The key of each large record, with the address of its claim."""
    for message in messages:
        if not is_claim(message):
            continue
        with suppress(errors.DecodeError):
            record = decode(message.value or b"").record
            if isinstance(record, Claim) and parse_blob_key(record.blob):
                yield Address(message.partition, message.offset), record.blob


def _units(cut: Cut) -> list[tuple[str, list[ListedObject]]]:
    units: dict[str, list[ListedObject]] = {folder: [] for folder in cut.required}
    for entry in cut.listed:
        stream, key = split_key(entry.key)
        root, name, *rest = key.split("/")
        # A version or checkpoint is copied completely or left out.
        is_folder = root in ("weights", "checkpoints") and bool(rest)
        unit = f"{stream.prefix}{root}/{name}/" if is_folder else entry.key
        units.setdefault(unit, []).append(entry)
    return list(units.items())


def back_up(
    bus: Bus,
    store: ObjectStore,
    target: ObjectStore,
    folder: Path,
    progress: Callable[[str], None] = lambda part: None,
    clock: Callable[[], float] = time.time,
    files: ContainedFolder | None = None,
) -> Backup:
    """Back up the run whose `config.json` is in `folder` into `target`, or complete its interrupted
    backup there. `files` is that folder with the folders into which its links may lead.

    1. Copy the files of `folder` that a resumed run reads, and fix a cut (`cut.py`).
    2. Copy the log up to the cut, with offsets and timestamps, and the large records that it names.
    3. Copy the objects that the cut names (checkpoints, archive, versions), then the terms of
       roles.
    4. Write `backup.json`.

    Raises `ConfigurationError` if `target` holds anything else than an interrupted backup of this
    run, `StoreError` if `CUTS_MAX` attempts were too slow for the run.
    """
    files = files or ContainedFolder(folder)
    run = load_for_viewing(files.file("config.json")).run
    identity = read_identity(store) or RunIdentity("", run)
    if DELETED in identity.needs:
        raise errors.ConfigurationError(
            f"the run {run} was deleted, or is being deleted; nothing to back up"
        )
    present = {entry.key: entry.bytes for entry in target.list()}
    _claim(target, identity, present)
    copying = BackupCopy(bus, store, target, progress, present)
    lost: errors.PositionLost | errors.ObjectMissing | None = None
    # If the run truncates or deletes a part before the copy reaches it, 1 to 3 are repeated, and
    # only missing parts are copied.
    for attempt in range(CUTS_MAX):
        try:
            objects = copying.files(files)
            cut = fix_cut(bus, store, run)  # 1
            if not attempt:
                copying.check_history(cut)
            objects |= copying.copy(cut)
            break
        except (errors.PositionLost, errors.ObjectMissing) as error:
            lost = error
            progress(f"again: {error}")
    else:
        raise errors.StoreError(
            f"the run truncated or deleted during each of {CUTS_MAX} attempts what was being "
            f"copied ({lost}); repeat the command, which copies the rest, or use a faster target"
        ) from lost
    for key in set(copying.present) - set(objects) - {BEGUN_KEY}:
        if is_backup_key(key):
            target.delete(key)  # copied by an earlier attempt, and not part of this cut
    backup = Backup(
        run, identity.id, RELEASE, identity.needs, clock(), cut.step, cut.checkpoint,
        cut.topics, tuple(objects[key] for key in sorted(objects)),
    )  # fmt: skip
    target.put(BACKUP_KEY, seal(backup))  # 4
    return backup


def _claim(target: ObjectStore, identity: RunIdentity, present: dict[str, int]) -> None:
    mark = encode_json({"run": identity.run, "id": identity.id})
    if BACKUP_KEY in present:
        raise errors.ConfigurationError("the destination holds a complete backup; give a new one")
    if present and BEGUN_KEY not in present:
        raise errors.ConfigurationError("the destination is not empty; give a new one")
    with suppress(errors.ObjectExists):
        target.create(BEGUN_KEY, mark)
    if target.get(BEGUN_KEY) != mark:
        raise errors.ConfigurationError("the destination holds a part of another run's backup")
    present[BEGUN_KEY] = len(mark)


def open_backup(url_or_folder: str, must_exist: bool = False) -> ObjectStore:
    """Opens the backup by URL or folder. One that `must_exist` is opened for reading; raises
    `ConfigurationError` if it is a missing folder.
    """
    is_url = ":" in url_or_folder and not os.path.exists(url_or_folder)
    url = url_or_folder if is_url else f"file:{Path(url_or_folder).absolute()}"
    path = Path(url.removeprefix("file:").removeprefix("//"))
    if not must_exist:
        return open_store(url)
    if not url.startswith("file:"):
        return open_store_for_reading(url, None)
    if not path.is_dir():
        raise errors.ConfigurationError(f"{url_or_folder}: no such backup; is the path right?")
    return open_store_for_reading(url, ContainedFolder(path))
