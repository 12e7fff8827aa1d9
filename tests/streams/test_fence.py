"""Invariant 7 as a function: the interleavings that the fence stops, one by one."""

import pytest

from rollstream.errors import SequenceGap
from rollstream.streams.codec import Envelope
from rollstream.streams.fence import advance_fence
from rollstream.streams.records import Fence


def verdicts(*records: tuple[int, int], compacted: bool = False, fence: Fence = Fence()) -> str:  # noqa: B008
    """L or V per (term, sequence); number 0 is an `Opened`."""
    letters = ""
    for term, sequence in records:
        envelope = Envelope("trainer", term, sequence)
        fence, counts = advance_fence(fence, envelope, opens=sequence == 0, compacted=compacted)
        letters += "L" if counts else "V"
    return letters


def test_consecutive_records_of_successive_terms_are_live() -> None:
    assert verdicts((1, 0), (1, 1), (1, 2), (3, 0), (3, 1)) == "LLLLL"


def test_a_zombie_is_void_once_its_successor_opened() -> None:
    assert verdicts((1, 0), (1, 1), (2, 0), (1, 2), (2, 1), (1, 0)) == "LLLVLV"


def test_a_record_in_doubt_that_was_sent_again_is_void() -> None:
    assert verdicts((1, 0), (1, 0), (1, 1), (1, 2), (1, 1), (1, 2), (1, 3)) == "LVLLVVL"


def test_a_lost_record_is_an_error() -> None:
    with pytest.raises(SequenceGap, match="wrote #2 where #1 comes next"):
        verdicts((1, 0), (1, 2))


def test_a_lost_opening_is_an_error() -> None:
    with pytest.raises(SequenceGap, match="before any `Opened`"):
        verdicts((1, 0), (1, 1), (3, 4))


def test_compaction_leaves_gaps_but_zombies_and_repeats_stay_void() -> None:
    assert verdicts((1, 0), (1, 7), (1, 7), (3, 4), (1, 8), (3, 9), compacted=True) == "LLVLVL"


def test_a_start_in_the_middle_takes_its_fence_from_the_first_record() -> None:
    assert verdicts((4, 17), (4, 18), (4, 18)) == "LLV"


def test_a_stored_fence_continues_where_it_was() -> None:
    assert verdicts((2, 5), (1, 9), (2, 6), fence=Fence(2, 5)) == "LVL"


def test_a_start_behind_a_zombies_record_continues_with_its_successor() -> None:
    """The successor's `Opened` is before the start: `t1 #9` was written behind it."""
    assert verdicts((1, 9), (2, 5), (2, 6), (1, 10), (2, 7)) == "LLLVL"


def test_behind_an_opening_that_was_read_a_lost_opening_stays_an_error() -> None:
    with pytest.raises(SequenceGap, match="before any `Opened`"):
        verdicts((1, 9), (2, 5), (3, 0), (4, 2))
