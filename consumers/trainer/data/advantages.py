"""Group-relative advantages: each sample is compared with the other samples of its prompt. Pure."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

AdvantageKind = Literal["grpo", "centred", "leave_one_out"]

EPS = 1e-4  # as in TRL: equal rewards give 0 instead of a quotient of rounding errors


def advantages(rewards: ArrayLike, kind: AdvantageKind) -> NDArray[np.float64]:
    """One advantage per reward of a group of n; a group of one has advantage 0.

    * `grpo`: (R − mean) / (std + 1e-4), std with n − 1 in the denominator (DeepSeekMath, arXiv
      2402.03300).
    * `centred`: R − mean (Dr. GRPO, arXiv 2503.20783: dividing by std favours too easy and
      too hard prompts).
    * `leave_one_out`: R − mean of the others (RLOO, arXiv 2402.14740), which is n/(n−1) ×
      `centred`.
    """
    values = np.asarray(rewards, np.float64)
    assert values.ndim == 1, "rewards of one group"
    if len(values) < 2:
        return np.zeros(len(values))
    centred = values - values.mean()
    if kind == "centred":
        return centred
    if kind == "leave_one_out":
        return centred * len(values) / (len(values) - 1)
    return centred / (values.std(ddof=1) + EPS)
