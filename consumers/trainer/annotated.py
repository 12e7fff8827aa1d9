"""What annotations make of completions: the reward of each, and whose is missing and why.

Pure: live training and replay call the same function, so equal annotations give equal rewards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streams.records import Annotation, Trajectory

if TYPE_CHECKING:
    from consumers.settings import TrainerSettings

REWARD = "reward"
"""The annotation that stands for a record's own reward where its rollout gave none."""

Notes = Mapping[tuple[str, str], Annotation]
"""(trajectory, name) → the first annotation."""


@dataclass(frozen=True, slots=True)
class Scored:
    """By trajectory, for the living: the reward, or why there is none."""

    rewards: dict[str, float] = field(default_factory=dict[str, float])
    lacking: dict[str, str] = field(default_factory=dict[str, str])


def names_needed(settings: "TrainerSettings") -> tuple[str, ...]:
    """What a sample must have before it is trained."""
    return tuple(sorted({*settings.annotations, *settings.reward_terms}))


def is_noted(record: Trajectory, names: Iterable[str], noted: Iterable[tuple[str, str]]) -> bool:
    """Whether each of these is known, or known never to come; nothing is asked of the dead."""
    return record.finish == "dead" or all(
        (record.trajectory, name) in noted or (name == REWARD and record.reward is not None)
        for name in names
    )


def scored(
    records: Iterable[Trajectory], noted: Notes, names: Iterable[str], terms: Mapping[str, float]
) -> Scored:
    """The sum of `terms`, each annotation times its weight, for who has all `names`."""
    found, needed = Scored(), tuple(names)
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


def _value(record: Trajectory, name: str, noted: Notes) -> float | str:
    """The value, or why there is none."""
    note = noted.get((record.trajectory, name))
    if note is not None and not note.reason:
        return float(note.values[0])
    if name == REWARD and record.reward is not None:
        return record.reward
    return f"no annotation {name!r}" if note is None else f"{name}: {note.reason}"
