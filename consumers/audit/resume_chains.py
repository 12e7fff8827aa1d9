"""Checks that a resumed completion contains its chain of partials. A chain with a missing or
misfitting link is skipped: a rollout refuses it too. State grows with the kept partials of resumed
trajectories.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from rollstream.consumers.audit.folds import InvariantResult
from rollstream.errors import DecodeError
from rollstream.streams.records import GENERATED, Assignment, Partial, Trajectory
from rollstream.streams.token_arrays import heads_problem, token_indices, trainable_arrays
from rollstream.streams.values import Address, ArrayHead, Floats, Sources, Tokens, Version


class LinkArray(msgspec.Struct, frozen=True, gc=False):
    """A named array of a partial, and the hash of its rows."""

    head: ArrayHead
    hash: int


class PartialLink(msgspec.Struct, frozen=True, gc=False):
    """One partial of a chain: `count` tokens from index `start` of the trajectory on, `generated`
    of them by the model. `hash` covers its tokens, sources and log-probabilities.
    """

    previous: Address | None
    start: int
    count: int
    generated: int
    hash: int
    versions: tuple[tuple[int, Version], ...]
    """The versions of its generated tokens in order, each with its number of tokens."""
    rollout: str
    attempt: int
    failures: int = 0
    """Number of failures before it."""
    arrays: tuple[LinkArray, ...] = ()


@dataclass(slots=True)
class ResumeChains:
    """Compares resumed completions with their partials. Must receive assignments, then `partials`,
    of which only those of resumed trajectories are kept, then `trajectories`.
    """

    result: InvariantResult
    _resumed: dict[tuple[str, int], Address] = field(default_factory=dict[tuple[str, int], Address])
    """(trajectory, attempt) → the partial that its assignment names."""
    _names: set[str] = field(default_factory=set[str])
    _links: dict[tuple[str, Address], PartialLink] = field(
        default_factory=dict[tuple[str, Address], PartialLink]
    )

    def want(self, assignment: Assignment) -> None:
        if assignment.kind == "resume" and assignment.partial is not None:
            self._resumed[assignment.trajectory, assignment.attempt] = assignment.partial
            self._names.add(assignment.trajectory)

    def keep(self, partial: Partial, at: Address) -> None:
        if partial.trajectory not in self._names:
            return
        self.result.counts["partials"] += 1
        count, sources = len(partial.tokens), partial.sources
        if not len(sources):
            sources = np.full(count, GENERATED, np.uint8)
        self._links[partial.trajectory, at] = PartialLink(
            partial.previous,
            partial.start,
            count,
            len(partial.logprobs),
            _content_hash(partial.tokens, sources, partial.logprobs),
            tuple((span.end - span.start, span.version) for span in partial.spans),
            partial.rollout,
            partial.attempt,
            len(partial.failures),
            _link_arrays(partial),
        )

    def wrong(self, record: Trajectory) -> str:
        """Returns where a completion differs from its chain; "" if it does not, or the chain is not
        kept.
        """
        newest = self._resumed.get((record.trajectory, record.attempt))
        links = [] if newest is None else self._chain(record.trajectory, newest)
        if not links:
            return ""
        if record.turns and len(record.failures) > links[-1].failures:
            # The episode has failed since, and was tried again without these turns.
            return ""
        self.result.counts["chains"] += 1
        prompt = links[0].start
        done = int(np.count_nonzero(record.sources[:prompt] == GENERATED))
        for link in links:
            end, upto = link.start + link.count, done + link.generated
            tokens, sources = record.tokens[link.start : end], record.sources[link.start : end]
            digest = _content_hash(tokens, sources, record.logprobs[done:upto])
            if digest != link.hash or _tokens_by_version(record, done, upto) != _merge_neighbours(
                link.versions
            ):
                what = f"was resumed from attempt {link.attempt} by {link.rollout}, but differs"
                return f"{what} from its partial from token {link.start} on"
            done = upto
        # A chain without arrays costs nothing here.
        if any(link.arrays for link in links) and (name := _differing_array(record, links)):
            return f"was resumed, but its array {name!r} differs from its partials"
        return ""

    def _chain(self, trajectory: str, newest: Address) -> list[PartialLink]:
        """Returns the links of the chain, the oldest first; [] if one is missing or misfits."""
        links: list[PartialLink] = []
        at: Address | None = newest
        while at is not None:
            link = self._links.get((trajectory, at))
            previous = None if link is None else link.previous
            if link is None or (links and link.start + link.count != links[-1].start):
                return []
            if previous is not None and previous.offset >= at.offset:
                return []
            links.append(link)
            at = previous
        return links[::-1]


def _tokens_by_version(record: Trajectory, start: int, end: int) -> tuple[tuple[int, Version], ...]:
    """Returns the versions of the generated tokens in `[start, end)` in order, each with its
    tokens.
    """
    overlaps = [(min(s.end, end) - max(s.start, start), s.version) for s in record.spans]
    return tuple((count, version) for count, version in overlaps if count > 0)


def _merge_neighbours(versions: tuple[tuple[int, Version], ...]) -> tuple[tuple[int, Version], ...]:
    merged: list[tuple[int, Version]] = []
    for count, version in versions:
        if merged and merged[-1][1] == version:
            merged[-1] = (merged[-1][0] + count, version)
        elif count:
            merged.append((count, version))
    return tuple(merged)


def _link_arrays(partial: Partial) -> tuple[LinkArray, ...]:
    """Returns the arrays of a partial; none of one whose arrays no rollout resumes."""
    if heads_problem(partial, partial.start + len(partial.tokens)):
        return ()
    try:
        arrays = trainable_arrays(partial)
    except DecodeError:
        return ()
    return tuple(
        LinkArray(head, xxh3_64_intdigest(arrays[head.name].values.tobytes()))
        for head in partial.arrays
    )


def _differing_array(record: Trajectory, links: list[PartialLink]) -> str:
    """Returns the name of an array of which the record lacks a row of the chain, or has another; ""
    if there is none, or the record's rows are damaged (`SpanAudit`).
    """
    if heads_problem(record, len(record.tokens)):
        return ""
    try:
        arrays = trainable_arrays(record)
    except DecodeError:
        return ""
    kinds = {head.name: (head.dtype, head.shape) for head in record.arrays}
    for link in links:
        for head, digest in ((array.head, array.hash) for array in link.arrays):
            if kinds.get(head.name) != (head.dtype, head.shape):
                return head.name
            rows, is_covered = arrays[head.name].at(token_indices(head.ranges))
            if not is_covered.all() or xxh3_64_intdigest(rows.tobytes()) != digest:
                return head.name
    return ""


def _content_hash(tokens: Tokens, sources: Sources, logprobs: Floats) -> int:
    return xxh3_64_intdigest(tokens.tobytes() + sources.tobytes() + logprobs.tobytes())
