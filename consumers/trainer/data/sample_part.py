"""One trajectory in the form that the loss uses.

Only generated tokens have log-probabilities, spans and loss; `mask` marks those that are trained.
Prompt and environment tokens are context. `sample_of` returns consistent samples only, so code that
receives a `Sample` does not check it again.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.errors import DecodeError
from rollstream.streams.values import Floats, Sources, Span, Tokens
from rollstream.streams.records import Trajectory

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """`tokens` and `sources` have one entry per token of the trajectory; `logprobs` (under μ, the
    behaviour policy, at `temperature`) and `mask` (True = trained) one per generated token. `spans`
    tile the generated tokens.
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

    def __len__(self) -> int:
        return len(self.tokens)


def sample_of(record: Trajectory, advantage: float, reward: float | None = None) -> Sample:
    """The sample of a finished trajectory, with all its generated tokens trained.

    `reward` (from annotations) replaces the record's own. Raises `DecodeError` for a record that no
    model can train (`streams/admissible.py`).
    """
    refused = refusal(record, TrainingBounds())
    if refused is not None:
        raise DecodeError(f"trajectory {record.trajectory} cannot be trained: {refused.detail}")
    return admitted_sample(record, advantage, reward)


def admitted_sample(record: Trajectory, advantage: float, reward: float | None = None) -> Sample:
    """As `sample_of`, for a record that `refusal` has already accepted."""
    worth = record.reward if reward is None else reward
    return Sample(
        record.trajectory,
        record.group,
        record.tokens,
        record.sources,
        record.logprobs,
        record.spans,
        float("nan") if worth is None else worth,
        advantage,
        record.temperature,
        np.ones(len(record.logprobs), np.bool_),
        record.task,
    )
