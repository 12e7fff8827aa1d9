"""Merges consecutive archive files of a partition and deletes the merged ones after a grace period
for their readers. Several compactors and archivers may run at once, and each may be killed: no
record is lost, and readers read none twice if they leave out files whose first offset is in the
range of a merged file (docs/reference/archive.md).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set

from rollstream.consumers.settings import ArchiveSettings
from rollstream.errors import CorruptObject, NewerRelease, ObjectExists, ObjectMissing
from rollstream.storage.archive.file_names import (
    ArchiveFile,
    archive_prefix,
    current_files,
    parse_archive_key,
)
from rollstream.storage.archive.reading import file_end
from rollstream.storage.stores.base import ObjectStore

log = logging.getLogger(__name__)

PAUSE_S_MAX = 60.0  # seconds between two listings
FILES_MAX = 16  # files of a partition's newest day; when it has more, some are merged


class Compactor:
    """Merges files; to be used from one thread. `merged` and `deleted` count files."""

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        settings: ArchiveSettings,
        monotonic: Callable[[], float] = time.monotonic,
        files_max: int = FILES_MAX,
    ) -> None:
        self._store, self._run, self._settings = store, run, settings
        self._files_max = files_max
        self._monotonic = monotonic
        self._next_s = monotonic()
        self._redundant_s: dict[str, float] = {}  # redundant file's key → when it was first listed
        self._proven: set[str] = set()  # merged files whose footer has the last offset of the name
        self._left: set[str] = set()  # keys of merges that failed and are not tried again
        self.merged = self.deleted = 0

    def advance(self, stop: threading.Event) -> None:
        """Merges and deletes the files that are due; ends early when `stop` is set. Does nothing if
        `archive.compact_bytes` is 0, or soon after the previous call. For each topic:

        1. List the files.
        2. Delete files whose records a wider file holds too, if this process first listed them so
           at least `archive.compact_grace_s` ago and the wider file's footer confirms that it is
           complete.
        3. Plan merges of the other files, and create the merged files.
        """
        settings, now_s = self._settings, self._monotonic()
        if not settings.compact_bytes or now_s < self._next_s:
            return
        self._next_s = now_s + min(PAUSE_S_MAX, settings.roll_s)
        before, self._redundant_s = self._redundant_s, {}
        for topic in settings.topics:
            entries = self._store.list(archive_prefix(topic, self._run))  # 1
            listed = [parse_archive_key(entry.key, entry.bytes) for entry in entries]
            current = current_files(listed)
            self._delete({file for file in listed if file} - {*current}, current, before)  # 2
            self._merge(current, stop)  # 3

    def _delete(
        self,
        redundant: Set[ArchiveFile],
        current: Sequence[ArchiveFile],
        before: Mapping[str, float],
    ) -> None:
        now_s, due = self._monotonic(), list[str]()
        for file in sorted(redundant, key=lambda file: file.key):
            since_s = before.get(file.key, now_s)
            # Only because of a wider file in the same listing, so the widest one is never deleted.
            if now_s - since_s >= self._settings.compact_grace_s and self._is_held(file, current):
                due.append(file.key)
            else:
                self._redundant_s[file.key] = since_s
        self._store.delete_all(due)
        self.deleted += len(due)

    def _is_held(self, file: ArchiveFile, current: Sequence[ArchiveFile]) -> bool:
        (wider,) = [
            other
            for other in current
            if other.partition == file.partition and other.first <= file.first <= (other.last or -1)
        ]
        # Its footer confirms that it holds all offsets of its name.
        if wider.key not in self._proven and self._ends_as_named(wider):
            self._proven.add(wider.key)
        return wider.key in self._proven

    def _ends_as_named(self, merged: ArchiveFile) -> bool:
        try:
            return file_end(self._store, merged).last == merged.last
        except ObjectMissing:  # since the listing it was merged into a still wider one and deleted
            return False
        except CorruptObject as error:
            log.error("the files that a merged file holds are kept: %s", error)
            return False

    def _merge(self, current: Sequence[ArchiveFile], stop: threading.Event) -> None:
        from rollstream.storage.archive import merging

        for merge in merging.plan_merges(current, self._settings.compact_bytes, self._files_max):
            if stop.is_set():
                return
            if merge.key in self._left:
                continue
            try:
                file = merging.merged_file(self._store, merge)
                self._store.create(merge.key, file.data)
            except (ObjectExists, ObjectMissing):
                continue  # another compactor merged them
            except (CorruptObject, NewerRelease, merging.NotMergeable) as error:
                # Damaged files are not tried again.
                self._left.add(merge.key)
                log.warning("archive files are not merged into %s: %s", merge.key, error)
                continue
            self.merged += 1
            log.info("%s: %d files merged", merge.key, len(merge.files))
