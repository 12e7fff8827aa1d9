"""Predicts the length of an answer from earlier passes over the prompt, else from the finished
samples of its group, else from its task. Predictions affect speed only, never results.

History by prompt is RhymeRL's (arXiv 2508.18588: only 2 to 4 % of answers change their rank much
between passes); the use of the group's own finished samples is Seer's (probe first, the longest so
far is the estimate). Means follow the newest `MEMORY` samples, because the lengths of a policy's
answers change during training.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from streams.codec import content_hash
from streams.records import Prompt

PROMPTS_MAX = 1 << 16  # beyond it the least recently used prompt is evicted
TASKS_MAX = 1024
MEMORY = 32  # samples over which mean and spread are smoothed


@dataclass(frozen=True, slots=True)
class Length:
    """Generated tokens: mean and standard deviation of `count` samples."""

    mean: float
    spread: float
    count: int


@dataclass(frozen=True, slots=True)
class KnownLengths:
    """A history as plain values: (key, mean, spread, count), least recently used first."""

    prompts: tuple[tuple[str, float, float, int], ...] = ()
    tasks: tuple[tuple[str, float, float, int], ...] = ()


def prompt_key(prompt: Prompt) -> str:
    """Identifies a prompt in every pass over the data."""
    return content_hash(prompt.task.encode() + b"\0" + prompt.tokens.tobytes())


def updated(known: Length | None, tokens: int) -> Length:
    """The length with one more sample; each sample has a weight of at least 1 / `MEMORY`."""
    if known is None:
        return Length(float(tokens), 0.0, 1)
    count = min(known.count + 1, MEMORY)
    off = tokens - known.mean
    mean = known.mean + off / count
    variance = known.spread**2 + (off * (tokens - mean) - known.spread**2) / count
    return Length(mean, math.sqrt(max(0.0, variance)), count)


class Lengths:
    """The lengths of a run's answers by prompt and by task; bounded."""

    def __init__(self, known: KnownLengths | None = None) -> None:
        known = known or KnownLengths()
        self._prompts = OrderedDict((key, Length(m, s, n)) for key, m, s, n in known.prompts)
        self._tasks = OrderedDict((key, Length(m, s, n)) for key, m, s, n in known.tasks)
        self.changed = False

    def note(self, prompt: Prompt, tokens: int) -> None:
        """Add one finished sample of this prompt."""
        _note(self._prompts, prompt_key(prompt), tokens, PROMPTS_MAX)
        _note(self._tasks, prompt.task, tokens, TASKS_MAX)
        self.changed = True

    def of_prompt(self, prompt: Prompt) -> Length | None:
        """The length of this prompt's earlier answers, of the present pass too."""
        return self._prompts.get(prompt_key(prompt))

    def expected(self, prompt: Prompt, finished: Sequence[int] = ()) -> Length | None:
        """The estimate for one more sample of the prompt, None without any history; `finished` are
        the lengths of its group's finished samples.
        """
        own = self.of_prompt(prompt)
        if own is not None and own.count > len(finished):
            return own
        if finished:
            return Length(float(max(finished)), 0.0, len(finished))
        return self._tasks.get(prompt.task)

    def mean(self, prompt: Prompt, finished: Sequence[int] = ()) -> float:
        """The mean of `expected`, 0 without any history."""
        expected = self.expected(prompt, finished)
        return 0.0 if expected is None else expected.mean

    def known(self) -> KnownLengths:
        """The history as plain values; clears `changed`."""
        self.changed = False
        return KnownLengths(_plain(self._prompts), _plain(self._tasks))


def _note(by: "OrderedDict[str, Length]", key: str, tokens: int, most: int) -> None:
    by[key] = updated(by.get(key), tokens)
    by.move_to_end(key)
    if len(by) > most:
        by.popitem(last=False)


def _plain(by: "OrderedDict[str, Length]") -> tuple[tuple[str, float, float, int], ...]:
    return tuple((key, round(k.mean, 1), round(k.spread, 1), k.count) for key, k in by.items())
