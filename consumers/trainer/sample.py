"""One trajectory as the loss sees it.

Only generated tokens have log-probabilities, spans and loss; `mask` says which of them are trained.
Prompt and environment tokens are context. What comes out of `sample_of` is consistent: whoever
takes a `Sample` need not check.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streams.admissible import TrainingBounds, refusal
from streams.errors import DecodeError
from streams.records import Floats, Sources, Span, Tokens, Trajectory

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """`tokens` and `sources` are as long as the trajectory; `logprobs` (under μ, the behaviour
    policy, at `temperature`) and `mask` (True = trained) as its generated tokens, which `spans`
    tile.
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
    """The sample of a finished trajectory, all its generated tokens trained.

    `reward` replaces the record's own (one that came as an annotation). `DecodeError` for a record
    that no model can train (`streams/admissible.py`).
    """
    refused = refusal(record, TrainingBounds())
    if refused is not None:
        raise DecodeError(f"trajectory {record.trajectory} cannot be trained: {refused.detail}")
    return admitted_sample(record, advantage, reward)


def admitted_sample(record: Trajectory, advantage: float, reward: float | None = None) -> Sample:
    """As `sample_of`, of a record that `refusal` has accepted."""
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
