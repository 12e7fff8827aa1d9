"""Messages as rows, from which their bytes can be restored exactly: a record, a void record
(invariant 7), a tombstone, or bytes that are no record of the topic.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import fields, replace

from rollstream.streams import codec
from rollstream.streams.bus import Message
from rollstream.streams.classified import REASON_MAX, classify_message
from rollstream.streams.records import TOPIC_RECORDS, Fence, Record
from rollstream.streams.topics import ARCHIVED_TOPICS, catalogue

ARCHIVED_CLASSES: dict[str, tuple[type[Record], ...]] = {
    topic: TOPIC_RECORDS[topic] for topic in ARCHIVED_TOPICS
}
"""Maps each archived topic to the record classes that belong in it."""

TOPIC_WRITERS = {topic.name: topic.writer for topic in catalogue()}
"""By topic the single-holder role that writes it, "" for topics of many writers."""

INT64 = 1 << 63  # the archive's integer columns have 64 bits


def _float_default(cls: type[Record]) -> tuple[str, float] | None:
    """Returns a record class's one field with a float as its default, and that default."""
    defaults = [(f.name, f.default) for f in fields(cls) if type(f.default) is float]
    # A record's bytes may state such a default or omit it: msgspec omits a float only if it is the
    # same object. A column cannot distinguish the two (`with_default`).
    assert len(defaults) <= 1, f"{cls.__name__}: more than two ways to write one record"
    return defaults[0] if defaults else None


FLOAT_DEFAULTS = {
    cls: _float_default(cls) for classes in ARCHIVED_CLASSES.values() for cls in classes
}


class ArchiveRow(msgspec.Struct, frozen=True, gc=False):
    """`hash` is `record_hash` of the bytes. `term` and `sequence` are those of a single-holder
    role's writer, None if there is none or if they exceed 64 bits. Either `original` or `header` is
    set; of a tombstone neither.
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


def classify_rows(
    topic: str,
    messages: Sequence[Message],
    fences: Mapping[int, Fence] | None = None,
    is_exact: bool = True,
) -> tuple[list[ArchiveRow], dict[int, Fence]]:
    """Returns consecutive messages as rows, and the fences after them; a partition without a fence
    starts with the empty one. With `is_exact` False no row states whether its columns restore the
    record's bytes (a third of the work). Raises `SequenceGap` if the log lost a record of a
    single-holder role.
    """
    after = dict(fences or {})
    rows = [_row(topic, message, after, is_exact) for message in messages]
    return rows, after


def as_original(row: ArchiveRow, why: str) -> ArchiveRow:
    """Returns the row for a record that the columns cannot hold: all bytes in `original`."""
    assert row.message.value is not None
    return replace(
        row, record=None, reason=why[:REASON_MAX], original=row.message.value, header=None
    )


def bytes_of(record: Record, topic: str, term: int | None, sequence: int | None) -> bytes:
    """Returns the bytes as the topic's writer encodes the record. Raises ValueError if JSON cannot
    hold one of its numbers.
    """
    if term is None or sequence is None:
        return codec.encode(record)
    return codec.encode(record, codec.Envelope(TOPIC_WRITERS[topic], term, sequence))


def with_default(record: Record, stated: bool) -> Record:
    """Returns an equal record whose encoding states (`stated`) or omits the float that equals its
    default.
    """
    float_default = FLOAT_DEFAULTS[type(record)]
    if float_default is None or getattr(record, float_default[0]) != float_default[1]:
        return record
    name, default = float_default
    return replace(record, **{name: float.fromhex(default.hex()) if stated else default})


def _row(topic: str, message: Message, fences: dict[int, Fence], is_exact: bool) -> ArchiveRow:
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
    # Header and columns do not restore the bytes, as when a newer program added fields.
    needs_original = (
        record is None
        or decoded is None
        or (is_exact and not _columns_suffice(topic, decoded, value))
    )
    return ArchiveRow(
        message, record, schema, codec.record_hash(value), term, sequence, classified.void, reason,
        value if needs_original else None, None if needs_original else codec.header_bytes(value),
    )  # fmt: skip


def _numbers(envelope: codec.Envelope | None) -> tuple[int | None, int | None]:
    if envelope is None:
        return None, None
    term, sequence = envelope.term, envelope.sequence
    return (
        term if -INT64 <= term < INT64 else None,
        sequence if -INT64 <= sequence < INT64 else None,
    )


def _columns_suffice(topic: str, decoded: codec.Decoded, value: bytes) -> bool:
    envelope = decoded.envelope
    ours = envelope is None or (
        envelope.role == TOPIC_WRITERS[topic]
        and _numbers(envelope) == (envelope.term, envelope.sequence)
    )
    return ours and codec.is_canonical(value, decoded)
