"""Reading and joining `Drafts`: which generated tokens came from accepted drafts.

If only a part of a trajectory records its drafts, the rest counts as sampled by the model itself,
one token a step.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rollstream.streams.values import Drafts


def accepted_tokens(drafts: Drafts) -> int:
    """The number of draft tokens that the model accepted."""
    return sum(drafts.runs[1::2])


def accepted_mask(drafts: Drafts | None, count: int) -> NDArray[np.bool_]:
    """Of `count` generated tokens, which were accepted draft tokens. Runs that are too long are cut
    off.
    """
    found = np.zeros(count, np.bool_)
    at = 0
    for index, length in enumerate(() if drafts is None else drafts.runs):
        found[at : at + length] = index % 2 == 1
        at += length
    return found


def join_drafts(parts: Iterable[tuple[int, Drafts | None]]) -> Drafts | None:
    """The drafts of consecutive parts, each given with the number of its generated tokens; None if
    no part has any.
    """
    known = list(parts)
    if all(drafts is None for _, drafts in known):
        return None
    runs = [0]
    whole = [drafts or _undrafted(count) for count, drafts in known]
    for drafts in whole:
        for index, length in enumerate(drafts.runs):
            extend_runs(runs, length, guessed=index % 2 == 1)
    return Drafts(
        tuple(runs),
        sum(drafts.steps for drafts in whole),
        sum(drafts.guessed for drafts in whole),
        sum(drafts.asked for drafts in whole),
        sum(drafts.found for drafts in whole),
        sum(drafts.lookup_s for drafts in whole),
    )


def extend_runs(runs: list[int], length: int, *, guessed: bool) -> None:
    """Append a run of `length` tokens; adjacent runs of one kind become one."""
    assert runs, "runs begin with the tokens before the first draft, perhaps 0"
    if len(runs) % 2 == (not guessed):
        runs[-1] += length
    elif length:
        runs.append(length)


def _undrafted(count: int) -> Drafts:
    return Drafts((count,), count, 0, 0, 0, 0.0)
