"""Reads the branches of an episode (`Branch`): a trajectory whose tokens are flat, in the order in
which they were gained, but form a tree. The functions are pure, and every reader of such a
trajectory uses them: the trainer makes one row per leaf, admission checks the length of every path.

A trajectory without branches is one path, its tokens in their order.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollstream.streams.values import Branch, Turn

LEAVES_MAX = 256
"""Most paths of one episode. A program that never repeats its history needs one for each turn."""

Indices = NDArray[np.int64]
"""Flat indices of the tokens of a path, ascending."""


def branch_problem(length: int, branches: Sequence[Branch]) -> str:
    """Return why these cannot be the branches of a trajectory of `length` tokens, or ""."""
    before = 0
    for branch in branches:
        if not before < branch.start < length:
            return f"a branch at {branch.start}, after one at {before}, of {length} tokens"
        if not -1 <= branch.at < branch.start:
            return f"a branch at {branch.start} continues the token {branch.at}"
        before = branch.start
    if len(branches) >= LEAVES_MAX:
        return f"{len(branches)} branches, at most {LEAVES_MAX - 1} can be trained"
    return ""


def path_to(index: int, branches: Sequence[Branch]) -> Indices:
    """Return the flat indices of the path that ends with the token at `index`, that one included;
    empty for -1.
    """
    parts: list[Indices] = []
    at, number = index, len(branches) - 1
    while at >= 0:
        while number >= 0 and branches[number].start > at:
            number -= 1
        start = branches[number].start if number >= 0 else 0
        parts.append(np.arange(start, at + 1))
        at = branches[number].at if number >= 0 else -1
    return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)


def leaves(length: int, branches: Sequence[Branch]) -> list[Indices]:
    """Return one path for each token that no other token continues, in the order of these tokens.
    Together the paths hold every token.
    """
    if not branches:
        return [np.arange(length)]
    starts = [0, *(branch.start for branch in branches), length]
    continued = {branch.at for branch in branches}
    ends = [end - 1 for _, end in pairwise(starts) if end - 1 not in continued]
    return [path_to(end, branches) for end in ends]


def branch_depths(turns: Sequence[Turn], branches: Sequence[Branch]) -> list[int]:
    """Return the number of branches on the path of each turn of an episode."""
    depths: list[int] = []
    at_of = {branch.start: branch.at for branch in branches}
    for turn in turns:
        at = at_of.get(turn.start)
        if at is None:
            depths.append(depths[-1] if depths else 0)
        elif at < 0:
            depths.append(0)
        else:
            before = zip(turns, depths, strict=False)
            depths.append(next((depth for one, depth in before if one.end > at), 0) + 1)
    return depths
