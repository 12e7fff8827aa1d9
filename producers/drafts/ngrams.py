"""64-bit keys of the few tokens before a position, one for each length, and for its prompt.

`ngram_keys` computes them for all positions of a sequence at once, `ngram_sums` and `ngram_key` for one
position in plain integers; both give the same keys. A key is a polynomial in an odd multiplier,
modulo 2^64, then two rounds of mixing. Keys can collide, so a look-up also compares the tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollstream.streams.values import Tokens

NgramKeys = NDArray[np.uint64]

_MASK = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93
_LENGTH_MAX = 64


def _powers() -> tuple[int, ...]:
    found = [1]
    while len(found) < _LENGTH_MAX:
        found.append(found[-1] * _BASE & _MASK)
    return tuple(found)


_POWERS = _powers()
_POWERS_64 = np.array(_POWERS, np.uint64)


def ngram_keys(
    prompts: NgramKeys, tokens: Tokens, places: NDArray[np.int64], lengths: Sequence[int]
) -> list[tuple[NgramKeys, NDArray[np.int64]]]:
    """Per length (ascending): the keys of all positions that have at least that many tokens before
    them, and these positions.

    `tokens` holds sequences one after the other. For each position, `prompts` is the sequence's
    prompt and `places` the number of the sequence's tokens before it, negative for a position
    without a key.
    """
    weights = tokens.astype(np.uint64) + np.uint64(1)
    sums = np.zeros(len(tokens), np.uint64)  # at position i: the sum over the tokens before i
    found: list[tuple[NgramKeys, NDArray[np.int64]]] = []
    done = 0
    for length in lengths:
        for back in range(done + 1, min(length + 1, len(tokens))):
            sums[back:] += weights[:-back] * _POWERS_64[back - 1]
        done = length
        at = np.flatnonzero(places >= length)
        salt = np.uint64(length * _MIX & _MASK)
        found.append((_mixed(sums[at] ^ prompts[at] ^ salt), at))
    return found


def ngram_sums(newest: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Per length (ascending) for which `newest` has tokens: the sum that `ngram_key` turns into a key.
    Mixing costs most and the longest match is mostly found, so keys are computed one by one.
    """
    found: list[int] = []
    total, done, count = 0, 0, len(newest)
    for length in lengths:
        if length > count:
            break
        for back in range(done + 1, length + 1):
            total += (newest[-back] + 1) * _POWERS[back - 1]
        done = length
        found.append(total)
    return found


def ngram_key(prompt: int, total: int, length: int) -> int:
    """The key of the position after `length` tokens with this sum."""
    key = (total ^ prompt ^ length * _MIX) & _MASK
    key = (key ^ (key >> 32)) * _MIX & _MASK
    key = (key ^ (key >> 32)) * _MIX & _MASK
    return (key ^ (key >> 32)) or 1


def _mixed(keys: NgramKeys) -> NgramKeys:
    for _ in range(2):
        keys = (keys ^ (keys >> np.uint64(32))) * np.uint64(_MIX)
    keys ^= keys >> np.uint64(32)
    keys[keys == 0] = 1  # 0 marks an empty entry
    return keys
