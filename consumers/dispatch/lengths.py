"""Predicts the length of an answer from earlier passes over the prompt, else from the finished
samples of its group (as Seer), else from its task. Predictions affect speed only.

The history by prompt is RhymeRL's (arXiv 2508.18588: ranked by length, only 2 to 4 % of answers
move far between two passes).
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.streams.codec import record_hash
from rollstream.streams.records import Prompt

PROMPTS_MAX = 1 << 16  # beyond it the least recently used prompt is evicted
TASKS_MAX = 1024
# The lengths of a policy's answers change during training.
SAMPLES_SMOOTHED = 32  # mean and spread are moving averages over about this many samples


@dataclass(frozen=True, slots=True)
class ExpectedLength:
    """A length in generated tokens, from at most `SAMPLES_SMOOTHED` samples; `spread` is the
    standard deviation.
    """

    mean: float
    spread: float
    count: int


@dataclass(frozen=True, slots=True)
class PersistedLengths:
    """(key, mean, spread, count), least recently used first."""

    prompts: tuple[tuple[str, float, float, int], ...] = ()
    tasks: tuple[tuple[str, float, float, int], ...] = ()


def prompt_key(prompt: Prompt) -> str:
    """The same in every pass over the data."""
    return record_hash(prompt.task.encode() + b"\0" + prompt.tokens.tobytes())


def with_sample(expected: ExpectedLength | None, tokens: int) -> ExpectedLength:
    """A sample weighs at least 1 / `SAMPLES_SMOOTHED`."""
    if expected is None:
        return ExpectedLength(float(tokens), 0.0, 1)
    count = min(expected.count + 1, SAMPLES_SMOOTHED)
    off = tokens - expected.mean
    mean = expected.mean + off / count
    variance = expected.spread**2 + (off * (tokens - mean) - expected.spread**2) / count
    return ExpectedLength(mean, math.sqrt(max(0.0, variance)), count)


class LengthHistory:
    """Lengths by prompt and by task, both bounded in number."""

    def __init__(self, stored: PersistedLengths | None = None) -> None:
        stored = stored or PersistedLengths()
        self._prompts = OrderedDict(
            (key, ExpectedLength(m, s, n)) for key, m, s, n in stored.prompts
        )
        self._tasks = OrderedDict((key, ExpectedLength(m, s, n)) for key, m, s, n in stored.tasks)
        self.changed = False  # since the last call of `known`

    def note(self, prompt: Prompt, tokens: int) -> None:
        _add_sample(self._prompts, prompt_key(prompt), tokens, PROMPTS_MAX)
        _add_sample(self._tasks, prompt.task, tokens, TASKS_MAX)
        self.changed = True

    def of_prompt(self, prompt: Prompt) -> ExpectedLength | None:
        return self._prompts.get(prompt_key(prompt))

    def expected(self, prompt: Prompt, finished: Sequence[int] = ()) -> ExpectedLength | None:
        """Returns the estimate for one more sample, None without any history; `finished` are the
        lengths of its group's finished samples.
        """
        by_prompt = self.of_prompt(prompt)
        # It has samples of an earlier pass: more than `finished`, or as many as it counts.
        if by_prompt is not None and by_prompt.count > min(len(finished), SAMPLES_SMOOTHED - 1):
            return by_prompt
        if finished:
            # Seer's estimate is the longest of them.
            return ExpectedLength(float(max(finished)), 0.0, len(finished))
        return self._tasks.get(prompt.task)

    def mean(self, prompt: Prompt, finished: Sequence[int] = ()) -> float:
        expected = self.expected(prompt, finished)
        return 0.0 if expected is None else expected.mean

    def known(self) -> PersistedLengths:
        """Returns the history as plain values; clears `changed`."""
        self.changed = False
        return PersistedLengths(_as_tuples(self._prompts), _as_tuples(self._tasks))


def _add_sample(by: "OrderedDict[str, ExpectedLength]", key: str, tokens: int, limit: int) -> None:
    by[key] = with_sample(by.get(key), tokens)
    by.move_to_end(key)
    if len(by) > limit:
        by.popitem(last=False)


def _as_tuples(by: "OrderedDict[str, ExpectedLength]") -> tuple[tuple[str, float, float, int], ...]:
    return tuple((key, round(k.mean, 1), round(k.spread, 1), k.count) for key, k in by.items())
