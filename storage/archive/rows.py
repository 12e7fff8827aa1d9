"""Messages of the log as the archive keeps them: one row each, whatever they are.

A row is a record, a void record (the fence of invariant 7 dropped it), a tombstone, or bytes that
are no record, with the reason. `original` holds the bytes wherever the columns alone would not give
them back: no record, a record that belongs to another topic, fields that a newer program added, a
JSON header that another language wrote in its own way. So the archive loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import fields, replace

from streams import judging
from streams.bus import Message
from streams.codec import Decoded, Envelope, content_hash, encode, is_canonical
from streams.records import (
    Admitted,
    Annotation,
    Applied,
    Configured,
    Fence,
    GroupClosed,
    Opened,
    Record,
    StepDone,
    Superseded,
    Take,
    TakeFailed,
    TakeRetried,
    Trajectory,
)
from streams.topics import catalogue

CLASSES: dict[str, tuple[type[Record], ...]] = {
    "trajectories": (Trajectory,),
    "annotations": (Annotation,),
    "ledger": (
        Configured,
        Take,
        TakeRetried,
        TakeFailed,
        Superseded,
        StepDone,
        GroupClosed,
        Opened,
    ),
    "admissions": (Admitted, Opened),
    "applied": (Applied,),
}
"""Archived topics, and the records that belong in each."""

WRITERS = {topic.name: topic.writer for topic in catalogue()}
"""The single-holder role of each topic, "" for topics of many writers."""

INT64 = 1 << 63


def _float_default(cls: type[Record]) -> tuple[str, float] | None:
    """The field of a class whose default is a float, and the default.

    A record's bytes may state such a default or leave it out (msgspec leaves it out only where it
    is the very same object), and a column cannot tell which.
    """
    found = [(f.name, f.default) for f in fields(cls) if type(f.default) is float]
    assert len(found) <= 1, f"{cls.__name__}: more than two ways to write one record"
    return found[0] if found else None


FLOAT_DEFAULTS = {cls: _float_default(cls) for classes in CLASSES.values() for cls in classes}


class Row(msgspec.Struct, frozen=True, gc=False):
    """One message, judged; `record` None: no record of this topic, and `reason` says why."""

    message: Message
    record: Record | None
    schema: str | None
    hash: str | None
    term: int | None
    sequence: int | None
    void: bool
    reason: str | None
    original: bytes | None


@dataclass(frozen=True, slots=True)
class Judged:
    """Rows in the order of the messages, and the fence of each partition after them."""

    rows: Sequence[Row]
    fences: Mapping[int, Fence]


def judge(
    topic: str, messages: Sequence[Message], fences: Mapping[int, Fence] | None = None
) -> Judged:
    """Decode and judge; `fences` are those before the messages, none: nothing was read yet.

    `SequenceGap` when the log lost a record of a single-holder role.
    """
    after = dict(fences or {})
    rows = [_row(topic, message, after) for message in messages]
    return Judged(rows, after)


def unfit(row: Row, why: str) -> Row:
    """The row of a record that the columns cannot hold: its bytes instead."""
    assert row.message.value is not None
    return replace(row, record=None, reason=why[: judging.REASON_MAX], original=row.message.value)


def bytes_of(record: Record, topic: str, term: int | None, sequence: int | None) -> bytes:
    """The record as the topic's writer encodes it; ValueError where JSON cannot hold a number."""
    if term is None or sequence is None:
        return encode(record)
    return encode(record, Envelope(WRITERS[topic], term, sequence))


def with_default(record: Record, stated: bool) -> Record:
    """The record with a float that equals its default `stated` in its bytes, or left out."""
    found = FLOAT_DEFAULTS[type(record)]
    if found is None or getattr(record, found[0]) != found[1]:
        return record
    name, default = found
    return replace(record, **{name: float.fromhex(default.hex()) if stated else default})


def _row(topic: str, message: Message, fences: dict[int, Fence]) -> Row:
    value = message.value
    if value is None:
        return Row(message, None, None, None, None, None, False, "tombstone", None)
    fence = fences.get(message.partition, Fence())
    fences[message.partition], judged = judging.judge(
        value, fence, topic=topic, fenced=bool(WRITERS[topic]), compacted=False
    )
    decoded, record, reason = judged.decoded, judged.record, judged.reason or None
    schema = None if decoded is None else decoded.record.schema()
    term, sequence = _numbers(judged.envelope)
    if record is not None and type(record) not in CLASSES[topic]:
        record, reason = None, f"schema {schema} does not belong in {topic}"
    kept = record is None or decoded is None or not _columns_suffice(topic, decoded, value)
    return Row(
        message, record, schema, content_hash(value), term, sequence, judged.void, reason,
        value if kept else None,
    )  # fmt: skip


def _numbers(envelope: Envelope | None) -> tuple[int | None, int | None]:
    """Term and sequence number, as far as 64 bits hold them."""
    if envelope is None:
        return None, None
    term, sequence = envelope.term, envelope.sequence
    return (
        term if -INT64 <= term < INT64 else None,
        sequence if -INT64 <= sequence < INT64 else None,
    )


def _columns_suffice(topic: str, decoded: Decoded, value: bytes) -> bool:
    """Whether the record's columns give these very bytes again."""
    envelope = decoded.envelope
    ours = envelope is None or (
        envelope.role == WRITERS[topic] and _numbers(envelope) == (envelope.term, envelope.sequence)
    )
    return ours and is_canonical(value, decoded)
