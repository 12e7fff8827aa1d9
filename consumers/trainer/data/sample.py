"""Rewards of completions from their annotations, or the reason why a reward is missing.

Pure: live training and replay call the same function, so equal annotations give equal rewards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollstream.streams.records import Annotation, Trajectory

if TYPE_CHECKING:
    from rollstream.consumers.settings import TrainerSettings

REWARD = "reward"
"""The annotation that supplies a record's own reward where its rollout gave none."""

AnnotationsByKey = Mapping[tuple[str, str], Annotation]
"""(trajectory, name) → the first annotation of that name."""


@dataclass(frozen=True, slots=True)
class AnnotatedRewards:
    """For each live trajectory either its reward or the reason why there is none."""

    rewards: dict[str, float] = field(default_factory=dict[str, float])
    lacking: dict[str, str] = field(default_factory=dict[str, str])


def names_needed(settings: "TrainerSettings") -> tuple[str, ...]:
    """The annotations that a sample must have before it is trained."""
    return tuple(sorted({*settings.annotations, *settings.reward_terms}))


def is_annotated(record: Trajectory, names: Iterable[str], noted: Iterable[tuple[str, str]]) -> bool:
    """Whether each of these annotations has arrived (a value, or the reason why there is none); a
    dead trajectory needs none.
    """
    return record.finish == "dead" or all(
        (record.trajectory, name) in noted or (name == REWARD and record.reward is not None)
        for name in names
    )


def annotated_rewards(
    records: Iterable[Trajectory], noted: AnnotationsByKey, names: Iterable[str], terms: Mapping[str, float]
) -> AnnotatedRewards:
    """The weighted sum of `terms` for each live trajectory that has all `names`."""
    found, needed = AnnotatedRewards(), tuple(names)
    for record in records:
        if record.finish == "dead":
            continue
        values = {name: _value(record, name, noted) for name in needed}
        reasons = [value for value in values.values() if isinstance(value, str)]
        if reasons:
            found.lacking[record.trajectory] = "; ".join(reasons)
            continue
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        reward = sum(weight * numbers[name] for name, weight in sorted(terms.items()))
        found.rewards[record.trajectory] = float(reward)
    return found


def _value(record: Trajectory, name: str, noted: AnnotationsByKey) -> float | str:
    """The annotation's value, or the reason why there is none."""
    note = noted.get((record.trajectory, name))
    if note is not None and not note.reason:
        return float(note.values[0])
    if name == REWARD and record.reward is not None:
        return record.reward
    return f"no annotation {name!r}" if note is None else f"{name}: {note.reason}"
