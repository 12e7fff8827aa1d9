"""Lag: by how many versions the trainer is ahead of the version that emitted a token. Pure.

Invariant 5: no token above `max_lag` is trained on. Policies that change versions within a
trajectory mask such tokens; `keep_version` drops the whole trajectory, which has a single version.
Tokens of a version that was replaced by another term's are treated in the same way (DESIGN.md,
Weight versions): their weights are unknown. The audit uses the same two functions, `lag_of` and
`Believed.is_believed`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.trainer.data.sample_part import Sample
from rollstream.streams.admissible import BelievedVersions
from rollstream.streams.values import Span


def lag_of(span: Span, version: int) -> int:
    """`version` (the one trained from) minus the span's version; 0 where the span's is later, as in
    a run that continued as a fork from an older checkpoint.
    """
    return max(0, version - span.version.number)


def lags_of(sample: Sample, version: int) -> NDArray[np.int64]:
    """`lag_of` per generated token."""
    lags = np.empty(len(sample.logprobs), np.int64)
    for span in sample.spans:
        lags[span.start : span.end] = lag_of(span, version)
    return lags


def mask_by_lag(
    sample: Sample, version: int, max_lag: int | None, believed: BelievedVersions | None = None
) -> Sample:
    """The sample with tokens masked that are above `max_lag` (None: no bound) or of a version that
    is not `believed`; tokens masked before stay masked.
    """
    mask = sample.mask.copy()
    for span in sample.spans:
        is_above = max_lag is not None and lag_of(span, version) > max_lag
        if is_above or (believed is not None and not believed.is_believed(span.version)):
            mask[span.start : span.end] = False
    return replace(sample, mask=mask)


def is_dropped(
    sample: Sample, version: int, max_lag: int | None, believed: BelievedVersions | None = None
) -> bool:
    """Whether `keep_version` drops the sample: it has a token that the other policies mask."""
    return not mask_by_lag(sample, version, max_lag, believed).mask.all()


def lag_counts(sample: Sample, version: int) -> dict[int, int]:
    """Number of trained tokens of one sample by lag."""
    counts: dict[int, int] = {}
    for span in sample.spans:
        lag = lag_of(span, version)
        trained = int(np.count_nonzero(sample.mask[span.start : span.end]))
        counts[lag] = counts.get(lag, 0) + trained
    return counts


def lag_histogram(samples: Iterable[Sample], version: int) -> dict[int, int]:
    """Number of trained tokens by lag, smallest lag first. With the version known at finish these
    are lags at finish.
    """
    counts: Counter[int] = Counter()
    for sample in samples:
        lags, tokens = np.unique(lags_of(sample, version)[sample.mask], return_counts=True)
        counts.update(dict(zip(lags.tolist(), tokens.tolist(), strict=True)))
    return dict(sorted(counts.items()))
