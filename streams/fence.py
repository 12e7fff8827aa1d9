"""Invariant 7 as a pure function: which records of a single-holder role's topic count.

A record carries its writer's term and a sequence number per (term, partition), `Opened` being
number 0. A reader carries a `Fence` (highest term whose `Opened` it read, next number expected of
it) and shows it every record in the partition's order. What this stops:

* a zombie: `Opened 2`, then a late record of term 1 → void, its writer has been replaced;
* a record in doubt, sent again: `t2 #5`, `t2 #5` → the repeat is void;
* a resend behind its successor's opening: `t1 #5`, `Opened 2`, `t1 #5` → void twice over;
* a lost record: `t2 #5`, `t2 #7` → `SequenceGap`, nobody reads on past a hole;
* a lost opening: `t1 #5`, `t3 #4` → `SequenceGap` too.

A reader that starts at a truncated begin takes the fence that truncation left there
(`truncation.py`). One that has none (`Fence()`) begins in the middle: the first record sets its
fence, which is `presumed` until an `Opened` is read. That record may be a zombie's, written behind
an `Opened` that lies before the reader's begin: `t1 #9`, `t2 #5`. So a higher term lifts a presumed
fence without an `Opened`; behind an `Opened` that was read it is a lost opening. Compaction makes
holes, so in compacted topics gaps are normal and only terms and repeats count.
"""

from enum import Enum

from streams.codec import Envelope
from streams.errors import SequenceGap
from streams.records import Fence


class Verdict(Enum):
    """Whether a record counts."""

    LIVE = "live"
    VOID = "void"


def advance(
    fence: Fence, envelope: Envelope, *, opens: bool, compacted: bool
) -> tuple[Fence, Verdict]:
    """The fence after a record and whether it counts; `opens` if it is an `Opened`.

    Raises `SequenceGap` as described above.
    """
    presumed = not opens and (fence.presumed or fence == Fence())
    after = Fence(envelope.term, envelope.sequence + 1, presumed)
    if envelope.term < fence.term:
        return fence, Verdict.VOID
    if envelope.term > fence.term:
        if not (opens or compacted or presumed):
            raise SequenceGap(
                f"{envelope.role} term {envelope.term} wrote #{envelope.sequence} before any "
                f"`Opened` of it was read (fence at term {fence.term}); the log lost a record"
            )
        return after, Verdict.LIVE
    if envelope.sequence < fence.sequence:
        return fence, Verdict.VOID
    if envelope.sequence > fence.sequence and not compacted:
        raise SequenceGap(
            f"{envelope.role} term {envelope.term} wrote #{envelope.sequence} where "
            f"#{fence.sequence} comes next; the log lost a record"
        )
    return after, Verdict.LIVE
