"""Reads a trajectory's chain of partials to resume it.

Any process can append to `partials`, so no record is trusted (invariant 12): a wrong link makes the
chain unusable (`DecodeError`).
"""

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from rollstream.errors import BusTimeout, DecodeError, PositionLost
from rollstream.streams.admissible import malformed_partial
from rollstream.streams.bus import Bus
from rollstream.streams.codec import decode
from rollstream.streams.records import GENERATED, Partial
from rollstream.streams.token_arrays import (
    ArrayPiece,
    array_order_problem,
    arrays_of,
    arrays_problem,
)
from rollstream.streams.values import (
    Address,
    Branch,
    Drafts,
    Floats,
    Sources,
    Span,
    Tokens,
    Turn,
    join_drafts,
)

log = logging.getLogger(__name__)
TOPIC = "partials"
LINKS_BYTES_MAX = 64 << 20  # encoded partials of one trajectory; a million tokens are 9 MiB


@dataclass(frozen=True, slots=True)
class ChainContent:
    """The joined content of a chain: everything after the prompt."""

    tokens: Tokens
    sources: Sources
    logprobs: Floats
    spans: tuple[Span, ...]
    environment: str
    drafts: Drafts | None = None
    failures: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    branches: tuple[Branch, ...] = ()
    attempts: tuple[int, ...] = ()
    """The attempt in which each of the turns was answered."""
    arrays: tuple[ArrayPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """`newest` is the address of the last partial, `first` that of the trajectory's oldest, `start`
    the prompt's length in tokens. None: not checked.
    """

    trajectory: str
    newest: Address
    first: Address | None = None
    start: int | None = None
    tokens_max: int | None = None


@dataclass(slots=True)
class PartialLinks:
    """Partials by offset, up to and including `upto`, and their encoded size in `bytes`."""

    upto: int
    by_offset: dict[int, Partial] = field(default_factory=dict[int, Partial])
    bytes: int = 0

    def add(self, offset: int, partial: Partial, size: int) -> None:
        self.bytes += size
        # This bounds the memory: `LINKS_BYTES_MAX` per trajectory, and one read of other records.
        if offset <= self.upto and self.bytes <= LINKS_BYTES_MAX:
            self.by_offset[offset] = partial


def extend_spans(spans: list[Span], span: Span) -> None:
    """Appends a span, joined to the last one if it continues that under the same version: invariant
    4 counts spans.
    """
    if spans and spans[-1].version == span.version and spans[-1].end == span.start:
        spans[-1] = Span(spans[-1].start, span.end, span.version)
    else:
        spans.append(span)


def read_chains(
    bus: Bus, requests: Collection[ChainRequest]
) -> dict[str, ChainContent | DecodeError]:
    """Each partition is read forward once for all its chains: 64 resumes of one dead rollout cost
    one pass.
    """
    contents: dict[str, ChainContent | DecodeError] = {}
    for partition in {request.newest.partition for request in requests}:
        partition_requests = [
            request for request in requests if request.newest.partition == partition
        ]
        links = _read_links(bus, partition, partition_requests)
        for request in partition_requests:
            name = request.trajectory
            try:
                contents[name] = _content_of(_chain(request, links[name]), request)
            except DecodeError as error:
                contents[name] = error
    return contents


def _read_links(
    bus: Bus, partition: int, requests: Collection[ChainRequest]
) -> Mapping[str, PartialLinks]:
    links = {request.trajectory: PartialLinks(request.newest.offset) for request in requests}
    if not 0 <= partition < bus.partitions(TOPIC):
        return links
    begin, end = bus.begin(TOPIC)[partition], bus.end(TOPIC)[partition]
    # Dispatch has read the addresses `first` itself, so reading starts at the lowest of them.
    at = max(begin, min(_first_offset(request) for request in requests))
    stop = min(end, max(request.newest.offset for request in requests) + 1)
    while at < stop:
        try:
            messages = bus.read(TOPIC, {partition: at})
        except PositionLost:  # truncated meanwhile
            at = max(at + 1, bus.begin(TOPIC)[partition])
            continue
        if not messages:
            raise BusTimeout(
                f"{TOPIC}/{partition}: no message from offset {at} on, although the end is {stop}"
            )
        for message in messages:
            at = message.offset + 1
            if message.value is not None and message.key.decode(errors="replace") in links:
                _collect(links, message.offset, message.value)
    return links


def _collect(links: Mapping[str, PartialLinks], offset: int, value: bytes) -> None:
    try:
        record = decode(value).record
    except DecodeError:
        return
    if isinstance(record, Partial) and record.trajectory in links:
        links[record.trajectory].add(offset, record, len(value))


def _first_offset(request: ChainRequest) -> int:
    is_known = request.first is not None and request.first.partition == request.newest.partition
    return request.first.offset if request.first is not None and is_known else 0


def _chain(request: ChainRequest, links: PartialLinks) -> list[Partial]:
    chain: list[Partial] = []
    at, above = request.newest, request.newest.offset + 1
    while True:
        link = links.by_offset.get(at.offset) if at.partition == request.newest.partition else None
        # Offsets fall with each step backwards, so a cycle is an error too.
        if link is None or at.offset >= above:
            raise DecodeError(f"{TOPIC} {at} is not a partial of trajectory {request.trajectory}")
        if reason := malformed_partial(link) or arrays_problem(link):
            raise DecodeError(f"{TOPIC} {at}: {reason}")
        if chain and link.start + len(link.tokens) != chain[-1].start:
            raise DecodeError(f"{TOPIC} {at} does not end where its successor starts")
        chain.append(link)
        # Oldest first.
        if link.previous is None:
            return chain[::-1]
        at, above = link.previous, at.offset


def _content_of(chain: list[Partial], request: ChainRequest) -> ChainContent:
    if request.start is not None and chain[0].start != request.start:
        raise DecodeError(f"the chain of {request.trajectory} starts at {chain[0].start}")
    generated = sum(len(link.logprobs) for link in chain)
    if request.tokens_max is not None and generated > request.tokens_max:
        raise DecodeError(f"the chain of {request.trajectory} has {generated} tokens, too many")
    if problem := array_order_problem(link.arrays for link in chain):
        raise DecodeError(f"the chain of {request.trajectory}: {problem}")
    spans = _joined_spans(chain)
    return ChainContent(
        np.concatenate([link.tokens for link in chain]),
        np.concatenate([_sources(link) for link in chain]),
        np.concatenate([link.logprobs for link in chain]),
        spans,
        chain[-1].environment,
        join_drafts((len(link.logprobs), link.drafts) for link in chain),
        chain[-1].failures,
        tuple(turn for link in chain for turn in link.turns),
        tuple(branch for link in chain for branch in link.branches),
        tuple(link.attempt for link in chain for _ in link.turns),
        tuple(piece for link in chain for piece in arrays_of(link).pieces),
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
    # Empty: all tokens are generated.
    if len(link.sources):
        return link.sources
    return np.full(len(link.tokens), GENERATED, np.uint8)


AttemptKey = tuple[str, int]
"""A trajectory and the attempt that resumes it."""
ChainResults = Mapping[AttemptKey, ChainContent | DecodeError]


class ChainPrefetch:
    """Reads chains in a thread, so that decoding never waits for the log. If the log does not
    answer, they may be requested again; any other error is raised by the next `take`.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._thread: threading.Thread | None = None
        self._found: ChainResults = {}
        self._failed: BaseException | None = None

    def request(self, requests: Mapping[AttemptKey, ChainRequest]) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, args=(requests,), name="chains", daemon=True
            )
            self._thread.start()

    def take(self) -> ChainResults:
        if self._failed is not None:
            raise self._failed
        if self._thread is not None and self._thread.is_alive():
            return {}
        contents, self._found = self._found, {}
        return contents

    def _run(self, requests: Mapping[AttemptKey, ChainRequest]) -> None:
        try:
            contents = read_chains(self._bus, requests.values())
            self._found = {key: contents[request.trajectory] for key, request in requests.items()}
        except BusTimeout as error:
            log.warning("%d resumes wait for their partials: %s", len(requests), error)
        except BaseException as error:  # noqa: BLE001  raised again in the loop's thread
            self._failed = error
