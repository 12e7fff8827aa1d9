"""Lag: how many versions the trainer is ahead of the one that emitted a token, counted token by
token. Pure.

Invariant 5: nothing above `max_lag` is trained on. Policies that change versions within a
trajectory mask such tokens, `keep_version` drops the whole trajectory, which has one version
anyway.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from consumers.trainer.sample import Sample


def lags_of(sample: Sample, version: int) -> NDArray[np.int64]:
    """Per generated token: `version` minus the version of its span; `version` is the one being
    trained from.
    """
    lags = np.empty(len(sample.logprobs), np.int64)
    for span in sample.spans:
        lags[span.start : span.end] = version - span.version.number
    return lags


def mask_by_lag(sample: Sample, version: int, max_lag: int | None) -> Sample:
    """The sample with tokens above `max_lag` not trained; tokens masked before stay so. None bounds
    nothing.
    """
    if max_lag is None:
        return sample
    return replace(sample, mask=sample.mask & (lags_of(sample, version) <= max_lag))


def is_dropped(sample: Sample, version: int, max_lag: int | None) -> bool:
    """Whether `keep_version` drops it: any token above `max_lag`."""
    return max_lag is not None and bool((lags_of(sample, version) > max_lag).any())


def lag_counts(sample: Sample, version: int) -> dict[int, int]:
    """Trained tokens of one sample by their lag, span by span."""
    counts: dict[int, int] = {}
    for span in sample.spans:
        lag = version - span.version.number
        trained = int(np.count_nonzero(sample.mask[span.start : span.end]))
        counts[lag] = counts.get(lag, 0) + trained
    return counts


def lag_histogram(samples: Iterable[Sample], version: int) -> dict[int, int]:
    """Trained tokens by their lag, smallest lag first. With the version known at finish it is the
    lag at finish.
    """
    counts: Counter[int] = Counter()
    for sample in samples:
        lags, tokens = np.unique(lags_of(sample, version)[sample.mask], return_counts=True)
        counts.update(dict(zip(lags.tolist(), tokens.tolist(), strict=True)))
    return dict(sorted(counts.items()))
