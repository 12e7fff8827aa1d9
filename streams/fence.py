"""Invariant 7 as a pure function: which records of a single-holder role's topic count.

A record carries its writer's term and a sequence number per (term, partition); `Opened` has number
0. A reader keeps a `Fence` (the highest term whose `Opened` it read, and the next sequence number
expected of that term) and passes every record through it in partition order. What this stops:

* a zombie: `Opened 2`, then a late record of term 1 → void, because its writer has been replaced;
* an append in doubt that was repeated: `t2 #5`, `t2 #5` → the repeat is void;
* a repeat after the successor has opened: `t1 #5`, `Opened 2`, `t1 #5` → void by term and by
  number;
* a lost record: `t2 #5`, `t2 #7` → `SequenceGap`, so no reader continues past a hole;
* a lost opening: `t1 #5`, `t3 #4` → `SequenceGap` too.

A reader that starts at a truncated begin takes the fence that truncation stored there
(`truncation.py`). A reader without one (`Fence()`) starts in the middle: the first record sets its
fence, which is `presumed` until an `Opened` is read. That record may be a zombie's, written after
an `Opened` that is before the reader's begin: `t1 #9`, `t2 #5`. So a higher term raises a presumed
fence without an `Opened`; after an `Opened` has been read, the same sequence is a lost opening.
Compaction makes holes, so in compacted topics gaps are normal and only terms and repeats count.
"""

from enum import Enum

from rollstream.errors import SequenceGap
from rollstream.streams.codec import Envelope
from rollstream.streams.records import Fence


class FenceVerdict(Enum):
    """Whether a record counts."""

    LIVE = "live"
    VOID = "void"


def advance_fence(
    fence: Fence, envelope: Envelope, *, opens: bool, compacted: bool
) -> tuple[Fence, FenceVerdict]:
    """The fence after a record, and whether the record counts; `opens` if it is an `Opened`.

    Raises `SequenceGap` as described above.
    """
    presumed = not opens and (fence.presumed or fence == Fence())
    after = Fence(envelope.term, envelope.sequence + 1, presumed)
    if envelope.term < fence.term:
        return fence, FenceVerdict.VOID
    if envelope.term > fence.term:
        if not (opens or compacted or presumed):
            raise SequenceGap(
                f"{envelope.role} term {envelope.term} wrote #{envelope.sequence} before any "
                f"`Opened` of it was read (fence at term {fence.term}); the log lost a record"
            )
        return after, FenceVerdict.LIVE
    if envelope.sequence < fence.sequence:
        return fence, FenceVerdict.VOID
    if envelope.sequence > fence.sequence and not compacted:
        raise SequenceGap(
            f"{envelope.role} term {envelope.term} wrote #{envelope.sequence} where "
            f"#{fence.sequence} comes next; the log lost a record"
        )
    return after, FenceVerdict.LIVE
