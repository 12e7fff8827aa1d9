"""Rewards of the examples: functions `verifier(answer, reference)`, named by import path."""

import re
from collections.abc import Mapping

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def in_order(answer: str, reference: Mapping[str, str]) -> tuple[float, dict[str, float]]:
    """1 for the reference's letters in alphabetical order, else what share of places is right,
    halved; how much is there at all is recorded beside the reward.
    """
    wanted = "".join(sorted(reference["letters"]))
    right = sum(one == other for one, other in zip(answer, wanted, strict=False))
    complete = len(set(answer) & set(wanted)) / len(wanted)
    reward = 1.0 if answer == wanted else 0.5 * right / max(len(wanted), len(answer))
    return reward, {"complete": complete}


def final_number(answer: str, reference: str) -> tuple[float, dict[str, float]]:
    """1 when the answer's number is that of a GSM8K solution (after its `####`), else 0; whether it
    stood where it was asked for, after `####`, is recorded beside the reward.
    """
    marked = answer.rpartition("####")
    found = NUMBER.findall(marked[2])
    wanted = NUMBER.findall(reference.rpartition("####")[2])
    is_right = bool(found and wanted) and _value(found[0 if marked[1] else -1]) == _value(wanted[0])
    return float(is_right), {"marked": float(bool(marked[1]))}


def _value(number: str) -> float:
    return float(number.replace(",", ""))
