"""Metrics of a version's answers to held-out prompts, and the line that records them. Pure.

Sampled accuracy (T = 1) is the metric to watch. Greedy answers change all together when the most
likely style changes; that is a change of mode, not of skill. An answer without a reward (dead)
counts as wrong, and is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollstream.producers.rewards.pool import RewardVerdict
from rollstream.producers.tasks.base import STYLE_PREFIX


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """One answer to a held-out prompt: its verdict, its number of generated tokens, and its part of
    a mixture.
    """

    verdict: RewardVerdict
    length: int
    task: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A version's metrics on held-out prompts. Lengths (tokens) and style shares are those of the
    sampled answers; `accuracy_by_task` is sampled too, and empty with a single task.
    """

    accuracy_sampled: float
    accuracy_greedy: float
    length_median: float
    length_p99: float
    shares: dict[str, float]
    dead: int
    accuracy_by_task: dict[str, float] = field(default_factory=dict[str, float])

    def line(self, step: int, seconds: float) -> dict[str, object]:
        """The line of `metrics/eval.jsonl`; `seconds` since the run's start."""
        accuracies: dict[str, object] = {
            f"accuracy_sampled/{task}": round(accuracy, 6)
            for task, accuracy in self.accuracy_by_task.items()
        }
        return accuracies | {
            "step": step,
            "seconds": round(seconds, 3),
            "accuracy_sampled": round(self.accuracy_sampled, 6),
            "accuracy_greedy": round(self.accuracy_greedy, 6),
            "length_median": self.length_median,
            "length_p99": self.length_p99,
            "shares": {name: round(share, 6) for name, share in self.shares.items()},
            "dead": self.dead,
        }


def measure(sampled: Sequence[JudgedAnswer], greedy: Sequence[JudgedAnswer]) -> Evaluation:
    """The metrics of at least one answer of each kind. Accuracy is the mean reward."""
    assert sampled, "no sampled answer to measure"
    assert greedy, "no greedy answer to measure"
    lengths = np.array([one.length for one in sampled])
    return Evaluation(
        accuracy_sampled=_accuracy(sampled),
        accuracy_greedy=_accuracy(greedy),
        length_median=float(np.median(lengths)),
        length_p99=float(np.percentile(lengths, 99)),
        shares=_shares(sampled),
        dead=sum(one.verdict.dead for one in (*sampled, *greedy)),
        accuracy_by_task=_by_task(sampled),
    )


def _by_task(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
    tasks = sorted({one.task for one in answers})
    if len(tasks) < 2:
        return {}
    return {task: _accuracy([one for one in answers if one.task == task]) for task in tasks}


def _accuracy(answers: Sequence[JudgedAnswer]) -> float:
    return float(np.mean([0.0 if one.verdict.dead else one.verdict.reward for one in answers]))


def _shares(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
    """Mean of every `style/…` score over all answers."""
    totals: dict[str, float] = {}
    for one in answers:
        for name, value in one.verdict.scores.items():
            if name.startswith(STYLE_PREFIX):
                style = name.removeprefix(STYLE_PREFIX)
                totals[style] = totals.get(style, 0.0) + value
    return {style: totals[style] / len(answers) for style in sorted(totals)}
