"""Rewards of the examples: functions `verifier(answer, reference)`, named by import path."""

from collections.abc import Mapping


def in_order(answer: str, reference: Mapping[str, str]) -> tuple[float, dict[str, float]]:
    """1 for the reference's letters in alphabetical order, else what share of places is right,
    halved; how much is there at all is recorded beside the reward.
    """
    wanted = "".join(sorted(reference["letters"]))
    right = sum(one == other for one, other in zip(answer, wanted, strict=False))
    complete = len(set(answer) & set(wanted)) / len(wanted)
    reward = 1.0 if answer == wanted else 0.5 * right / max(len(wanted), len(answer))
    return reward, {"complete": complete}
