"""A trajectory in the form that the loss uses (`Sample`), and its reward from annotations. Pure,
and shared by live training and replay. Only consistent records become samples: code that receives a
`Sample` does not check it again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.credit import PartRewards, no_parts, part_rewards, scored_reference
from rollstream.errors import DecodeError
from rollstream.streams.admissible import (
    REFERENCE_LOGPROBS,
    TrainingBounds,
    reference_problem,
    refusal,
)
from rollstream.streams.branches import abandoned_tokens, leaves
from rollstream.streams.records import GENERATED, Annotation, Trajectory
from rollstream.streams.token_arrays import NO_ARRAYS, TokenArrays, arrays_of
from rollstream.streams.values import Branch, Floats, Sources, Span, Tokens

if TYPE_CHECKING:
    from rollstream.consumers.settings import TrainerSettings


REWARD = "reward"
"""The annotation of this name counts, else the reward in the record."""

AnnotationsByKey = Mapping[tuple[str, str], Annotation]
"""(trajectory, name) → the first annotation of that name."""


@dataclass(frozen=True, slots=True)
class AnnotatedRewards:
    """Holds by live trajectory the reward or the reason why it has none (`lacking`), the rewards of
    its `parts`, if these count, and scored `reference` log-probabilities of its generated tokens.
    """

    rewards: dict[str, float] = field(default_factory=dict[str, float])
    lacking: dict[str, str] = field(default_factory=dict[str, str])
    parts: dict[str, PartRewards] = field(default_factory=dict[str, PartRewards])
    reference: dict[str, Floats] = field(default_factory=dict[str, Floats])


def names_needed(settings: "TrainerSettings") -> tuple[str, ...]:
    scored = (REFERENCE_LOGPROBS,) if scored_reference(settings) else ()
    return tuple(sorted({*settings.annotations, *settings.reward_terms, *scored}))


def is_annotated(record: Trajectory, names: Iterable[str], keys: Iterable[tuple[str, str]]) -> bool:
    """Whether each of these annotations has arrived (a value, or the reason why there is none); a
    dead trajectory needs none.
    """
    return record.finish == "dead" or all(
        (record.trajectory, name) in keys or (name == REWARD and record.reward is not None)
        for name in names
    )


def annotated_rewards(
    records: Iterable[Trajectory],
    annotations: AnnotationsByKey,
    names: Iterable[str],
    terms: Mapping[str, float],
    by_part: bool = False,
) -> AnnotatedRewards:
    """A live trajectory's reward is the weighted sum of its values in `terms`; one that lacks the
    value of any of `names` gets the reasons instead.

    With `by_part` all values of a term count (`credit.py`), otherwise the first.
    `REFERENCE_LOGPROBS`, if named, must be those of the trajectory's tokens.
    """
    annotated, needed = AnnotatedRewards(), tuple(names)
    for record in records:
        if record.finish == "dead":
            continue
        values = {name: _value(record, name, annotations) for name in needed}
        reasons = [value for value in values.values() if isinstance(value, str)]
        if REFERENCE_LOGPROBS in values and not reasons:
            logprobs = annotations[record.trajectory, REFERENCE_LOGPROBS].values
            wrong = reference_problem(record, logprobs)
            reasons = [f"{REFERENCE_LOGPROBS}: {wrong}"] if wrong else []
            annotated.reference[record.trajectory] = logprobs
        if by_part and not reasons:
            parts = _parts(record, annotations, terms)
            if isinstance(parts, PartRewards):
                annotated.parts[record.trajectory] = parts
                annotated.rewards[record.trajectory] = parts.total
                continue
            reasons = [parts]
        if reasons:
            annotated.lacking[record.trajectory] = "; ".join(reasons)
            continue
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        reward = sum(weight * numbers[name] for name, weight in sorted(terms.items()))
        annotated.rewards[record.trajectory] = float(reward)
    return annotated


def _value(record: Trajectory, name: str, annotations: AnnotationsByKey) -> float | str:
    note = annotations.get((record.trajectory, name))
    if note is not None and not note.reason:
        return float(note.values[0])
    if name == REWARD and record.reward is not None:
        return record.reward
    return f"no annotation {name!r}" if note is None else f"{name}: {note.reason}"


def _parts(
    record: Trajectory, annotations: AnnotationsByKey, terms: Mapping[str, float]
) -> PartRewards | str:
    total = no_parts(len(record.logprobs))
    for name, weight in sorted(terms.items()):
        note = annotations.get((record.trajectory, name))
        # Each term has a value, of its annotation or of the record (checked before).
        values = [record.reward or 0.0] if note is None or note.reason else note.values.tolist()
        parts = part_rewards(record, values)
        if isinstance(parts, str):
            return f"{name}: {parts}"
        total = total.plus(parts, weight)
    return total


Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """`tokens` and `sources` have one entry per token; `logprobs` (under μ, the behaviour policy,
    at `temperature`) and `mask` (True = trained) one per generated token. `spans` tile the
    generated tokens. `reward` is NaN and `group_tokens`, the trained tokens of its group, 0 if
    unknown. `advantage` is that of all tokens, or with `advantages` (one per generated token) that
    of the first.

    Where a critic makes the advantages, `parts` has the rewards of its parts, `turn_ends` the
    index, among the generated tokens, of each turn's last, and `advantage` is 0.
    """

    trajectory: str
    group: int
    tokens: Tokens
    sources: Sources
    logprobs: Floats
    spans: tuple[Span, ...]
    reward: float
    advantage: float
    temperature: float
    mask: Mask
    task: str = ""
    group_tokens: int = 0
    branches: tuple[Branch, ...] = ()
    """Where an episode's tokens branch; each path is one row."""
    advantages: NDArray[np.float64] | None = None
    reference: Floats | None = None
    """Log-probabilities of the generated tokens under the reference, if a scorer gave them."""
    parts: PartRewards | None = None
    turn_ends: NDArray[np.intp] | None = None
    arrays: TokenArrays = NO_ARRAYS
    """The named arrays that the engine wrote beside the tokens."""

    @property
    def trained_tokens(self) -> NDArray[np.int64]:
        """Returns indices among all tokens."""
        return np.flatnonzero(self.sources == GENERATED)[self.mask]

    @property
    def known_advantage(self) -> float | None:
        return self.advantage if self.parts is None else None

    def __len__(self) -> int:
        # The most tokens that a forward pass computes: those of all paths.
        if not self.branches:
            return len(self.tokens)
        return sum(map(len, leaves(len(self.tokens), self.branches)))


def sample_of(record: Trajectory, advantage: float, reward: float | None = None) -> Sample:
    """All generated tokens are trained, except those of abandoned turns. `reward` replaces the
    record's own. Raises `DecodeError` for a record that no model can train
    (`streams/admissible.py`).
    """
    refused = refusal(record, TrainingBounds())
    if refused is not None:
        raise DecodeError(f"trajectory {record.trajectory} cannot be trained: {refused.detail}")
    return admitted_sample(record, advantage, reward)


def admitted_sample(record: Trajectory, advantage: float, reward: float | None = None) -> Sample:
    """Returns the admitted sample as `sample_of`, for a record that `refusal` has accepted."""
    sample_reward = record.reward if reward is None else reward
    trained = np.ones(len(record.logprobs), np.bool_)
    if record.abandoned:
        trained = ~abandoned_tokens(record.turns, record.abandoned)
    return Sample(
        record.trajectory,
        record.group,
        record.tokens,
        record.sources,
        record.logprobs,
        record.spans,
        float("nan") if sample_reward is None else sample_reward,
        advantage,
        record.temperature,
        trained,
        record.task,
        branches=record.branches,
        arrays=arrays_of(record),
    )
