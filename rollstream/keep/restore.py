"""Restores a run from its backup into an empty log, store and folder. Records keep offsets and
timestamps, so every stored position stays valid. Every object is verified before anything is
written.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rollstream import errors
from rollstream.keep.backup import (
    BACKUP_KEY,
    BEGUN_KEY,
    FOLDER,
    STORE,
    Backup,
    BackupObject,
    LogSegment,
    decode_segment,
    described,
    is_backup_key,
    parse_segment,
)
from rollstream.keep.cut import TopicCut
from rollstream.keep.private_objects import put_private
from rollstream.keep.removal import plan_objects
from rollstream.look.query.own_runs import is_named
from rollstream.look.query.permissions import folder_of_url
from rollstream.printable import shell_command, shell_words
from rollstream.run.config import config
from rollstream.run.config.run_folder import (
    RunFolder,
    bus_url,
    require_new,
    store_for_writing,
    store_url,
    write_configuration,
)
from rollstream.run.config.settings import Configuration
from rollstream.storage.identity import DELETED, IDENTITY_KEY, RunIdentity, mark_deleted
from rollstream.storage.stores.base import ObjectStore, is_key
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import decode_json, encode_json, unseal
from rollstream.storage.terms import RoleRecord
from rollstream.storage.weights.named_streams import STREAMS_MAX
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.connect import check_reachable, open_bus
from rollstream.streams.release import missing_features, upgrade_advice
from rollstream.streams.removal import log_contents, names_of_topics, topic_names
from rollstream.streams.sqlite.topic_log import OFFSET_END, PARTITIONS_MAX

RECORDS_MAX, BYTES_MAX = 512, 4 << 20  # of one append
FOLDER_ADVICE = "give a new folder"
FILLERS_MAX = 10_000  # of one append
FILLED_MAX = 1 << 28
"""Empty records of a restored topic: about a minute for each 100 million."""
CONFIGURATION = f"{FOLDER}config.json"


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The restore plan of a verified backup in `source`, to the restored run's folder
    and settings.
    """

    backup: Backup
    source: ObjectStore
    folder: RunFolder
    settings: Configuration
    left_out: tuple[str, ...] = ()
    """Keys of an earlier release's backup that no run writes."""
    unnamed: tuple[str, ...] = ()
    """Settings that name a place outside the folder, without the user's `--set`."""

    @property
    def objects(self) -> tuple[BackupObject, ...]:
        return tuple(
            backup_object
            for backup_object in self.backup.objects
            if backup_object.key not in self.left_out
        )

    @property
    def urls(self) -> tuple[str, str]:
        return bus_url(self.settings, self.folder.path), store_url(self.settings, self.folder.path)


def read_backup(target: ObjectStore, where: str) -> Backup:
    """The content of `backup.json`; errors call the store `where`. Raises `ConfigurationError`
    without a complete backup, `NewerRelease` if this release lacks a feature that the run needs.
    """
    try:
        backup = unseal(target.get(BACKUP_KEY), Backup, BACKUP_KEY)
    except errors.ObjectMissing:
        is_begun = next(iter(target.list(BEGUN_KEY)), None)
        raise errors.ConfigurationError(
            f"{where}: the backup is incomplete (no {BACKUP_KEY}); repeat `rollstream backup`"
            if is_begun
            else f"{where} holds no backup (no {BACKUP_KEY}); is it right?"
        ) from None
    if features := missing_features(backup.needs):
        raise errors.NewerRelease(
            f"{where}: run {backup.run} needs features that this release lacks: "
            f"{', '.join(features)}; {upgrade_advice(backup.release)}"
        )
    return backup


def plan_restore(
    source: ObjectStore,
    where: str,
    folder: Path,
    overrides: Sequence[str],
    scratch: Path,
    progress: Callable[[str], None] = lambda part: None,
) -> RestorePlan:
    """Verifies every object of the backup in `source`, which errors call `where`, and plans its
    restore into `folder` with its settings, changed by `overrides`. `progress` gets the key of each
    object. Only the backup's `config.json` is written, in `scratch`, and no module that it names is
    imported.

    Raises as `read_backup` does, `CorruptObject`, which names the object, if the backup is damaged,
    and `ConfigurationError` if an override changes an essential setting.
    """
    backup = read_backup(source, where)
    _check_names(backup, where)
    _check_numbers(backup, where)
    # Before the verification, which takes long for a large backup.
    require_new(folder.absolute(), FOLDER_ADVICE, "restore")
    path = scratch / "config.json"
    path.write_bytes(_configuration(source, backup))
    before = config.load(path)
    now = config.load(path, [f"folder={folder.absolute()}", *overrides])
    _check_settings(before, now)
    left_out = tuple(
        backup_object.key
        for backup_object in backup.objects
        if not is_backup_key(backup_object.key)
    )
    override_keys = {override.partition("=")[0].strip() for override in overrides}
    plan = RestorePlan(backup, source, RunFolder(folder.absolute()), now, left_out)
    unnamed = tuple(key for key in _outside(plan) if key not in override_keys)
    plan = replace(plan, unnamed=unnamed)
    check_named(plan, on_this_machine=False)
    check_free(plan)
    for stored in backup.objects:
        progress(stored.key)
        checked(source, stored)
    return plan


def _configuration(source: ObjectStore, backup: Backup) -> bytes:
    stored = next(
        (backup_object for backup_object in backup.objects if backup_object.key == CONFIGURATION),
        None,
    )
    return source.get(CONFIGURATION) if stored is None else checked(source, stored)


def _check_names(backup: Backup, where: str) -> None:
    topics = [cut.topic.name for cut in backup.topics]
    keys = [backup_object.key for backup_object in backup.objects]
    own = names_of_topics(topics)
    # A restore makes each topic, so their number has a bound.
    own = own[: STREAMS_MAX + sum(name in topic_names() for name in own)]
    # The backup may come from another user: `../` in a key would lead out of the target.
    for name in (*(key for key in keys if not is_key(key)), *({*topics} - {*own})):
        raise errors.CorruptObject(
            f"{where}: {BACKUP_KEY} names {name[:80]!r}, which no backup has: nothing is restored"
        )


def _check_numbers(backup: Backup, where: str) -> None:
    for cut in backup.topics:
        partitions, name = cut.topic.partitions, cut.topic.name
        # A restore makes a table for each partition, and writes empty records up to the begin.
        fits = 0 < partitions <= PARTITIONS_MAX and partitions == len(cut.begins) == len(cut.ends)
        if not fits or not all(map(_is_range, cut.begins, cut.ends)):
            raise errors.CorruptObject(
                f"{where}: {BACKUP_KEY} states for topic {name} {partitions} partitions from "
                f"{str(cut.begins)[:80]} to {str(cut.ends)[:80]}: nothing is restored"
            )
        segments = [segment for stored in backup.objects if (segment := parse_segment(stored.key))]
        if any(segment.topic == name and segment.partition >= partitions for segment in segments):
            raise errors.CorruptObject(
                f"{where}: {BACKUP_KEY} has records of a partition of topic {name} above its "
                f"{partitions}: nothing is restored"
            )
        if cut.topic.cleanup == "safe" and sum(cut.begins) > FILLED_MAX:
            raise errors.CorruptObject(
                f"{where}: {BACKUP_KEY} states that topic {name} begins at {sum(cut.begins):,}; "
                f"at most {FILLED_MAX:,} empty records are written before: nothing is restored"
            )


def _is_range(begin: int, end: int) -> bool:
    return 0 <= begin <= end < OFFSET_END


def _outside(plan: RestorePlan) -> list[str]:
    places = zip(config.URL_SETTINGS, plan.urls, strict=True)
    folders = {key: folder_of_url(url) for key, url in places}
    root = Path(os.path.normpath(plan.folder.path))
    return [
        key
        for key, path in folders.items()
        if path is None or not Path(os.path.normpath(path)).is_relative_to(root)
    ]


def check_named(plan: RestorePlan, on_this_machine: bool = True) -> None:
    """Raises `ConfigurationError` if the backup, and not the user, names a place outside the
    restored folder. Places of a run that the user began on this machine are named.
    """
    for key, url in zip(config.URL_SETTINGS, plan.urls, strict=True):
        # A backup of another user could name any folder, or a host that waits for secrets.
        is_here = folder_of_url(url) is not None
        if key in plan.unnamed and is_here == on_this_machine and not is_named(url):
            raise errors.ConfigurationError(
                f"the backup's setting {key} names {url}, outside {plan.folder.path}; if it is "
                f"right, name it yourself: {shell_words('--set', f'{key}={url}')}"
            )


def checked(source: ObjectStore, expected: BackupObject) -> bytes:
    """Raises `CorruptObject` if the object is missing, or has another size or hash."""
    try:
        data = source.get(expected.key)
    except errors.ObjectMissing:
        raise errors.CorruptObject(
            f"the backup is damaged: object {expected.key} is missing"
        ) from None
    if described(expected.key, data) != expected:
        raise errors.CorruptObject(
            f"the backup is damaged: object {expected.key} has {len(data)} bytes and another "
            f"sha256 than {expected.sha256[:12]}… of {expected.bytes} bytes; use another backup"
        )
    return data


def _check_settings(before: Configuration, now: Configuration) -> None:
    # A restored run is the same run: its log and store keep their names (invariant 15).
    changes = config.setting_changes(
        config.essential_settings(before), config.essential_settings(now)
    )
    if changes:
        lines = "\n".join(f"  {change}" for change in changes)
        urls = ", ".join(
            config.url_identity(config.setting_value(before, key)) for key in config.URL_SETTINGS
        )
        raise errors.ConfigurationError(
            f"a restored run keeps its settings:\n{lines}\nof {urls} only hosts, endpoints and "
            "options may change; for other names or settings fork the restored run"
        )


def check_free(plan: RestorePlan) -> None:
    """Raises `ConfigurationError` if folder, log or store is not empty."""
    bus, store = plan.urls
    folder = plan.folder.path
    advice = f"give an empty one, or remove that run: {shell_command('rm', store, '--bus', bus)}"
    require_new(folder, FOLDER_ADVICE, "restore")
    check_reachable(bus)
    if topics := log_contents(bus).topics:
        raise errors.ConfigurationError(
            f"the log {bus} has topics already ({', '.join(topics)}); {advice}"
        )
    scheme, _, path = store.partition(":")
    if scheme == "file" and not Path(path.removeprefix("//")).is_dir():
        return  # no store there yet; opening it would create the folder
    listed = open_store(store).list()
    if objects := plan_objects(listed, plan.backup.run, (), ()).delete:
        raise errors.ConfigurationError(
            f"the store {store} has {len(objects)} objects already ({objects[0].key}, …); {advice}"
        )


def restore(plan: RestorePlan, progress: Callable[[str], None] = lambda part: None) -> None:
    """Restore the backup; the run is complete when this function returns. `progress` gets the name
    of each topic and object. Raises as `check_free` and `check_named` do. After an interruption,
    remove the partial run with `rollstream rm` and repeat the restore.

    1. Check that the target is empty, and create `run.json` with the mark of a deleted run.
    2. Append the log, and commit the positions of its consumer groups.
    3. Write the store; leases are restored as released, so roles take higher terms at once.
    4. Write the folder, `config.json` last, and remove the mark.
    """
    check_free(plan)  # 1
    check_named(plan)
    plan.folder.path.mkdir(parents=True, exist_ok=True)
    store = store_for_writing(plan.settings, plan.folder.path)
    by_key = {backup_object.key: backup_object for backup_object in plan.objects}
    _claim(plan, store, by_key)
    with closing(open_bus(plan.urls[0], sync=plan.settings.sync)) as bus:
        for topic in plan.backup.topics:  # 2
            progress(topic.topic.name)
            _restore_topic(bus, plan.source, topic, by_key)
    for key, backup_object in by_key.items():  # 3
        name = key.removeprefix(STORE)
        if name != key and name != IDENTITY_KEY:
            progress(name)
            data = checked(plan.source, backup_object)
            written = _released(name, data) if name.startswith("roles/") else data
            put_private(store, name, written, name)
    for key, backup_object in by_key.items():  # 4
        name = key.removeprefix(FOLDER)
        if name != key and key != CONFIGURATION:
            path = plan.folder.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(checked(plan.source, backup_object))
    write_configuration(plan.folder, plan.settings)
    mark_deleted(store, plan.backup.run, deleted=False)


def _claim(plan: RestorePlan, store: ObjectStore, by_key: dict[str, BackupObject]) -> None:
    key = STORE + IDENTITY_KEY
    identity = RunIdentity(plan.backup.id, plan.backup.run)
    if key in by_key:
        identity = decode_json(checked(plan.source, by_key[key]), RunIdentity, key)
    # Without the mark a role that starts during the restore would append to the partial log; with
    # it, it ends.
    marked = replace(identity, needs=tuple(sorted({*identity.needs, DELETED})))
    try:
        store.create(IDENTITY_KEY, encode_json(marked))
    # Of two restores into one store the second one fails here.
    except errors.ObjectExists:
        raise errors.ConfigurationError(
            f"the store {plan.urls[1]} was just claimed by another run or restore"
        ) from None


def _released(name: str, data: bytes) -> bytes:
    if name.count("/") > 1:
        return data
    # The next holder of a lease (`roles/ROLE.json`) need not wait.
    return encode_json(replace(decode_json(data, RoleRecord, name), released=True))


def _restore_topic(
    bus: Bus, source: ObjectStore, cut: TopicCut, by_key: dict[str, BackupObject]
) -> None:
    # Topics from which compaction or time removes records are appended without their holes: no
    # stored position names an offset of them.
    name, keeps_offsets = cut.topic.name, cut.topic.cleanup == "safe"
    bus.create([cut.topic])
    segments = [parsed for key in by_key if (parsed := parse_segment(key)) and parsed.topic == name]
    segments.sort(key=lambda part: (part.partition, part.first))
    for partition, begin in enumerate(cut.begins):
        if keeps_offsets:
            _fill(bus, name, partition, begin)
        for segment in (part for part in segments if part.partition == partition):
            for batch in _batches(source, segment, by_key[segment.key], cut):
                offsets = bus.append(name, [_entry(message) for message in batch])
                if keeps_offsets and offsets != [message.offset for message in batch]:
                    raise errors.BusError(
                        f"{name}/{partition}: offset {batch[0].offset} of the backup became "
                        f"{offsets[0]}; does another program write to this log?"
                    )
    if keeps_offsets and any(cut.begins):
        bus.truncate(name, dict(enumerate(cut.begins)))
    groups = dict.fromkeys(commit.group for commit in cut.commits) if keeps_offsets else ()
    for group in groups:
        at = {commit.partition: commit.at for commit in cut.commits if commit.group == group}
        bus.commit(group, name, at)


def _fill(bus: Bus, topic: str, partition: int, begin: int) -> None:
    # No back end lets a partition begin above 0. No reader gets these: the caller truncates them,
    # and no role reads before the run is complete.
    filler = AppendEntry(b"", b"", partition)
    for at in range(0, begin, FILLERS_MAX):
        bus.append(topic, [filler] * min(FILLERS_MAX, begin - at))


def _entry(message: Message) -> AppendEntry:
    return AppendEntry(message.key, message.value, message.partition, message.timestamp_ms)


def _batches(
    source: ObjectStore, segment: LogSegment, stored: BackupObject, cut: TopicCut
) -> Iterator[list[Message]]:
    begin, end = cut.begins[segment.partition], cut.ends[segment.partition]
    batch, size = list[Message](), 0
    for message in decode_segment(segment, checked(source, stored)):
        if not begin <= message.offset < end:
            continue
        more = len(message.key) + len(message.value or b"")
        if batch and (len(batch) >= RECORDS_MAX or size + more > BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += more
    if batch:
        yield batch
