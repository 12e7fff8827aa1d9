"""A trajectory's chain of partials, read back by the rollout that resumes it.

Each partial names the one that it continues, so the chain of one attempt is its newest partial and
what that leads to, and partials of other writers that lie between are never mixed in. Anyone can
append a partial, so nothing in one is trusted: only records between the two addresses that dispatch
read itself are looked at, each once and in the order of their partition, and a link that leads
elsewhere, forwards, to nothing, or does not fit ends the chain (invariant 12).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from streams.bus import Bus
from streams.codec import decode
from streams.drafted import joined
from streams.errors import BusTimeout, DecodeError, PositionLost
from streams.links import malformed
from streams.records import GENERATED, Address, Drafts, Floats, Partial, Sources, Span, Tokens

TOPIC = "partials"
LINKS_BYTES_MAX = 64 << 20  # of one trajectory: a million tokens are 9 MiB


@dataclass(frozen=True, slots=True)
class Gained:
    """Everything after the prompt that a chain holds."""

    tokens: Tokens
    sources: Sources
    logprobs: Floats
    spans: tuple[Span, ...]
    environment: str
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """A chain: the trajectory's oldest partial (None where the order does not name it) and the
    newest of the chain. `start` is the length of the prompt, `tokens_max` bounds what can follow.
    """

    trajectory: str
    newest: Address
    first: Address | None = None
    start: int | None = None
    tokens_max: int | None = None


@dataclass(slots=True)
class Links:
    """Partials of one trajectory by offset, up to that of the newest one wanted."""

    upto: int
    by_offset: dict[int, Partial] = field(default_factory=dict[int, Partial])
    bytes: int = 0


def extend_spans(spans: list[Span], span: Span) -> None:
    """Put one more span behind; neighbours of one version are one span (invariant 4
    counts them).
    """
    if spans and spans[-1].version == span.version and spans[-1].end == span.start:
        spans[-1] = Span(spans[-1].start, span.end, span.version)
    else:
        spans.append(span)


def read_chain(bus: Bus, newest: Address, trajectory: str) -> Gained:
    """All that was gained up to `newest`; a link that does not fit raises `DecodeError` and names
    it.
    """
    found = read_chains(bus, [ChainRequest(trajectory, newest)])[trajectory]
    if isinstance(found, DecodeError):
        raise found
    return found


def read_chains(bus: Bus, wanted: Collection[ChainRequest]) -> dict[str, Gained | DecodeError]:
    """By trajectory what its chain holds, or what is wrong with it. Each partition is read forward
    once for all chains in it, so that 64 resumes of one dead rollout cost one pass.
    """
    found: dict[str, Gained | DecodeError] = {}
    for partition in {one.newest.partition for one in wanted}:
        here = [one for one in wanted if one.newest.partition == partition]
        links = _links(bus, partition, here)
        for one in here:
            try:
                found[one.trajectory] = _gained(_chain(one, links[one.trajectory]), one)
            except DecodeError as error:
                found[one.trajectory] = error
    return found


def _links(bus: Bus, partition: int, wanted: Collection[ChainRequest]) -> Mapping[str, Links]:
    """By trajectory its partials between the addresses of its order. Memory holds those, up to
    `LINKS_BYTES_MAX` of one trajectory, and of the others one answer.
    """
    links = {one.trajectory: Links(one.newest.offset) for one in wanted}
    if not 0 <= partition < bus.partitions(TOPIC):
        return links
    begin, end = bus.begin(TOPIC)[partition], bus.end(TOPIC)[partition]
    at = max(begin, min(_first_offset(one) for one in wanted))
    stop = min(end, max(one.newest.offset for one in wanted) + 1)
    while at < stop:
        try:
            messages = bus.read(TOPIC, {partition: at})
        except PositionLost:  # truncated meanwhile
            at = max(at + 1, bus.begin(TOPIC)[partition])
            continue
        if not messages:
            raise BusTimeout(f"{TOPIC}/{partition}: nothing came from {at} on, below {stop}")
        for message in messages:
            at = message.offset + 1
            if message.value is not None and message.key.decode(errors="replace") in links:
                _collect(links, message.offset, message.value)
    return links


def _collect(links: Mapping[str, Links], offset: int, value: bytes) -> None:
    try:
        record = decode(value).record
    except DecodeError:
        return
    if not isinstance(record, Partial) or record.trajectory not in links:
        return
    mine = links[record.trajectory]
    mine.bytes += len(value)
    if offset <= mine.upto and mine.bytes <= LINKS_BYTES_MAX:
        mine.by_offset[offset] = record


def _first_offset(one: ChainRequest) -> int:
    """Where the chain can begin; 0 where the order does not say it."""
    is_known = one.first is not None and one.first.partition == one.newest.partition
    return one.first.offset if one.first is not None and is_known else 0


def _chain(one: ChainRequest, links: Links) -> list[Partial]:
    """From the oldest to the newest link, followed backwards in memory; `DecodeError` where it
    breaks. Offsets fall with each step, so that a cycle ends too.
    """
    chain: list[Partial] = []
    at, above = one.newest, one.newest.offset + 1
    while True:
        link = links.by_offset.get(at.offset) if at.partition == one.newest.partition else None
        if link is None or at.offset >= above:
            raise DecodeError(f"{TOPIC} {at} is no partial of trajectory {one.trajectory}")
        if reason := malformed(link):
            raise DecodeError(f"{TOPIC} {at}: {reason}")
        if chain and link.start + len(link.tokens) != chain[-1].start:
            raise DecodeError(f"{TOPIC} {at} does not end where its successor starts")
        chain.append(link)
        if link.previous is None:
            return chain[::-1]
        at, above = link.previous, at.offset


def _gained(chain: list[Partial], one: ChainRequest) -> Gained:
    if one.start is not None and chain[0].start != one.start:
        raise DecodeError(f"the chain of {one.trajectory} starts at {chain[0].start}")
    generated = sum(len(link.logprobs) for link in chain)
    if one.tokens_max is not None and generated > one.tokens_max:
        raise DecodeError(f"the chain of {one.trajectory} has {generated} tokens, too many")
    spans = _joined_spans(chain)
    return Gained(
        np.concatenate([link.tokens for link in chain]),
        np.concatenate([_sources(link) for link in chain]),
        np.concatenate([link.logprobs for link in chain]),
        spans,
        chain[-1].environment,
        joined((len(link.logprobs), link.drafts) for link in chain),
    )


def _joined_spans(chain: list[Partial]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for link in chain:
        for span in link.spans:
            if span.start != (spans[-1].end if spans else 0):
                raise DecodeError(f"a chain's spans do not tile: {span}")
            extend_spans(spans, span)
    return tuple(spans)


def _sources(link: Partial) -> Sources:
    """A link that says nothing of its tokens' sources generated all of them."""
    silent = not len(link.sources)
    return np.full(len(link.tokens), GENERATED, np.uint8) if silent else link.sources
