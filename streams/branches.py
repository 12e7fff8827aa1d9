"""Reads the branches of an episode, whose tokens are flat, in the order in which the turns entered
the log, but form a tree (`Branch`).

Not every branch is a fork: where turns are generated together, a turn that continues a path has
other turns between.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollstream.streams.values import Branch, Turn

LEAVES_MAX = 256
"""Most paths of one episode. A program that never repeats its history needs one for each turn."""

Indices = NDArray[np.int64]
"""Flat indices of the tokens of a path, ascending."""


def branch_problem(length: int, branches: Sequence[Branch]) -> str:
    before = 0
    for branch in branches:
        if not before < branch.start < length:
            return f"a branch at {branch.start}, after one at {before}, of {length} tokens"
        if not -1 <= branch.at < branch.start:
            return f"a branch at {branch.start} continues the token {branch.at}"
        before = branch.start
    paths = len(_leaf_ends(length, branches))
    return f"{paths} paths, at most {LEAVES_MAX} can be trained" if paths > LEAVES_MAX else ""


def path_to(index: int, branches: Sequence[Branch]) -> Indices:
    """Returns the flat indices of the path up to `index`, included; empty for -1."""
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
    """Returns one path for each token that no other token continues. Together the paths hold every
    token.
    """
    if not branches:
        return [np.arange(length)]
    return [path_to(end, branches) for end in _leaf_ends(length, branches)]


def _leaf_ends(length: int, branches: Sequence[Branch]) -> list[int]:
    ends = [*(branch.start - 1 for branch in branches), length - 1]
    continued = {branch.at for branch in branches}
    return [end for end in ends if end not in continued]


def continued_tokens(turns: Sequence[Turn], branches: Sequence[Branch]) -> list[int]:
    """Returns each turn's continued token, -1 for a turn that begins a path of its own."""
    at_of = {branch.start: branch.at for branch in branches}
    return [at_of.get(turn.start, turn.start - 1) for turn in turns]


def reached_turns(
    turns: Sequence[Turn], branches: Sequence[Branch], turn_numbers: Iterable[int]
) -> frozenset[int]:
    """Returns these turns and those whose answers are on their paths."""
    turn_of = np.full(turns[-1].end if turns else 0, -1, np.int64)  # of each generated token
    for number, turn in enumerate(turns):
        turn_of[turn.generated : turn.end] = number
    reached: set[int] = set()
    for number in turn_numbers:
        if number not in reached:
            reached.update(turn_of[path_to(turns[number].end - 1, branches)].tolist())
    return frozenset(reached - {-1})


def kept_tokens(
    turns: Sequence[Turn], branches: Sequence[Branch], abandoned: Collection[int]
) -> NDArray[np.bool_]:
    """Returns a mask, true on the paths of turns that are not abandoned."""
    mask = np.zeros(turns[-1].end if turns else 0, np.bool_)
    for number, turn in enumerate(turns):
        if number not in abandoned:
            mask[path_to(turn.end - 1, branches)] = True
    return mask


def abandoned_tokens(turns: Sequence[Turn], abandoned: Collection[int]) -> NDArray[np.bool_]:
    parts = [
        np.full(turn.end - turn.generated, number in abandoned) for number, turn in enumerate(turns)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.bool_)


def branch_depths(turns: Sequence[Turn], branches: Sequence[Branch]) -> list[int]:
    depths: list[int] = []
    for turn, at in zip(turns, continued_tokens(turns, branches), strict=True):
        before = zip(turns, depths, strict=False)
        parent = next((depth for earlier, depth in before if earlier.end > at >= 0), 0)
        depths.append(parent + (at >= 0 and bool(turn.fork)))
    return depths
