"""Advantages from the rewards of a group, by our rules or a user's function."""

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollstream.consumers.credit import GAE
from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable

SETTING = "trainer.advantage"
EPS = 1e-4  # as in TRL: equal rewards give 0 instead of a quotient of rounding errors


def advantages(rewards: ArrayLike, kind: str) -> NDArray[np.float64]:
    """Returns one group-relative advantage per reward of a group of n; 0 for a group of one.

    * `grpo`: (R − mean) / (std + 1e-4), std with n − 1 in the denominator (DeepSeekMath, arXiv
      2402.03300).
    * `centred`: R − mean (Dr. GRPO, arXiv 2503.20783: dividing by std favours too easy and too hard
      prompts).
    * `leave_one_out`: R − mean of the others (RLOO, arXiv 2402.14740), which is n/(n−1) ×
      `centred`.
    * `batch`: R − mean; the update divides by the std over all its samples (REINFORCE++-baseline,
      arXiv 2501.03262), in `LossStatistics.divisor`.
    * `module:function`: the user's.
    """
    # `gae` is no function of the rewards (`objectives/critic/gae.py`).
    assert kind != GAE, "a critic's advantages"
    values = np.asarray(rewards, np.float64)
    assert values.ndim == 1, "rewards of one group"
    if len(values) < 2:
        return np.zeros(len(values))
    if ":" in kind:
        return find_advantage(kind)(values)
    centred = values - values.mean()
    if kind in ("centred", "batch"):
        return centred
    if kind == "leave_one_out":
        return centred * len(values) / (len(values) - 1)
    return centred / (values.std(ddof=1) + EPS)


@cache
def find_advantage(path: str) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Returns the user's function that `trainer.advantage` names: rewards [n] of a group, n ≥ 2, to
    advantages [n]. Raises `ConfigurationError` if it cannot be imported or returns another shape or
    a number that is not finite.
    """
    function = cast(Callable[[NDArray[np.float64]], ArrayLike], find_callable(path, SETTING))

    def compute(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        group_advantages = np.asarray(function(rewards.copy()), np.float64)
        if group_advantages.shape != rewards.shape or not np.isfinite(group_advantages).all():
            raise ConfigurationError(
                f"{SETTING}: {path!r} returned {group_advantages!r} for the rewards {rewards}; it "
                "must return one finite number for each"
            )
        return group_advantages

    return compute
