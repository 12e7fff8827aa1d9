"""Estimates what a running answer still has to generate (`tokens_left`), and whether another one
ends before it (`fits_tail`). Dispatch and rollouts fill the tail of a version by the same rule
(docs/explanation/scheduling.md, "Filling tails").
"""

FIT_MARGIN = 1.5  # an answer fits if it may be this many times as long as expected
FILL_LAG_MAX = 4
"""A version fills no tails any more once the newest is more than this many after it: each answer
that is added is trained at such a lag, and makes the steps of the tail longer.
"""


def tokens_left(predicted: int, generated: int, most: int) -> int:
    """Returns how many tokens an answer is expected to generate still, of `most` in all; 0 if its
    length was not predicted. An answer that is longer than predicted is expected to generate as
    many tokens again: lengths have a long tail.
    """
    if not predicted:
        return 0
    left = predicted - generated if generated < predicted else generated
    return max(0, min(left, most - generated))


def fits_tail(predicted: float, tail: float) -> bool:
    """Returns whether an answer of this predicted length ends before one that has `tail` tokens
    left. An answer of unknown length, 0, does not.
    """
    return 0 < FIT_MARGIN * predicted <= tail
