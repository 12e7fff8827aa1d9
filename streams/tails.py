"""How many tokens an answer still generates: the rule by which dispatch and rollouts fill tails
(docs/explanation/scheduling.md).
"""

FIT_MARGIN = 1.5  # an answer fits if it may be this many times as long as expected
FILL_LAG_MAX = 4
"""A version fills no tails once the newest is more than this many after it: each added answer is
trained at such a lag.
"""


def tokens_left(predicted: int, generated: int, tokens_max: int) -> int:
    """Returns how many tokens are still expected, of `tokens_max` in all; 0 if the length was not
    predicted.
    """
    if not predicted:
        return 0
    # Lengths have a long tail: an answer longer than predicted is expected to double.
    expected = predicted - generated if generated < predicted else generated
    return max(0, min(expected, tokens_max - generated))


def fits_tail(predicted: float, tail: float) -> bool:
    """Returns whether an answer of this predicted length (0: unknown) ends before one that has
    `tail` tokens left.
    """
    return 0 < FIT_MARGIN * predicted <= tail
