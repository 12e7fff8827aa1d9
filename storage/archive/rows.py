"""Classifies messages of the log as rows of the archive (`classify_rows`). Each message becomes one
row, valid or not, from which its bytes can be restored exactly; `tables.py` writes the rows.

A row is a record, a void record (dropped by the fence, invariant 7), a tombstone (a message without
a value), or bytes that are not a record of the topic, with the reason. A record's bytes follow from
its JSON `header` and the arrays in the columns. If they do not, for instance because a newer
program added fields, or if the message is not a record, `original` holds all of its bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import fields, replace

from rollstream.streams import codec
from rollstream.streams.bus import Message
from rollstream.streams.reader import REASON_MAX, classify_message
from rollstream.streams.records import TOPIC_RECORDS, Fence, Record
from rollstream.streams.topics import ARCHIVED_TOPICS, catalogue

ARCHIVED_CLASSES: dict[str, tuple[type[Record], ...]] = {
    topic: TOPIC_RECORDS[topic] for topic in ARCHIVED_TOPICS
}
"""Maps each archived topic to the record classes that belong in it."""

TOPIC_WRITERS = {topic.name: topic.writer for topic in catalogue()}
"""Maps each topic to the single-holder role that writes it, "" for topics of many writers."""

INT64 = 1 << 63  # the archive's integer columns have 64 bits


def _float_default(cls: type[Record]) -> tuple[str, float] | None:
    """Returns the one field of a record class whose default is a float, and that default; None if
    there is no such field.

    A record's bytes may state a float that equals the default or omit it, because msgspec omits a
    float only if it is the same object as the default. A column cannot distinguish the two
    (`with_default`). More than one such field per class is a programmer error.
    """
    found = [(f.name, f.default) for f in fields(cls) if type(f.default) is float]
    assert len(found) <= 1, f"{cls.__name__}: more than two ways to write one record"
    return found[0] if found else None


FLOAT_DEFAULTS = {
    cls: _float_default(cls) for classes in ARCHIVED_CLASSES.values() for cls in classes
}
"""The result of `_float_default` for each archived record class."""


class ArchiveRow(msgspec.Struct, frozen=True, gc=False):
    """Holds one classified message. If `record` is None, the message is not a record of this topic,
    and `reason` states why. `void` records are held like others.

    `schema` names the record's type, `hash` is `record_hash` of the bytes. `term` and `sequence`
    are those of a single-holder role's writer, None if there is none or if they exceed 64 bits.
    Either `original` or `header` is set; of a tombstone neither.
    """

    message: Message
    record: Record | None
    schema: str | None
    hash: str | None
    term: int | None
    sequence: int | None
    void: bool
    reason: str | None
    original: bytes | None
    header: bytes | None


@dataclass(frozen=True, slots=True)
class ClassifiedRows:
    """Holds rows in the order of the messages, and the fence of each partition after them, from
    which the next batch continues.
    """

    rows: Sequence[ArchiveRow]
    fences: Mapping[int, Fence]


def classify_rows(
    topic: str,
    messages: Sequence[Message],
    fences: Mapping[int, Fence] | None = None,
    is_exact: bool = True,
) -> ClassifiedRows:
    """Decode and classify consecutive messages of a topic. `fences` are the fences of partitions
    before them. A partition without one starts with the empty fence, as at its first message.

    With `is_exact` False no row states whether its columns restore the record's bytes, for readers
    of other columns: to find that out is a third of the work.

    Raises `SequenceGap` if the log lost a record of a single-holder role.
    """
    after = dict(fences or {})
    rows = [_row(topic, message, after, is_exact) for message in messages]
    return ClassifiedRows(rows, after)


def as_original(row: ArchiveRow, why: str) -> ArchiveRow:
    """Returns `row` for a record that the columns cannot hold: without the record, with all bytes
    in `original` and `why` as the reason.
    """
    assert row.message.value is not None
    return replace(
        row, record=None, reason=why[:REASON_MAX], original=row.message.value, header=None
    )


def bytes_of(record: Record, topic: str, term: int | None, sequence: int | None) -> bytes:
    """Returns the record's bytes as the topic's writer encodes them, with an envelope if `term` and
    `sequence` are given. Raises ValueError if JSON cannot hold one of its numbers.
    """
    if term is None or sequence is None:
        return codec.encode(record)
    return codec.encode(record, codec.Envelope(TOPIC_WRITERS[topic], term, sequence))


def with_default(record: Record, stated: bool) -> Record:
    """Returns an equal record whose encoding states (`stated`) or omits the float that equals its
    default; other records are returned unchanged.
    """
    found = FLOAT_DEFAULTS[type(record)]
    if found is None or getattr(record, found[0]) != found[1]:
        return record
    name, default = found
    return replace(record, **{name: float.fromhex(default.hex()) if stated else default})


def _row(topic: str, message: Message, fences: dict[int, Fence], is_exact: bool) -> ArchiveRow:
    """Returns the row of one message, and updates the fence of its partition in `fences`."""
    value = message.value
    if value is None:
        return ArchiveRow(message, None, None, None, None, None, False, "tombstone", None, None)
    fence = fences.get(message.partition, Fence())
    fences[message.partition], classified = classify_message(
        value, fence, topic=topic, fenced=bool(TOPIC_WRITERS[topic]), compacted=False
    )
    decoded, record, reason = classified.decoded, classified.record, classified.reason or None
    schema = None if decoded is None else decoded.record.schema()
    term, sequence = _numbers(classified.envelope)
    if record is not None and type(record) not in ARCHIVED_CLASSES[topic]:
        record, reason = None, f"schema {schema} does not belong in {topic}"
    kept = (
        record is None
        or decoded is None
        or (is_exact and not _columns_suffice(topic, decoded, value))
    )
    return ArchiveRow(
        message, record, schema, codec.record_hash(value), term, sequence, classified.void, reason,
        value if kept else None, None if kept else codec.header_bytes(value),
    )  # fmt: skip


def _numbers(envelope: codec.Envelope | None) -> tuple[int | None, int | None]:
    """Returns term and sequence number; None for each that does not fit 64 bits."""
    if envelope is None:
        return None, None
    term, sequence = envelope.term, envelope.sequence
    return (
        term if -INT64 <= term < INT64 else None,
        sequence if -INT64 <= sequence < INT64 else None,
    )


def _columns_suffice(topic: str, decoded: codec.Decoded, value: bytes) -> bool:
    """Returns whether the record's header and columns restore exactly these bytes: they are what
    `encode` writes, under the topic's own writer if there is an envelope.
    """
    envelope = decoded.envelope
    ours = envelope is None or (
        envelope.role == TOPIC_WRITERS[topic]
        and _numbers(envelope) == (envelope.term, envelope.sequence)
    )
    return ours and codec.is_canonical(value, decoded)
