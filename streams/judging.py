"""Classifies the bytes of a message: a record that counts, a void record (invariant 7), or not a
record, with the reason.

Readers that act on records, the archive, live views and `tail` all use this rule. They differ in
what they do with bytes that are not a record: dead-letter them, archive them, count or show them.

In a topic of one role, a complete record that this release does not understand is `newer`
(invariant 14), and a role that acts on records stops before it. What this stops: an older dispatch
skips a newer decision in the ledger and generates the group again.
"""

import msgspec

from rollstream.streams.codec import Decoded, Envelope, decode, envelope_of
from rollstream.errors import DecodeError, UnknownSchema
from rollstream.streams.fence import FenceVerdict, advance_fence
from rollstream.streams.records import Claim, Fence, Opened, Record
from rollstream.streams.release import missing_features
from rollstream.streams.topics import SCHEMAS_BY_TOPIC

REASON_MAX = 1000  # characters of an error's text that are kept
BLOB_SHOWN = 300  # characters of a claim's key


class ClassifiedMessage(msgspec.Struct, frozen=True, gc=False):
    """`reason` is empty for a record. `decoded` is set whenever the bytes could be decoded.

    `newer` names what this release lacks to act on the record; it is "" if nothing is lacking or
    the record is void.
    """

    decoded: Decoded | None
    envelope: Envelope | None
    reason: str
    void: bool
    newer: str = ""

    @property
    def record(self) -> Record | None:
        """The record, void or not; None if the bytes are not a record."""
        return None if self.reason or self.decoded is None else self.decoded.record


def classify_message(
    value: bytes, fence: Fence, *, topic: str, fenced: bool, compacted: bool
) -> tuple[Fence, ClassifiedMessage]:
    """The fence after a message of `topic`, and the message's classification; `fenced` in topics
    that one role writes.

    Raises `SequenceGap` if the log lost a record before this one.
    """
    decoded, envelope, reason, newer = _decode_with_envelope(value, topic, fenced)
    void = False
    if fenced and envelope is not None:
        opens = decoded is not None and isinstance(decoded.record, Opened)
        fence, verdict = advance_fence(fence, envelope, opens=opens, compacted=compacted)
        void = verdict is FenceVerdict.VOID
    return fence, ClassifiedMessage(decoded, envelope, reason, void, "" if void else newer)


def _decode_with_envelope(
    value: bytes, topic: str, fenced: bool
) -> tuple[Decoded | None, Envelope | None, str, str]:
    """Decode the bytes. Returns the record, its envelope (known even for an unknown schema, so that
    such a record leaves no gap), the reason why it is not a record, and the reason why it is
    `newer`.
    """
    try:
        decoded = decode(value)
    except DecodeError as error:
        reason = str(error)[:REASON_MAX]
        try:
            envelope = envelope_of(value)
        except DecodeError:
            envelope = None
        # The checksum is right and one role wrote it: not damaged, but from another release.
        is_newer = fenced and (envelope is not None or isinstance(error, UnknownSchema))
        return None, envelope, reason, reason if is_newer else ""
    reason = newer = ""
    if isinstance(decoded.record, Opened) and fenced:
        newer = _missing_features(decoded.record)
    if isinstance(decoded.record, Claim):
        blob = decoded.record.blob[:BLOB_SHOWN]
        reason = f"the object {blob} is missing, damaged or not the one that this claim describes"
    elif fenced and decoded.envelope is None:
        reason = "a record without an envelope in a topic that one role writes"
    elif topic in SCHEMAS_BY_TOPIC and (schema := decoded.record.schema()) not in SCHEMAS_BY_TOPIC[topic]:
        reason = f"schema {schema} does not belong in {topic}"
    return decoded, decoded.envelope, reason, newer


def _missing_features(opened: Opened) -> str:
    features = missing_features(opened.needs)
    if not features:
        return ""
    return (
        f"{opened.role} term {opened.term} (release {opened.release}) writes what this release "
        f"does not know: {', '.join(features)}"
    )
