"""Which bytes of a topic are a record that counts, the same for readers, the archive and the
commands that show a log.
"""

import msgspec

from rollstream.errors import DecodeError, UnknownSchema
from rollstream.streams.codec import Decoded, Envelope, decode, envelope_of
from rollstream.streams.fence import advance_fence
from rollstream.streams.records import SCHEMAS_BY_TOPIC, Claim, Fence, Opened, Record
from rollstream.streams.release import missing_features

REASON_MAX = 1000  # most characters of an error's text in a reason
BLOB_SHOWN = 300  # most characters of a blob's key in a reason


class ClassifiedMessage(msgspec.Struct, frozen=True, gc=False):
    """A record that counts, a `void` one (invariant 7), or bytes that are no record of the topic,
    with the `reason`.

    `newer`: a single-holder role's topic has a complete record of an unknown form, or an `Opened`
    that needs a feature which this release lacks (invariant 14); "" otherwise, and for a void
    record.
    """

    decoded: Decoded | None
    envelope: Envelope | None
    reason: str
    void: bool
    newer: str = ""

    @property
    def record(self) -> Record | None:
        """Returns the record, void or not; None if the bytes are not a record."""
        return None if self.reason or self.decoded is None else self.decoded.record


def classify_message(
    value: bytes, fence: Fence, *, topic: str, fenced: bool, compacted: bool
) -> tuple[Fence, ClassifiedMessage]:
    """Returns the fence after a message, and its classification. `fenced`: a single-holder role
    writes the topic, so each record needs an envelope and passes the fence. Raises `SequenceGap` if
    the log lost a record before this one.
    """
    decoded, envelope, reason, newer = _decode_with_envelope(value, topic, fenced)
    void = False
    if fenced and envelope is not None:
        opens = decoded is not None and isinstance(decoded.record, Opened)
        fence, counts = advance_fence(fence, envelope, opens=opens, compacted=compacted)
        void = not counts
    return fence, ClassifiedMessage(decoded, envelope, reason, void, "" if void else newer)


def _decode_with_envelope(
    value: bytes, topic: str, fenced: bool
) -> tuple[Decoded | None, Envelope | None, str, str]:
    try:
        decoded = decode(value)
    except DecodeError as error:
        reason = str(error)[:REASON_MAX]
        try:
            # Known even for an unknown schema, so that such a record leaves no gap in the sequence
            # numbers.
            envelope = envelope_of(value)
        except DecodeError:
            envelope = None
        # The bytes are complete (their checksum is right) and a single-holder role writes the
        # topic: another release wrote this record.
        is_newer = fenced and (envelope is not None or isinstance(error, UnknownSchema))
        return None, envelope, reason, reason if is_newer else ""
    reason = newer = ""
    if isinstance(decoded.record, Opened) and fenced:
        newer = _missing_features(decoded.record)
    if isinstance(decoded.record, Claim):  # the bus replaces a claim by its record if it can
        blob = decoded.record.blob[:BLOB_SHOWN]
        reason = f"the object {blob} is missing, damaged or not the one that this claim describes"
    elif fenced and decoded.envelope is None:
        reason = "a record without an envelope in a topic that one role writes"
    elif (
        topic in SCHEMAS_BY_TOPIC
        and (schema := decoded.record.schema()) not in SCHEMAS_BY_TOPIC[topic]
    ):
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
