"""One message as the folds of the audit receive it, and the interface of a fold."""

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from rollstream.consumers.audit.tally import InvariantResult
from rollstream.streams.codec import Envelope, record_hash
from rollstream.streams.values import Address
from rollstream.streams.records import Record


class AuditMessage(msgspec.Struct, frozen=True, gc=False):
    """`record` is None for bytes that are no record, and `reason` states why. A void record is one
    that the fence of invariant 7 drops.
    """

    topic: str
    address: Address
    record: Record | None
    envelope: Envelope | None
    reason: str
    void: bool
    data: bytes

    @property
    def hash(self) -> str:
        """The content hash by which the ledger names the record."""
        return record_hash(self.data)


Completeness = Literal["whole", "archived", "part", "absent"]
"""`whole`: everything up to the log's end; `archived`: no log exists, and the archive may end
earlier in one topic than in another; `part`: some records are neither in the log nor archived;
`absent`: no records.
"""

Coverage = Mapping[str, Completeness]


def starts_complete(kept: Completeness) -> bool:
    """Whether the topic is available from its first record on, without a gap."""
    return kept in ("whole", "archived")


class RecordFold(Protocol):
    """A fold over the records of a run that checks one invariant or a part of it."""

    tally: InvariantResult

    def apply(self, seen: AuditMessage) -> None:
        """The next record of a topic, in the order of its partition."""
        ...

    def finish(self, coverage: Coverage) -> None:
        """Run the checks that need the end of all topics."""
        ...
