"""Metrics by task, in steps and in evaluations; tasks without gradient are shown."""

import numpy as np

from rollstream.consumers.trainer.data.metrics import StepMetrics
from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.producers.rewards.pool import RewardVerdict
from rollstream.producers.rollout.evaluation import JudgedAnswer, measure
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Span, Version


def completion(task: str, reward: float, name: str) -> Trajectory:
    version = Version(0, 1)
    return Trajectory(
        trajectory=name, group=1, index=0, attempt=1, task=task, rollout="r", rollout_term=1,
        tokens=np.array([1, 2], np.uint32), sources=np.array([0, 1], np.uint8),
        logprobs=np.array([-1.0], np.float32), spans=(Span(0, 1, version),), finish="stop",
        reward=reward, trainer_version=version, started_s=0.0, finished_s=1.0,
    )  # fmt: skip


def take(figures: StepMetrics, task: str, *rewards: float) -> None:
    records = [completion(task, reward, f"{task}{i}") for i, reward in enumerate(rewards)]
    samples = [sample_of(record, 0.0) for record in records]
    figures.add_trained(records, samples, {})
    figures.add_consumed(samples, 0)


def test_steps_have_rewards_by_task():
    figures = StepMetrics()
    take(figures, "sums", 1.0, 0.0)
    take(figures, "words", 0.5, 0.5)
    take(figures, "sums", 1.0, 1.0)
    metrics = figures.metrics()
    assert metrics["reward_mean"] == 4 / 6
    assert metrics["reward_mean/sums"] == 0.75
    assert metrics["reward_mean/words"] == 0.5
    assert figures.counts["groups/sums"] == 2


def test_groups_of_equal_rewards_are_counted_trained_or_filtered():
    figures = StepMetrics()
    take(figures, "words", 0.5, 0.5)
    take(figures, "sums", 1.0, 0.0)
    figures.add_closed("filtered", {}, [completion("words", 1.0, "a")])
    figures.add_closed("expired", {})
    assert figures.counts["equal_rewards"] == figures.counts["equal_rewards/words"] == 2
    assert "equal_rewards/sums" not in figures.counts
    assert figures.counts["filtered/words"] == figures.counts["filtered"] == 1
    assert figures.counts["expired"] == 1


def test_evaluations_have_accuracies_by_task_where_there_are_several():
    answers = [
        JudgedAnswer(RewardVerdict(1.0), 4, "sums"), JudgedAnswer(RewardVerdict(0.0), 4, "sums"),
        JudgedAnswer(RewardVerdict(reason="hung"), 4, "words"),
    ]  # fmt: skip
    line = measure(answers, answers).line(3, 1.0)
    assert line["accuracy_sampled/sums"] == 0.5
    assert line["accuracy_sampled/words"] == 0.0
    alone = measure(answers[:2], answers).line(3, 1.0)
    assert not [name for name in alone if name.endswith(("/sums", "/words"))]
