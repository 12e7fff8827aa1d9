"""One message as the audit's folds see it, and what a fold is."""

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from consumers.audit.tally import Tally
from streams.codec import Envelope, content_hash
from streams.records import Address, Record


class Seen(msgspec.Struct, frozen=True, gc=False):
    """`record` is None for bytes that are no record, and `reason` says why; a void record is one
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
        """What the ledger names it by."""
        return content_hash(self.data)


Kept = Literal["whole", "archived", "part", "absent"]
"""`whole`: all up to the log's end; `archived`: no log is left, and the archive may end earlier in
one topic than in another; `part`: some of it is neither in the log nor archived; `absent`: nothing.
"""

Coverage = Mapping[str, Kept]


def begins_whole(kept: Kept) -> bool:
    """Whether the topic is there from its first record on, without a hole."""
    return kept in ("whole", "archived")


class Checker(Protocol):
    """A fold over the records of a run, one invariant or a part of it."""

    tally: Tally

    def apply(self, seen: Seen) -> None:
        """The next record of a topic, in the order of its partition."""
        ...

    def finish(self, coverage: Coverage) -> None:
        """What only the end of all topics tells."""
        ...
