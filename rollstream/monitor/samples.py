"""Keeps the last trajectories and takes of a run in bounded memory (`RecentSamples`), and computes
what the live view shows of them: histograms of lag, rewards by task, totals of drafted tokens and
rates. Nothing here does I/O.

`RunState` (`state.py`) passes each record of the log to `finish`, `annotate` or `take`; the other
methods compute a figure from the kept samples. `DraftTotals` also serve the report and `inspect`.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import add, attrgetter
from typing import Literal

from rollstream.monitor.groups import OWN_REWARD
from rollstream.streams.records import Annotation, Take, Trajectory
from rollstream.streams.values import accepted_tokens


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """Sums up speculative decoding over some trajectories. The model generated `tokens` tokens in
    `steps` forward passes; a pass over several trajectories counts once for each. `asked` look-ups
    for a draft took `lookup_s` seconds, and `found` of them returned a draft. The drafts held
    `guessed` tokens, of which the model accepted `right`.
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
        """Returns the accepted share of the draft tokens; None without draft tokens."""
        return self.right / self.guessed if self.guessed else None

    @property
    def per_step(self) -> float:
        """Returns the mean number of tokens that a trajectory gains in a forward pass; 1 without
        drafts.
        """
        return self.tokens / max(1, self.steps)

    @property
    def hit_rate(self) -> float | None:
        """Returns the share of the look-ups that found a draft; None without look-ups."""
        return self.found / self.asked if self.asked else None

    @property
    def wrong_per_token(self) -> float:
        """Returns the cost of drafting: rejected draft tokens per generated token."""
        return (self.guessed - self.right) / max(1, self.tokens)

    @property
    def lookup_us(self) -> float | None:
        """Returns the mean microseconds per look-up; None without look-ups."""
        return 1e6 * self.lookup_s / self.asked if self.asked else None


_totals = attrgetter(*(part.name for part in fields(DraftTotals)))
"""Returns all totals. `dataclasses.astuple` copies each deeply, which took most of a snapshot."""


@dataclass(frozen=True, slots=True)
class PassDrafts:
    """Holds the draft totals of one task in one pass over the prompts. `number` counts the passes
    from 1; it is None where the pass is unknown.
    """

    number: int | None
    task: str
    guesses: DraftTotals


def draft_totals_of(record: Trajectory) -> DraftTotals | None:
    """Returns the draft totals of one trajectory; None if its record has no draft statistics."""
    if record.drafts is None:
        return None
    stats, tokens = record.drafts, len(record.logprobs)
    accepted = accepted_tokens(stats)
    return DraftTotals(
        tokens, stats.steps, stats.guessed, accepted, stats.asked, stats.found, stats.lookup_s
    )


def passes_newest_first(
    found: Mapping[tuple[int | None, str], DraftTotals],
) -> tuple[PassDrafts, ...]:
    """Returns totals, which are given by (pass over the prompts, task), in this order: the newest
    pass first, unknown passes last, and tasks by name within a pass.
    """
    ordered = sorted(found, key=lambda key: (-(key[0] or 0), key[1]))
    return tuple(PassDrafts(number, task, found[number, task]) for number, task in ordered)


SAMPLES_KEPT = 2048  # ten steps of the quickstart, at about 0.5 KB each


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """Holds the fields of a `Trajectory` record (a completion) that the monitor needs. `spans` are
    (version number, generated tokens); `trainer_version` is the number of the newest version known
    when the trajectory finished; `predicted` is the expected number of generated tokens, 0 if
    unknown.
    """

    trajectory: str
    group: int
    task: str
    finish: Literal["stop", "length", "dead"]
    reason: str
    reward: float | None
    trainer_version: int
    spans: tuple[tuple[int, int], ...]
    finished_s: float
    predicted: int = 0
    guesses: DraftTotals | None = None
    """None without drafting."""


@dataclass(frozen=True, slots=True)
class TaskRewards:
    """Sums up the rewards of one task over its last complete groups. `groups` is their number; in
    `equal` of them all rewards were equal; `reward_mean` is the mean over all their samples.
    """

    groups: int
    equal: int
    reward_mean: float


@dataclass(slots=True)
class RecentSamples:
    """Keeps the first completion of each of the last `SAMPLES_KEPT` trajectories, and as many
    trajectories of the last takes.
    """

    terms: Mapping[str, float] = field(default_factory=lambda: {OWN_REWARD: 1.0})
    """The reward is a weighted sum of annotations (`trainer.reward_terms`): the weight of each
    annotation by name. The one named `reward` may be in the trajectory's own record instead.
    """
    finished: OrderedDict[str, FinishedSample] = field(
        default_factory=OrderedDict[str, FinishedSample]
    )
    """The kept completions by trajectory, the oldest first."""
    taken: deque[tuple[str, int]] = field(
        default_factory=lambda: deque[tuple[str, int]](maxlen=SAMPLES_KEPT)
    )
    """Trained trajectories, each with the version that it was trained from."""
    _annotated: OrderedDict[tuple[str, str], float] = field(
        default_factory=OrderedDict[tuple[str, str], float]
    )
    """The first value of each kept annotation, by (trajectory, name)."""

    def finish(self, record: Trajectory) -> bool:
        """Keep a completion; returns False if one of this trajectory is already kept."""
        if record.trajectory in self.finished:
            return False
        self.finished[record.trajectory] = FinishedSample(
            record.trajectory,
            record.group,
            record.task,
            record.finish,
            record.reason,
            record.reward,
            record.trainer_version.number,
            tuple((span.version.number, span.end - span.start) for span in record.spans),
            record.finished_s,
            record.predicted,
            draft_totals_of(record),
        )
        if len(self.finished) > SAMPLES_KEPT:
            self.finished.popitem(last=False)
        return True

    def annotate(self, record: Annotation) -> None:
        """Keep an annotation that the reward needs (one of `terms`). The first annotation of a
        trajectory under a name counts.
        """
        if record.name not in self.terms or not len(record.values):
            return
        self._annotated.setdefault((record.trajectory, record.name), float(record.values[0]))
        if len(self._annotated) > SAMPLES_KEPT * len(self.terms):
            self._annotated.popitem(last=False)

    def take(self, record: Take) -> None:
        """Keep the trajectories of a take; a take of step n trains from version n − 1."""
        self.taken.extend((member.trajectory, record.step - 1) for member in record.members)

    def lag_at_finish(self) -> dict[int, int]:
        """Returns the number of generated tokens by the lag (in steps) that they had when their
        trajectory finished.
        """
        return _histogram((one, one.trainer_version) for one in self.finished.values())

    def lag_when_trained(self) -> dict[int, int]:
        """Returns the number of generated tokens by the lag that they had when a take named their
        trajectory; tokens above `max_lag` were masked.
        """
        known = ((self.finished.get(name), version) for name, version in self.taken)
        return _histogram((one, version) for one, version in known if one is not None)

    def finishes(self, last: int) -> Mapping[str, int]:
        """Counts the `last` trajectories by `stop`, `length` and `dead`."""
        return Counter(one.finish for one in self._newest(last))

    def reasons(self, last: int) -> list[tuple[str, int]]:
        """Counts the reasons of the dead ones of the `last` trajectories, the most frequent
        first.
        """
        dead = (one.reason for one in self._newest(last) if one.finish == "dead")
        return Counter(dead).most_common()

    def dead_tasks(self, last: int) -> list[tuple[str, int]]:
        """Counts the dead ones of the `last` trajectories by task, the most frequent first; none in
        a run of one task.
        """
        newest = list(self._newest(last))
        if len({one.task for one in newest}) < 2:
            return []
        return Counter(one.task for one in newest if one.finish == "dead").most_common()

    def _newest(self, last: int) -> Iterable[FinishedSample]:
        return islice(reversed(self.finished.values()), last)

    def predicted_lengths(self) -> list[tuple[int, int]]:
        """Returns (predicted, generated) lengths of trajectories whose assignment predicted one."""
        return [
            (one.predicted, sum(tokens for _, tokens in one.spans))
            for one in self.finished.values()
            if one.predicted and one.finish != "dead"
        ]

    def drafts(self, epochs: Mapping[int, int]) -> dict[tuple[int | None, str], DraftTotals]:
        """Returns the draft totals by (pass over the prompts from 1, task). `epochs` maps a group
        to its pass from 0; an unknown pass is None.
        """
        found: dict[tuple[int | None, str], DraftTotals] = {}
        for one in self.finished.values():
            if one.guesses is not None:
                epoch = epochs.get(one.group)
                key = (None if epoch is None else epoch + 1, one.task)
                found[key] = found.get(key, DraftTotals()) + one.guesses
        return found

    def per_s(self, window_s: float, now_s: float) -> tuple[float, float]:
        """Returns finished trajectories per second and their generated tokens per second, over the
        last `window_s` seconds, or since the first kept trajectory if that is later.
        """
        kept = self.finished.values()
        recent = [one for one in kept if one.finished_s >= now_s - window_s]
        if not recent:
            return 0.0, 0.0
        seconds = max(1.0, min(window_s, now_s - min(one.finished_s for one in kept)))
        tokens = sum(length for one in recent for _, length in one.spans)
        return len(recent) / seconds, tokens / seconds

    def tasks(self, samples: int) -> dict[str, TaskRewards]:
        """Returns the rewards by task, over groups of which all `samples` completions are kept.
        Dead and unscored trajectories are left out, and so are groups with fewer than two rewards.
        """
        groups: dict[int, list[FinishedSample]] = {}
        for one in self.finished.values():
            groups.setdefault(one.group, []).append(one)
        found: dict[str, list[list[float]]] = {}
        for members in groups.values():
            rewards = [r for r in map(self._reward, members) if r is not None]
            if len(members) >= samples and len(rewards) > 1:
                found.setdefault(members[0].task, []).append(rewards)
        return {task: _task_rewards(rewards) for task, rewards in sorted(found.items())}

    def _reward(self, one: FinishedSample) -> float | None:
        """Returns the reward of a trajectory, as the trainer computes it: an annotation counts
        before the record's own reward. None if it is dead or lacks an annotation.
        """
        if one.finish == "dead":
            return None
        total = 0.0
        for name, weight in self.terms.items():
            value = self._annotated.get((one.trajectory, name))
            if value is None and name == OWN_REWARD:
                value = one.reward
            if value is None:
                return None
            total += weight * value
        return total


def _task_rewards(groups: list[list[float]]) -> TaskRewards:
    equal = sum(min(rewards) == max(rewards) for rewards in groups)
    everything = [reward for rewards in groups for reward in rewards]
    return TaskRewards(len(groups), equal, sum(everything) / len(everything))


def _histogram(samples: Iterable[tuple[FinishedSample, int]]) -> dict[int, int]:
    """Returns the number of generated tokens by lag behind the version given with each sample."""
    counts: Counter[int] = Counter()
    for one, version in samples:
        for number, tokens in one.spans:
            counts[max(0, version - number)] += tokens
    return dict(sorted(counts.items()))
