"""The rows of one archived file as the messages that they were in the log, byte for byte."""

from collections.abc import Iterator

import pyarrow as pa

from rollstream.storage.archive.file_names import ArchiveFile
from rollstream.storage.archive.originals import OriginalBytes
from rollstream.storage.archive.reading import batches_from, damaged_file
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Message

_NEEDED = (
    "offset", "timestamp", "key", "schema", "hash", "term", "sequence", "void", "reason",
    "original",
)  # fmt: skip


def messages_of(store: ObjectStore, topic: str, file: ArchiveFile) -> Iterator[Message]:
    """The file's messages in the order of their offsets. Raises `CorruptObject` at a row that
    differs from its hash, or if the file is not an archive file.
    """
    originals = OriginalBytes(topic)
    for batch in batches_of(store, file):
        yield from messages_in(batch, originals, file.partition)


def batches_of(store: ObjectStore, file: ArchiveFile) -> Iterator[pa.RecordBatch]:
    """The file's rows in the order of their offsets. Raises `CorruptObject` if it is not an archive
    file.
    """
    for batch in batches_from(store, file):
        lacking = [name for name in _NEEDED if name not in batch.schema.names]
        if lacking:
            raise damaged_file(file, f"it lacks {', '.join(lacking)}")
        yield batch


def messages_in(
    batch: pa.RecordBatch, originals: OriginalBytes, partition: int
) -> Iterator[Message]:
    """The messages of these rows. Raises `CorruptObject` at a row that differs from its hash."""
    offsets = batch.column("offset").to_numpy().tolist()
    stamps = batch.column("timestamp").cast("int64").to_numpy().tolist()
    keys = batch.column("key").to_numpy(zero_copy_only=False).tolist()
    values = originals.values(batch)
    for offset, stamp, key, value in zip(offsets, stamps, keys, values, strict=True):
        yield Message(originals.topic, partition, offset, stamp, key.encode(), value)
