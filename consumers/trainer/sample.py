"""One trajectory as the loss sees it.

Only generated tokens have log-probabilities, spans and loss; `mask` says which of them are trained.
Prompt and environment tokens are context. What comes out of `sample_of` is consistent: whoever
takes a `Sample` need not check.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streams.errors import DecodeError
from streams.records import GENERATED, Floats, Sources, Span, Tokens, Trajectory

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

    `reward` replaces the record's own (one that came as an annotation). `DecodeError` when the
    parts of the record do not fit each other: spans that do not tile (invariant 3), a generated
    first token (nothing precedes it, so it has no log-probability), lengths that differ, a
    temperature of 0 (greedy tokens have no policy gradient).
    """
    generated = int(np.count_nonzero(record.sources == GENERATED))
    wrong = _inconsistency(record, generated)
    if wrong:
        raise DecodeError(f"trajectory {record.trajectory} cannot be trained: {wrong}")
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
        np.ones(generated, np.bool_),
        record.task,
    )


def _inconsistency(record: Trajectory, generated: int) -> str:
    if len(record.sources) != len(record.tokens):
        return f"{len(record.tokens)} tokens but {len(record.sources)} sources"
    if len(record.logprobs) != generated:
        return f"{generated} generated tokens but {len(record.logprobs)} log-probabilities"
    if not generated:
        return "it has no generated token"
    if not np.isfinite(record.logprobs).all():
        return "a log-probability is not finite"
    if record.sources[0] == GENERATED:
        return "its first token is generated, a prompt of at least one token must precede it"
    edges = [0, *(span.end for span in record.spans)]
    starts = [span.start for span in record.spans]
    if starts != edges[:-1] or edges[-1] != generated:
        return f"its spans do not tile its {generated} generated tokens"
    if not record.temperature > 0:
        return "it was sampled at temperature 0; train with sampling.temperature above 0"
    return ""
