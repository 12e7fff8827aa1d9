"""The metrics of one trainer step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollstream.consumers.trainer.data.lags import lag_counts, lags_of
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.streams.admissible import LABEL_MAX, REFUSED_ANNOTATIONS
from rollstream.streams.records import GroupClosed, Trajectory

TASKS_MAX = 64
"""Most task labels with metrics of their own: a faulty rollout could create any number."""
OTHER_TASKS = "(others)"
NUMBER_MAX = 1 << 53  # largest version number in a metric: a float holds larger ones inexactly


@dataclass(slots=True)
class StepMetrics:
    """`metrics` and `counts` go into the step's `StepDone`; `<name>/<task>` is that of one task
    label.

    `equal_rewards` counts groups, trained or filtered, whose samples all have the same reward: they
    give no gradient, unless dropped samples had other rewards.
    """

    rewards: list[float] = field(default_factory=list[float])
    rewards_by_task: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    lengths: list[int] = field(default_factory=list[int])
    lag_finish: list[int] = field(default_factory=list[int])
    """Lag of each trained sample's oldest span, by the trainer's version that its rollout knew at
    the end.
    """
    lag_consumed: list[int] = field(default_factory=list[int])
    """Least and largest lag of each sample's tokens when they are trained."""
    tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    lags: Counter[int] = field(default_factory=Counter[int])
    """Trained tokens by their lag at consumption."""
    _tasks: set[str] = field(default_factory=set[str])

    def count_refused_annotations(self, number: int) -> None:
        # 0 adds no key to `counts`.
        if number:
            self.counts[REFUSED_ANNOTATIONS] += number

    def add_trained(
        self, records: Sequence[Trajectory], samples: Sequence[Sample], counts: Mapping[str, int]
    ) -> None:
        """`records` are all its completions, `counts` those of `prepare_group`."""
        self.counts.update(counts)
        self._count("groups", records)
        rewards = [sample.reward for sample in samples]
        if np.ptp(rewards) == 0:
            self._count("equal_rewards", records)
        self.rewards_by_task.setdefault(self._label(samples[0].task), []).extend(rewards)
        self.outcomes["trained"] += 1
        self.counts["trained"] += len(samples)
        for sample in samples:
            self.rewards.append(sample.reward)
            self.lengths.append(len(sample.logprobs))
            self.tokens += int(np.count_nonzero(sample.mask))
        trained = {sample.trajectory for sample in samples}
        for record in records:
            if record.trajectory in trained:
                oldest = min(span.version.number for span in record.spans)
                trainer_version = min(max(record.trainer_version.number, 0), NUMBER_MAX)
                self.lag_finish.append(trainer_version - oldest)

    def add_consumed(self, samples: Sequence[Sample], version: int) -> None:
        for sample in samples:
            self.lags.update(lag_counts(sample, version))
            lags = lags_of(sample, version)[sample.mask]
            self.lag_consumed += [int(lags.min()), int(lags.max())]

    def add_closed(
        self, ending: str, counts: Mapping[str, int], records: Sequence[Trajectory] = ()
    ) -> None:
        """A group that ended untrained as `filtered`, `expired` or `dead`; `records` are the
        completions that had arrived.
        """
        self.counts.update(counts)
        self._count(ending, records)
        if ending == "filtered":
            self._count("equal_rewards", records)
        self.outcomes[ending] += 1

    def add_recorded(self, closed: Iterable[GroupClosed], step: int) -> None:
        """Groups of this step that an earlier trainer closed before it died."""
        for group in closed:
            if group.step == step:
                self.add_closed(group.reason, {})

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name; empty if the step trained no sample."""
        if not self.rewards:
            return {}
        by_task = {
            f"reward_mean/{task}": float(np.mean(rewards))
            for task, rewards in sorted(self.rewards_by_task.items())
        }
        return by_task | {
            "reward_mean": float(np.mean(self.rewards)),
            "accuracy": float(np.mean(np.array(self.rewards) >= 1)),
            "length_median": float(np.median(self.lengths)),
            "length_p99": float(np.quantile(self.lengths, 0.99)),
            "lag_finish_mean": float(np.mean(self.lag_finish)),
            "lag_finish_max": float(np.max(self.lag_finish)),
            "lag_consumed_mean": float(np.mean(self.lag_consumed)),
            "lag_consumed_max": float(np.max(self.lag_consumed)),
            "tokens_trained": float(self.tokens),
        }

    def _count(self, name: str, records: Sequence[Trajectory]) -> None:
        self.counts[name] += 1
        # Without a completion the task is unknown.
        if records:
            self.counts[f"{name}/{self._label(records[0].task)}"] += 1

    def _label(self, task: str) -> str:
        if len(task) > LABEL_MAX or (len(self._tasks) >= TASKS_MAX and task not in self._tasks):
            return OTHER_TASKS
        self._tasks.add(task)
        return task
