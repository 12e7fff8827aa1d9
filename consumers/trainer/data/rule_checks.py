"""Checks of a user's advantage or rule of choice, for the user's own tests. (Of a surrogate:
`learn/surrogate_check.py`.)
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollstream.consumers.trainer.data.selection import GroupCandidate
from rollstream.errors import ConfigurationError

REWARDS = (0.0, 1.0), (0.3, -0.7, 2.0, 0.1, 1.5), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0)
CANDIDATES = tuple(GroupCandidate(group, version) for group, version in ((4, 2), (7, 0), (5, 1)))
TOLERANCE = 1e-9


def check_advantage(function: Callable[[NDArray[np.float64]], ArrayLike]) -> None:
    """Raises `ConfigurationError`, which names the broken rule, unless the function

    * returns one finite number for each reward of a group, also if all rewards are equal;
    * returns the same for the same rewards, and leaves them as they were;
    * gives each reward the same number in whatever order a group with different rewards has ended.
    """
    for rewards in REWARDS:
        group_rewards = np.array(rewards)
        computed = _advantages(function, group_rewards)
        if not np.array_equal(group_rewards, rewards):
            _refuse("advantage", "it changes the rewards that it gets")
        if not np.array_equal(computed, _advantages(function, group_rewards)):
            _refuse("advantage", "a second call returns other numbers; it must be pure")
        from_reversed = _advantages(function, group_rewards[::-1].copy())[::-1]
        if len(set(rewards)) == len(rewards) and not np.allclose(
            computed, from_reversed, 0, TOLERANCE
        ):
            _refuse("advantage", "it depends on the order in which a group's samples ended")


def _advantages(
    function: Callable[[NDArray[np.float64]], ArrayLike], rewards: NDArray[np.float64]
) -> NDArray[np.float64]:
    computed = np.asarray(function(rewards), np.float64)
    if computed.shape != rewards.shape or not np.isfinite(computed).all():
        _refuse(
            "advantage",
            f"it returned {computed!r} for {rewards}, not one finite number each",
        )
    return computed


def check_choice(rule: Callable[[Sequence[GroupCandidate], int], Iterable[int]]) -> None:
    """Raises `ConfigurationError`, which names the broken rule, unless the function returns between
    one and the allowed number of different groups out of those offered, and the same ones in each
    call with equal candidates.
    """
    offered = {candidate.group for candidate in CANDIDATES}
    for groups_max in range(1, len(CANDIDATES) + 2):
        chosen = list(rule(CANDIDATES, groups_max))
        if (
            len(chosen) > groups_max
            or len(set(chosen)) < len(chosen)
            or not offered.issuperset(chosen)
        ):
            _refuse(
                "choose",
                f"it returned {chosen}; it must return at most {groups_max} of {sorted(offered)}",
            )
        if not chosen:
            _refuse("choose", "it returned no group, so no step would ever be trained")
        if chosen != list(rule(CANDIDATES, groups_max)):
            _refuse("choose", "a second call returns other groups; it must be pure")


def _refuse(setting: str, rule: str) -> None:
    raise ConfigurationError(
        f"trainer.{setting}: {rule} (docs/explanation/learning.md, Your own parts)"
    )
