"""What the bytes of a message are: a record that counts, a void one (invariant 7), or none and why.

Readers that act on records, the archive, live views and `tail` all judge here; they differ in what
they do with what is no record: bury it, keep its bytes, count it or show it.

In a topic of one role, a record that was written whole and that this release does not understand is
`newer` (invariant 14): who acts on records stops before it. What this stops: an older dispatch
passes a newer decision of the ledger over and generates the group again.
"""

import msgspec

from streams.codec import Decoded, Envelope, decode, envelope_of
from streams.errors import DecodeError, UnknownSchema
from streams.fence import Verdict, advance
from streams.records import Claim, Fence, Opened, Record
from streams.release import lacking
from streams.topics import BELONGS

REASON_MAX = 1000  # characters of an error's text that are kept
BLOB_SHOWN = 300  # characters of a claim's key


class Judgement(msgspec.Struct, frozen=True, gc=False):
    """`reason` is empty for a record; `decoded` is there whenever the bytes could be decoded.

    `newer` says what this release lacks to act on the record, "" where it lacks nothing or the
    record is void.
    """

    decoded: Decoded | None
    envelope: Envelope | None
    reason: str
    void: bool
    newer: str = ""

    @property
    def record(self) -> Record | None:
        """The record, void or not; None if the bytes are none."""
        return None if self.reason or self.decoded is None else self.decoded.record


def judge(
    value: bytes, fence: Fence, *, topic: str, fenced: bool, compacted: bool
) -> tuple[Fence, Judgement]:
    """The fence after a message of `topic` and what it is; `fenced` in topics that one role writes.

    `SequenceGap` when the log lost a record before it.
    """
    decoded, envelope, reason, newer = _opened_up(value, topic, fenced)
    void = False
    if fenced and envelope is not None:
        opens = decoded is not None and isinstance(decoded.record, Opened)
        fence, verdict = advance(fence, envelope, opens=opens, compacted=compacted)
        void = verdict is Verdict.VOID
    return fence, Judgement(decoded, envelope, reason, void, "" if void else newer)


def _opened_up(
    value: bytes, topic: str, fenced: bool
) -> tuple[Decoded | None, Envelope | None, str, str]:
    """The envelope even of an unknown schema, so that it leaves no gap; last, what is `newer`."""
    try:
        decoded = decode(value)
    except DecodeError as error:
        reason = str(error)[:REASON_MAX]
        try:
            envelope = envelope_of(value)
        except DecodeError:
            envelope = None
        # The checksum is right and one role wrote it: it is not damaged, but of another release.
        is_newer = fenced and (envelope is not None or isinstance(error, UnknownSchema))
        return None, envelope, reason, reason if is_newer else ""
    reason = newer = ""
    if isinstance(decoded.record, Opened) and fenced:
        newer = _lacked(decoded.record)
    if isinstance(decoded.record, Claim):
        blob = decoded.record.blob[:BLOB_SHOWN]
        reason = f"the object {blob} is gone, damaged or not what this claim of the record says"
    elif fenced and decoded.envelope is None:
        reason = "a record without an envelope in a topic that one role writes"
    elif topic in BELONGS and (schema := decoded.record.schema()) not in BELONGS[topic]:
        reason = f"schema {schema} does not belong in {topic}"
    return decoded, decoded.envelope, reason, newer


def _lacked(opened: Opened) -> str:
    features = lacking(opened.needs)
    if not features:
        return ""
    return (
        f"{opened.role} term {opened.term} (release {opened.release}) writes what this release "
        f"does not know: {', '.join(features)}"
    )
