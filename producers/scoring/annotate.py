"""Turns records into questions for the reward pool, and verdicts into annotations. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollstream.producers.rewards.pool import RewardVerdict
from rollstream.producers.scoring.functions import TrajectoryFacts
from rollstream.streams.bus import Message
from rollstream.streams.codec import decode
from rollstream.errors import DecodeError
from rollstream.streams.records import PROMPT, Annotation, Trajectory

UNNAMED_SCORE = ""  # name of a function's lone number


@dataclass(frozen=True, slots=True)
class AnnotationPlan:
    """The annotations that scorer `scorer` writes. `by_judge`: values come from the task's judge,
    otherwise from a function.
    """

    names: tuple[str, ...]
    by_judge: bool
    scorer: str


def first_completions(messages: Iterable[Message]) -> dict[str, Trajectory]:
    """The first completion of each trajectory in its partition's order. Dead ones are left out:
    they get no annotation (invariant 2: a failure is a completion too).
    """
    first: dict[str, Trajectory] = {}
    for message in messages:
        try:
            record = decode(message.value).record if message.value is not None else None
        except DecodeError:  # readers with decisions to make dead-letter it (reader.py)
            continue
        if isinstance(record, Trajectory):
            first.setdefault(record.trajectory, record)
    return {name: record for name, record in first.items() if record.finish != "dead"}


def facts_of(record: Trajectory) -> TrajectoryFacts:
    """The facts that a function gets about a living record."""
    assert record.finish != "dead", f"{record.trajectory} is dead"
    prompt = record.tokens[: int(np.count_nonzero(record.sources == PROMPT))]
    return TrajectoryFacts(
        trajectory=record.trajectory,
        group=record.group,
        index=record.index,
        task=record.task,
        finish=record.finish,
        prompt=prompt.tolist(),
        reward=record.reward,
        scores=record.scores or {},
    )


def annotations(record: Trajectory, verdict: RewardVerdict, writes: AnnotationPlan) -> list[Annotation]:
    """One annotation for each name that the scorer writes: its value, or why there will be none."""
    values = dict(verdict.scores)
    if writes.by_judge:
        values["reward"] = verdict.reward
    elif UNNAMED_SCORE in values:
        values[writes.names[0]] = values.pop(UNNAMED_SCORE)
    return [_annotation(record, name, values, verdict, writes.scorer) for name in writes.names]


def _annotation(
    record: Trajectory, name: str, values: dict[str, float], verdict: RewardVerdict, scorer: str
) -> Annotation:
    reason = verdict.reason
    if not reason and name not in values:
        reason = f"not among what was given ({', '.join(sorted(values)) or 'nothing'})"
    found: Sequence[float] = () if reason else (values[name],)
    with np.errstate(over="ignore"):
        array = np.array(found, np.float32)
    if not np.isfinite(array).all():
        array, reason = np.empty(0, np.float32), f"{values[name]:g} is not a 32-bit number"
    return Annotation(record.trajectory, record.group, name, array, scorer, reason)
