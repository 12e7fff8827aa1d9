"""The rows of one archived file as the messages that they were in the log, byte for byte."""
# pyarrow ships no types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterator

from storage.archive.columns import originals_of
from storage.archive.names import ArchiveFile
from storage.archive.reading import damaged, table_from
from storage.objects import ObjectStore
from streams.bus import Message


def messages_of(store: ObjectStore, topic: str, file: ArchiveFile) -> Iterator[Message]:
    """In the order of their offsets; `CorruptObject` at a row that differs from its hash, or for a
    file that is none of the archive's.
    """
    table = table_from(store, file)
    try:
        offsets: list[int] = table.column("offset").to_pylist()
        stamps: list[int] = table.column("timestamp").cast("int64").to_pylist()
        keys: list[str] = table.column("key").to_pylist()
    except KeyError as error:
        raise damaged(file, f"it lacks {error}") from error
    values = originals_of(table, topic)
    for offset, stamp, key, value in zip(offsets, stamps, keys, values, strict=True):
        yield Message(topic, file.partition, offset, stamp, key.encode(), value)
