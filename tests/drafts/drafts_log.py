"""Records of a small run from which drafts come: prompts `1 2 GROUP`, answers, partials, late
rewards.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollstream.producers.drafts.history import prompt_key
from rollstream.producers.drafts.index import HistoryView, look_up_draft
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.records import GENERATED, PROMPT, Annotation, Partial, Prompt, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling, Span, Version
from rollstream.streams.writer import FencedWriter, publish_all

V = Version(0, 1)


def log_in(folder: Path) -> Bus:
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    bus.create(catalogue())
    return bus


def asked(group: int) -> list[int]:
    return [1, 2, group]


def answer(
    group: int, generated: Sequence[int], name: str = "", reward: float | None = 1.0
) -> Trajectory:
    count = len(generated)
    return Trajectory(
        trajectory=name or f"g{group}-{count}",
        group=group,
        index=0,
        attempt=1,
        task="t",
        rollout="other",
        rollout_term=1,
        tokens=np.array([*asked(group), *generated], np.uint32),
        sources=np.array([PROMPT] * 3 + [GENERATED] * count, np.uint8),
        logprobs=np.zeros(count, np.float32),
        spans=(Span(0, count, V),),
        finish="stop",
        reward=reward,
        trainer_version=V,
        started_s=0.0,
        finished_s=1.0,
    )


def partial(group: int, start: int, gained: Sequence[int], name: str) -> Partial:
    return Partial(
        trajectory=name,
        group=group,
        attempt=1,
        rollout="other",
        rollout_term=1,
        previous=None,
        start=start,
        tokens=np.array(gained, np.uint32),
        sources=np.zeros(0, np.uint8),
        logprobs=np.zeros(len(gained), np.float32),
        spans=(),
    )


def reward(group: int, name: str, values: Sequence[float]) -> Annotation:
    return Annotation(name, group, "reward", np.array(values, np.float32), "scorer")


def append_records(bus: Bus, *records: Trajectory | Partial | Annotation) -> None:
    """Appends each record to its topic, as rollouts and scorers do."""
    topics = {Trajectory: "trajectories", Partial: "partials", Annotation: "annotations"}
    for record in records:
        key = record.trajectory if isinstance(record, Partial) else str(record.group)
        publish_all(bus, topics[type(record)], [(key, record)])


def ask(bus: Bus, groups: int) -> None:
    """The prompts of the first groups."""
    writer = FencedWriter(bus, "prompts", "prompts", 1)
    writer.open()
    for group in range(groups):
        tokens = np.array(asked(group), np.uint32)
        prompt = Prompt(
            group=group, task="t", tokens=tokens, samples=2, sampling=Sampling(), seed=0
        )
        writer.append([(str(group), prompt)])


def key_of(group: int) -> int:
    return prompt_key(np.array(asked(group), np.uint32), np.full(3, PROMPT, np.uint8))


def guessed(view: HistoryView, group: int, newest: Sequence[int]) -> list[int]:
    return list(look_up_draft((view,), key_of(group), newest, 8).tokens)
