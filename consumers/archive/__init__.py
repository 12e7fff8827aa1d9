"""The archive role: writes topics of the log as Parquet files to the object store.

`service` archives all topics in turn, `topic` archives one: exactly once, even if several archivers
run. `compaction` keeps the files few. The format of the files and their readers are in
`rollstream.storage.archive`.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.consumers.archive.service import ArchiveService as ArchiveService
    from rollstream.consumers.archive.topic import (
        PendingRecords as PendingRecords,
        TopicArchive as TopicArchive,
        WrittenFile as WrittenFile,
        due_partition as due_partition,
    )

__getattr__ = lazy_exports(__name__)
