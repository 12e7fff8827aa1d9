"""Whether a partial can be part of a trajectory's chain: a pure rule, the same for dispatch, which
orders resumes from the chain, and for the rollout that resumes (invariants 3 and 12).
"""

import numpy as np

from rollstream.streams.records import ENVIRONMENT, GENERATED, Partial
from rollstream.streams.values import Drafts, Version

NUMBER_MAX = 1 << 53
"""Largest count or number accepted from another program: exact in JSON everywhere, and a sum of a
few of them stays within 64 bits.
"""


def is_count(value: int) -> bool:
    return 0 <= value <= NUMBER_MAX


def is_version(version: Version) -> bool:
    """Whether the numbers of a version are within bounds; not whether it was ever published."""
    return is_count(version.number) and is_count(version.term)


def malformed_partial(link: Partial) -> str:
    """Why the partial cannot be part of a chain, or "". Its spans must tile the tokens that it
    generated, under versions within bounds; each token is generated or the environment's;
    log-probabilities are finite.
    """
    if not (is_count(link.start) and is_count(link.attempt)):
        return "its start or its attempt is out of bounds"
    if link.drafts is not None and not all(map(is_count, _counts(link.drafts))):
        return "a count of its drafts is out of bounds"
    if len(link.sources) not in (0, len(link.tokens)):
        return f"{len(link.sources)} sources for {len(link.tokens)} tokens"
    if len(link.sources) and not np.isin(link.sources, (GENERATED, ENVIRONMENT)).all():
        return "a source that is neither generated nor the environment's"
    generated = int((link.sources == GENERATED).sum()) if len(link.sources) else len(link.tokens)
    if generated != len(link.logprobs):
        return f"{len(link.logprobs)} log-probabilities for {generated} generated tokens"
    if not np.isfinite(link.logprobs).all():
        return "a log-probability that is not finite"
    return _spans_problem(link, generated)


def _counts(drafts: Drafts) -> tuple[int, ...]:
    return (*drafts.runs, drafts.steps, drafts.guessed, drafts.asked, drafts.found)


def _spans_problem(link: Partial, generated: int) -> str:
    at = link.spans[0].start if link.spans else 0
    if not is_count(at) or (generated and not link.spans):
        return "no spans, or one that starts out of bounds"
    first = at
    for span in link.spans:
        if span.start != at or span.end <= span.start or not is_version(span.version):
            return f"span [{span.start}, {span.end}) where one from {at} on comes next"
        at = span.end
    return "" if at - first == generated else f"spans of {at - first} for {generated} tokens"
