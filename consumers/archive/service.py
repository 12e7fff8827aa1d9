"""The loop of the archive role: writes due files, then merges small ones. It reads seldom, in large
batches. It ends with the present ends of the topics: a run whose archive role stops last is
archived completely.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from rollstream.consumers.archive.compaction import Compactor
from rollstream.consumers.archive.topic import TopicArchive, WrittenFile
from rollstream.consumers.settings import ArchiveSettings
from rollstream.metric_values import MetricValues
from rollstream.storage.archive.reading import release_memory
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus

log = logging.getLogger(__name__)


ROUND_S = 2.0  # pause between two rounds; a quarter of `archive.roll_s` if that is less

FileNote = Callable[[Mapping[str, object]], None]
"""Time, key, records, bytes and seconds of a created file."""


class ArchiveService:
    """`note` is called for each file that this process created."""

    def __init__(
        self,
        bus: Bus,
        store: ObjectStore,
        run: str,
        settings: ArchiveSettings,
        monotonic: Callable[[], float] = time.monotonic,
        note: FileNote = lambda line: None,
    ) -> None:
        self._pause_s = min(ROUND_S, settings.roll_s / 4)
        self._note = note
        self._topics: dict[str, TopicArchive] = {
            topic: TopicArchive(bus, store, run, topic, settings, monotonic, self._on_file)
            for topic in settings.topics
        }
        self._compactor = Compactor(store, run, settings, monotonic)
        self._records: dict[str, int] = dict.fromkeys(settings.topics, 0)
        self._files = self._bytes = self._lost = 0

    def run(self, stop: threading.Event) -> None:
        """Runs in rounds until `stop` is set, then up to the topics' ends."""
        topics = self._topics.values()
        for topic in topics:
            topic.start()
        while not stop.wait(self._pause_s):
            while sum(topic.advance() for topic in topics) and not stop.is_set():
                pass  # one read of each topic in turn, until none of them has new records
            self._compactor.advance(stop)
            release_memory()
        for topic in topics:
            topic.finish()

    def metric_values(self) -> MetricValues:
        return {
            "archive_files_total": self._files,
            "archive_bytes_total": self._bytes,
            "archive_records_total": dict(self._records),
            "archive_lost_total": self._lost,
            "archive_merged_total": self._compactor.merged,
            "archive_deleted_total": self._compactor.deleted,
            "archive_behind_records": {
                name: topic.behind() for name, topic in self._topics.items()
            },
            "archive_pending_records": {
                name: topic.pending() for name, topic in self._topics.items()
            },
        }

    def _on_file(self, file: WrittenFile) -> None:
        if not file.is_own:
            # Another archiver had created it, with the same first record.
            self._lost += 1
            return
        self._files += 1
        self._bytes += file.bytes
        self._records[file.topic] += file.records
        log.info("%s: %d records, %d bytes", file.key, file.records, file.bytes)
        line = {"records": file.records, "bytes": file.bytes, "seconds": round(file.seconds, 3)}
        self._note({"time_s": time.time(), "key": file.key, **line})
