"""The last trajectories and takes of a run in bounded memory, and figures from them,
without I/O.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import add, attrgetter
from typing import Literal

import numpy as np

from rollstream.look.monitor.groups import OWN_REWARD
from rollstream.streams.branches import abandoned_tokens
from rollstream.streams.records import Annotation, Superseded, Take, Trajectory
from rollstream.streams.values import accepted_tokens


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """`tokens` tokens in `steps` forward passes; a pass over several trajectories counts once for
    each. `asked` look-ups for a draft took `lookup_s` seconds, and `found` of them returned one.
    The drafts held `guessed` tokens, of which the model accepted `right`.
    """

    tokens: int = 0
    steps: int = 0
    guessed: int = 0
    right: int = 0
    asked: int = 0
    found: int = 0
    lookup_s: float = 0.0

    def __add__(self, other: "DraftTotals") -> "DraftTotals":
        return DraftTotals(*map(add, _totals(self), _totals(other)))

    @property
    def acceptance(self) -> float | None:
        """None without draft tokens."""
        return self.right / self.guessed if self.guessed else None

    @property
    def per_step(self) -> float:
        """Returns tokens that a trajectory gains in a forward pass; 1 without drafts."""
        return self.tokens / max(1, self.steps)

    @property
    def hit_rate(self) -> float | None:
        """None without look-ups."""
        return self.found / self.asked if self.asked else None

    @property
    def wrong_per_token(self) -> float:
        """Returns rejected draft tokens per generated token."""
        return (self.guessed - self.right) / max(1, self.tokens)

    @property
    def lookup_us(self) -> float | None:
        return 1e6 * self.lookup_s / self.asked if self.asked else None


# `dataclasses.astuple` copies each total deeply, which took most of a snapshot.
_totals = attrgetter(*(part.name for part in fields(DraftTotals)))


@dataclass(frozen=True, slots=True)
class PassDrafts:
    """The pass drafts of one task in one pass over the prompts: `number` from 1; None
    if unknown.
    """

    number: int | None
    task: str
    guesses: DraftTotals


def draft_totals_of(record: Trajectory) -> DraftTotals | None:
    if record.drafts is None:
        return None
    stats, tokens = record.drafts, len(record.logprobs)
    accepted = accepted_tokens(stats)
    return DraftTotals(
        tokens, stats.steps, stats.guessed, accepted, stats.asked, stats.found, stats.lookup_s
    )


def passes_newest_first(
    totals: Mapping[tuple[int | None, str], DraftTotals],
) -> tuple[PassDrafts, ...]:
    """Unknown passes last, and tasks by name within a pass."""
    ordered = sorted(totals, key=lambda key: (-(key[0] or 0), key[1]))
    return tuple(PassDrafts(number, task, totals[number, task]) for number, task in ordered)


# Ten steps of the quickstart, at about 0.5 KB each.
SAMPLES_KEPT = 2048


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """What the monitor needs of a completion. `spans` are (version number, generated tokens),
    `kept` the same without abandoned turns; `trainer_version` is the newest version known when the
    trajectory finished; `predicted` is the expected number of generated tokens, 0 if unknown.
    """

    trajectory: str
    group: int
    task: str
    finish: Literal["stop", "length", "dead"]
    reason: str
    reward: float | None
    trainer_version: int
    spans: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    finished_s: float
    predicted: int = 0
    guesses: DraftTotals | None = None


@dataclass(frozen=True, slots=True)
class TaskRewards:
    """Sums up rewards over the last complete `groups`; in `equal` of them all rewards
    were equal.
    """

    groups: int
    equal: int
    reward_mean: float


@dataclass(slots=True)
class RecentSamples:
    """The first completion of each of the last `SAMPLES_KEPT` trajectories, and as many
    taken ones.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: {OWN_REWARD: 1.0})
    """The weight of each annotation in the reward (`trainer.reward_terms`). The one named `reward`
    may be in the trajectory's record instead.
    """
    finished: OrderedDict[str, FinishedSample] = field(
        default_factory=OrderedDict[str, FinishedSample]
    )
    taken: deque[tuple[str, tuple[int, int, int]]] = field(
        default_factory=lambda: deque[tuple[str, tuple[int, int, int]]](maxlen=SAMPLES_KEPT)
    )
    """With step, update and micro-batch of the take."""
    _annotated: OrderedDict[tuple[str, str], float] = field(
        default_factory=OrderedDict[tuple[str, str], float]
    )
    """The first value by (trajectory, name)."""

    def finish(self, record: Trajectory) -> bool:
        """False if a completion of this trajectory is already kept."""
        if record.trajectory in self.finished:
            return False
        spans = tuple((span.version.number, span.end - span.start) for span in record.spans)
        self.finished[record.trajectory] = FinishedSample(
            record.trajectory,
            record.group,
            record.task,
            record.finish,
            record.reason,
            record.reward,
            record.trainer_version.number,
            spans,
            _kept(record) if record.abandoned else spans,
            record.finished_s,
            record.predicted,
            draft_totals_of(record),
        )
        if len(self.finished) > SAMPLES_KEPT:
            self.finished.popitem(last=False)
        return True

    def annotate(self, record: Annotation) -> None:
        # Only annotations that the reward needs (`terms`); the first of a trajectory and name
        # counts.
        if record.name not in self.terms or not len(record.values):
            return
        self._annotated.setdefault((record.trajectory, record.name), float(record.values[0]))
        if len(self._annotated) > SAMPLES_KEPT * len(self.terms):
            self._annotated.popitem(last=False)

    def take(self, record: Take) -> None:
        place = record.step, record.update, record.micro_batch
        self.taken.extend((member.trajectory, place) for member in record.members)

    def supersede(self, record: Superseded) -> None:
        voids = {(record.step, record.update, number) for number in record.micro_batches}
        if voids.intersection(place for _, place in self.taken):
            kept = [entry for entry in self.taken if entry[1] not in voids]
            self.taken.clear()
            self.taken.extend(kept)

    def lag_at_finish(self) -> dict[int, int]:
        """Returns the lag in steps, when the trajectory finished."""
        samples = self.finished.values()
        return _histogram((sample.spans, sample.trainer_version) for sample in samples)

    def lag_when_trained(self) -> dict[int, int]:
        """Returns the tokens by lag when a take named their trajectory, without tokens of abandoned
        turns; tokens above `max_lag` were masked.
        """
        # A take of step n trains from version n − 1.
        samples = ((self.finished.get(name), step - 1) for name, (step, _, _) in self.taken)
        return _histogram((sample.kept, version) for sample, version in samples if sample)

    def finishes(self, last: int) -> Mapping[str, int]:
        return Counter(sample.finish for sample in self._newest(last))

    def reasons(self, last: int) -> list[tuple[str, int]]:
        """Returns the reasons of dead ones of the `last` trajectories, the most frequent first."""
        dead = (sample.reason for sample in self._newest(last) if sample.finish == "dead")
        return Counter(dead).most_common()

    def dead_tasks(self, last: int) -> list[tuple[str, int]]:
        """Returns the tasks of dead ones; none in a run of one task."""
        newest = list(self._newest(last))
        if len({sample.task for sample in newest}) < 2:
            return []
        return Counter(sample.task for sample in newest if sample.finish == "dead").most_common()

    def _newest(self, last: int) -> Iterable[FinishedSample]:
        return islice(reversed(self.finished.values()), last)

    def predicted_lengths(self) -> list[tuple[int, int]]:
        """(predicted, generated), where there is a prediction."""
        return [
            (sample.predicted, sum(tokens for _, tokens in sample.spans))
            for sample in self.finished.values()
            if sample.predicted and sample.finish != "dead"
        ]

    def drafts(self, epochs: Mapping[int, int]) -> dict[tuple[int | None, str], DraftTotals]:
        """Returns the drafts by (pass over the prompts from 1, task). `epochs` maps a group to its
        pass from 0; an unknown pass is None.
        """
        totals: dict[tuple[int | None, str], DraftTotals] = {}
        for sample in self.finished.values():
            if sample.guesses is not None:
                epoch = epochs.get(sample.group)
                key = (None if epoch is None else epoch + 1, sample.task)
                totals[key] = totals.get(key, DraftTotals()) + sample.guesses
        return totals

    def per_s(self, window_s: float, now_s: float) -> tuple[float, float]:
        """Returns finished trajectories and their generated tokens, over the last `window_s`
        seconds.
        """
        samples = self.finished.values()
        recent = [sample for sample in samples if sample.finished_s >= now_s - window_s]
        if not recent:
            return 0.0, 0.0
        # Since the first kept trajectory if that is later than the window's begin.
        seconds = max(1.0, min(window_s, now_s - min(sample.finished_s for sample in samples)))
        tokens = sum(length for sample in recent for _, length in sample.spans)
        return len(recent) / seconds, tokens / seconds

    def tasks(self, samples: int) -> dict[str, TaskRewards]:
        """Returns the tasks over groups of which all `samples` completions are kept. Dead and
        unscored trajectories are left out, and so are groups with fewer than two rewards.
        """
        groups: dict[int, list[FinishedSample]] = {}
        for sample in self.finished.values():
            groups.setdefault(sample.group, []).append(sample)
        by_task: dict[str, list[list[float]]] = {}
        for members in groups.values():
            rewards = [r for r in map(self._reward, members) if r is not None]
            if len(members) >= samples and len(rewards) > 1:
                by_task.setdefault(members[0].task, []).append(rewards)
        return {task: _task_rewards(rewards) for task, rewards in sorted(by_task.items())}

    def _reward(self, sample: FinishedSample) -> float | None:
        if sample.finish == "dead":
            return None
        total = 0.0
        for name, weight in self.terms.items():
            # As the trainer computes it: an annotation counts before the record's own reward.
            value = self._annotated.get((sample.trajectory, name))
            if value is None and name == OWN_REWARD:
                value = sample.reward
            if value is None:
                return None
            total += weight * value
        return total


def _task_rewards(groups: list[list[float]]) -> TaskRewards:
    equal = sum(min(rewards) == max(rewards) for rewards in groups)
    everything = [reward for rewards in groups for reward in rewards]
    return TaskRewards(len(groups), equal, sum(everything) / len(everything))


def _histogram(samples: Iterable[tuple[Sequence[tuple[int, int]], int]]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for spans, version in samples:
        for number, tokens in spans:
            counts[max(0, version - number)] += tokens
    return dict(sorted(counts.items()))


def _kept(record: Trajectory) -> tuple[tuple[int, int], ...]:
    left = abandoned_tokens(record.turns, record.abandoned)
    return tuple(
        (span.version.number, int(np.count_nonzero(~left[span.start : span.end])))
        for span in record.spans
    )
