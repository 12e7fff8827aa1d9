"""The lag of a sample's tokens, and the masks that bound it (invariant 5)."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.trainer.data.sample import Sample
from rollstream.streams import admissible
from rollstream.streams.values import Span


def lag_of(span: Span, version: int) -> int:
    # A run that continued as a fork from an older checkpoint has spans of later versions: lag 0.
    return max(0, version - span.version.number)


def lags_of(sample: Sample, version: int) -> NDArray[np.int64]:
    lags = np.empty(len(sample.logprobs), np.int64)
    for span in sample.spans:
        lags[span.start : span.end] = lag_of(span, version)
    return lags


def mask_by_lag(
    sample: Sample,
    version: int,
    max_lag: int | None,
    believed: admissible.BelievedVersions | None = None,
) -> Sample:
    """Masks, in a sample trained from `version`, tokens above `max_lag` (None: no bound) and those
    of a version that is not `believed` (None: all are), whose weights are unknown
    (docs/reference/invariants.md, Versions that were replaced).
    """
    mask = sample.mask.copy()
    for span in sample.spans:
        is_above = max_lag is not None and lag_of(span, version) > max_lag
        if is_above or (believed is not None and not believed.is_believed(span.version)):
            mask[span.start : span.end] = False
    return replace(sample, mask=mask)


def is_dropped(
    sample: Sample,
    version: int,
    max_lag: int | None,
    believed: admissible.BelievedVersions | None = None,
) -> bool:
    """`keep_version` drops the sample: the other policies would mask a token of it."""
    return not np.array_equal(mask_by_lag(sample, version, max_lag, believed).mask, sample.mask)


def lag_counts(sample: Sample, version: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for span in sample.spans:
        lag = lag_of(span, version)
        trained = int(np.count_nonzero(sample.mask[span.start : span.end]))
        counts[lag] = counts.get(lag, 0) + trained
    return counts
