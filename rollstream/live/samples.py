"""The last trajectories and the last takes: what histograms and shares of a moment are made of."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollstream.live.drafts import Guesses, guesses_of
from rollstream.live.groups import OWN
from streams.records import Annotation, Take, Trajectory

SAMPLES_KEPT = 2048  # ten steps of the quickstart; a record's summary takes about 0.5 KB here


@dataclass(frozen=True, slots=True)
class Finished:
    """What is kept of a trajectory; `spans` are (version number, generated tokens)."""

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
    guesses: Guesses | None = None
    """None where nothing was drafted."""


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """Of the last groups that are all here: how many, and in how many all rewards were equal."""

    groups: int
    equal: int
    reward_mean: float


@dataclass(slots=True)
class Samples:
    """First completions by trajectory, bounded; the oldest go first."""

    terms: Mapping[str, float] = field(default_factory=lambda: {OWN: 1.0})
    """What a reward is the weighted sum of: annotations, `reward` perhaps the sample's own."""
    finished: OrderedDict[str, Finished] = field(default_factory=OrderedDict[str, Finished])
    taken: deque[tuple[str, int]] = field(
        default_factory=lambda: deque[tuple[str, int]](maxlen=SAMPLES_KEPT)
    )
    """Trajectory and the version that it was trained from."""
    _noted: OrderedDict[tuple[str, str], float] = field(
        default_factory=OrderedDict[tuple[str, str], float]
    )

    def finish(self, record: Trajectory) -> bool:
        """Whether it is the first completion of this trajectory among those kept."""
        if record.trajectory in self.finished:
            return False
        self.finished[record.trajectory] = Finished(
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
            guesses_of(record),
        )
        if len(self.finished) > SAMPLES_KEPT:
            self.finished.popitem(last=False)
        return True

    def note(self, record: Annotation) -> None:
        """A part of a reward that came late; the first one counts."""
        if record.name not in self.terms or not len(record.values):
            return
        self._noted.setdefault((record.trajectory, record.name), float(record.values[0]))
        if len(self._noted) > SAMPLES_KEPT * len(self.terms):
            self._noted.popitem(last=False)

    def take(self, record: Take) -> None:
        """A take of step n trains from version n − 1."""
        self.taken.extend((member.trajectory, record.step - 1) for member in record.members)

    def lag_at_finish(self) -> dict[int, int]:
        """Generated tokens by the steps between their version and the trainer's then."""
        return _histogram((one, one.trainer_version) for one in self.finished.values())

    def lag_when_trained(self) -> dict[int, int]:
        """Generated tokens by lag when they were taken; those above `max_lag` were masked."""
        known = ((self.finished.get(name), version) for name, version in self.taken)
        return _histogram((one, version) for one, version in known if one is not None)

    def finishes(self) -> Mapping[str, int]:
        """`stop`, `length`, `dead` → trajectories."""
        return Counter(one.finish for one in self.finished.values())

    def reasons(self) -> list[tuple[str, int]]:
        """Why trajectories died, the commonest first."""
        dead = (one.reason for one in self.finished.values() if one.finish == "dead")
        return Counter(dead).most_common()

    def foreseen(self) -> list[tuple[int, int]]:
        """Expected and real length of those whose order said what to expect."""
        return [
            (one.predicted, sum(tokens for _, tokens in one.spans))
            for one in self.finished.values()
            if one.predicted and one.finish != "dead"
        ]

    def drafts(self, epochs: Mapping[int, int]) -> dict[tuple[int | None, str], Guesses]:
        """Of those that were drafted, by pass over the prompts (from 1) and task; `epochs` knows
        the passes of groups from 0.
        """
        found: dict[tuple[int | None, str], Guesses] = {}
        for one in self.finished.values():
            if one.guesses is not None:
                epoch = epochs.get(one.group)
                key = (None if epoch is None else epoch + 1, one.task)
                found[key] = found.get(key, Guesses()) + one.guesses
        return found

    def per_s(self, window_s: float, now_s: float) -> tuple[float, float]:
        """Trajectories finished per second and their generated tokens, within the last `window_s`
        seconds, or since the first of those kept if that is later.
        """
        kept = self.finished.values()
        recent = [one for one in kept if one.finished_s >= now_s - window_s]
        if not recent:
            return 0.0, 0.0
        seconds = max(1.0, min(window_s, now_s - min(one.finished_s for one in kept)))
        tokens = sum(length for one in recent for _, length in one.spans)
        return len(recent) / seconds, tokens / seconds

    def tasks(self, samples: int) -> dict[str, TaskFigures]:
        """By task, over groups of which all `samples` completions are kept; dead ones and
        unscored ones are left out, and groups of fewer than two rewards with them.
        """
        groups: dict[int, list[Finished]] = {}
        for one in self.finished.values():
            groups.setdefault(one.group, []).append(one)
        found: dict[str, list[list[float]]] = {}
        for members in groups.values():
            rewards = [r for r in map(self._reward, members) if r is not None]
            if len(members) >= samples and len(rewards) > 1:
                found.setdefault(members[0].task, []).append(rewards)
        return {task: _figures(rewards) for task, rewards in sorted(found.items())}

    def _reward(self, one: Finished) -> float | None:
        if one.finish == "dead":
            return None
        total = 0.0
        for name, weight in self.terms.items():
            is_own = name == OWN and one.reward is not None
            value = one.reward if is_own else self._noted.get((one.trajectory, name))
            if value is None:
                return None
            total += weight * value
        return total


def _figures(groups: list[list[float]]) -> TaskFigures:
    equal = sum(min(rewards) == max(rewards) for rewards in groups)
    everything = [reward for rewards in groups for reward in rewards]
    return TaskFigures(len(groups), equal, sum(everything) / len(everything))


def _histogram(samples: Iterable[tuple[Finished, int]]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for one, version in samples:
        for number, tokens in one.spans:
            counts[max(0, version - number)] += tokens
    return dict(sorted(counts.items()))
