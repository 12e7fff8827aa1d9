"""A trajectory's chain of partials, read back by the rollout that resumes it.

Each partial names the one that it continues, so the chain of one attempt is read from its newest
partial backwards and partials of other writers that lie between are never mixed in.
"""

from dataclasses import dataclass

import numpy as np

from streams.bus import Bus
from streams.drafted import joined
from streams.errors import DecodeError
from streams.reader import read_at
from streams.records import GENERATED, Address, Drafts, Floats, Partial, Sources, Span, Tokens


@dataclass(frozen=True, slots=True)
class Gained:
    """Everything after the prompt that a chain holds."""

    tokens: Tokens
    sources: Sources
    logprobs: Floats
    spans: tuple[Span, ...]
    environment: str
    drafts: Drafts | None = None


def extend_spans(spans: list[Span], span: Span) -> None:
    """Put one more span behind; neighbours of one version are one span (invariant 4
    counts them).
    """
    if spans and spans[-1].version == span.version and spans[-1].end == span.start:
        spans[-1] = Span(spans[-1].start, span.end, span.version)
    else:
        spans.append(span)


def _sources(link: Partial) -> Sources:
    """A link that says nothing of its tokens' sources generated all of them."""
    silent = not len(link.sources)
    return np.full(len(link.tokens), GENERATED, np.uint8) if silent else link.sources


def read_chain(bus: Bus, newest: Address, trajectory: str) -> Gained:
    """All that was gained up to `newest`; a link that does not fit raises `DecodeError` and names
    it.
    """
    links: list[Partial] = []
    at: Address | None = newest
    while at is not None:
        record = read_at(bus, "partials", at).record
        if not isinstance(record, Partial) or record.trajectory != trajectory:
            raise DecodeError(f"partials {at} is no partial of trajectory {trajectory}")
        if links and record.start + len(record.tokens) != links[-1].start:
            raise DecodeError(f"partials {at} does not end where its successor starts")
        links.append(record)
        at = record.previous
    links.reverse()
    spans: list[Span] = []
    for link in links:
        for span in link.spans:
            extend_spans(spans, span)
    return Gained(
        np.concatenate([link.tokens for link in links]),
        np.concatenate([_sources(link) for link in links]),
        np.concatenate([link.logprobs for link in links]),
        tuple(spans),
        links[-1].environment,
        joined((len(link.logprobs), link.drafts) for link in links),
    )
