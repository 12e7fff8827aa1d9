"""Holds one trajectory while it is generated, and makes its records: partials, then a trajectory.

`RunningTrajectory` keeps all tokens since the prompt, and how many of them are in partials already.
It keeps invariant 3: every emission extends the spans by exactly its tokens, under the version that
the engine stamped on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.engines.base import Emission, GenerationRequest
from rollstream.producers.rollout.chain import ChainContent, extend_spans
from rollstream.streams.records import (
    ENVIRONMENT,
    GENERATED,
    PROMPT,
    Assignment,
    Partial,
    Trajectory,
)
from rollstream.streams.values import (
    Address,
    Drafts,
    Floats,
    Sources,
    Span,
    Tokens,
    Version,
    join_drafts,
)

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(slots=True)
class RunningTrajectory:
    """A trajectory under one assignment. `length` counts all its tokens, `generated` those of the
    engine; `flushed` counts the tokens that are in partials or in the prompt. Prompt and reply
    tokens have no log-probabilities, and spans count generated tokens only.
    """

    assignment: Assignment
    started_s: float
    flushed_s: float
    tokens: list[Tokens]
    sources: list[Sources]
    logprobs: list[Floats] = field(default_factory=list[Floats])
    spans: list[Span] = field(default_factory=list[Span])
    parts: list[tuple[int, Drafts | None]] = field(default_factory=list[tuple[int, Drafts | None]])
    """Per emission: the number of generated tokens, and their draft statistics."""
    length: int = 0
    generated: int = 0
    flushed: int = 0
    flushed_generated: int = 0
    flushed_parts: int = 0
    partial: Address | None = None
    flushing: bool = False
    """The newest partial is not durable yet. The next one must wait, because it names the address
    of the newest.
    """
    environment: str = ""
    leaving: bool = False
    """Another rollout will resume the trajectory, as soon as the reward process has answered its
    ended turn.
    """

    @classmethod
    def start(
        cls, assignment: Assignment, resumed: ChainContent | None, now_s: float
    ) -> "RunningTrajectory":
        """Start from the prompt, or with `resumed` from the content of the chain of partials."""
        prompt = np.full(len(assignment.tokens), PROMPT, np.uint8)
        running = cls(
            assignment, now_s, now_s, [assignment.tokens], [prompt], length=len(assignment.tokens)
        )
        if resumed is not None:
            running.tokens.append(resumed.tokens)
            running.sources.append(resumed.sources)
            running.logprobs.append(resumed.logprobs)
            running.spans = list(resumed.spans)
            running.parts = [(len(resumed.logprobs), resumed.drafts)]
            running.length += len(resumed.tokens)
            running.generated = len(resumed.logprobs)
            running.environment = resumed.environment
            running.partial = assignment.partial
        running.flushed, running.flushed_generated = running.length, running.generated
        running.flushed_parts = len(running.parts)
        return running

    def request(self, hold: bool, version: Version | None = None) -> GenerationRequest:
        """Return the request with which an engine starts or resumes the trajectory. `hold`: keep
        the slot when a turn ends; `version`: the only version that may generate it.
        """
        assignment, (tokens, sources) = self.assignment, self.content()
        return GenerationRequest(
            trajectory=assignment.trajectory,
            group=assignment.group,
            tokens=tokens,
            sources=sources,
            sampling=assignment.sampling,
            seed=assignment.seed,
            logprobs=_joined(self.logprobs),
            spans=tuple(self.spans),
            hold=hold,
            version=version,
        )

    def content(self) -> tuple[Tokens, Sources]:
        """Return all tokens so far, the prompt included, and the source of each."""
        return np.concatenate(self.tokens), np.concatenate(self.sources)

    def extend(self, emission: Emission) -> None:
        """Append tokens that the engine generated, all under one version."""
        count = len(emission.tokens)
        self.tokens.append(emission.tokens)
        self.sources.append(np.full(count, GENERATED, np.uint8))
        self.logprobs.append(emission.logprobs)
        if count:
            extend_spans(self.spans, Span(self.generated, self.generated + count, emission.version))
            self.parts.append((count, emission.drafts))
        self.length += count
        self.generated += count

    def extend_environment(self, tokens: Tokens, state: str) -> None:
        """Append the tokens of the environment's reply, and keep its new state."""
        self.tokens.append(tokens)
        self.sources.append(np.full(len(tokens), ENVIRONMENT, np.uint8))
        self.length += len(tokens)
        self.environment = state

    def has_unpublished(self) -> bool:
        """Whether there are tokens for a new partial and the previous partial is durable."""
        return self.length > self.flushed and not self.flushing

    def take_partial(self, rollout: str, term: int, now_s: float, last: bool = False) -> Partial:
        """Return the partial of all tokens since the previous one; a `last` partial may be empty.
        `partial_published` must be called with its address before the next partial is taken.
        """
        assert not self.flushing, "the previous partial is not durable yet"
        first, gained = self.flushed_generated, self.length - self.flushed
        sources = _tail(self.sources, gained, np.uint8)
        record = Partial(
            trajectory=self.assignment.trajectory,
            group=self.assignment.group,
            attempt=self.assignment.attempt,
            rollout=rollout,
            rollout_term=term,
            previous=self.partial,
            start=self.flushed,
            tokens=_tail(self.tokens, gained, np.uint32),
            sources=sources[:0] if (sources == GENERATED).all() else sources,
            logprobs=_tail(self.logprobs, self.generated - first, np.float32),
            spans=tuple(
                Span(max(s.start, first), s.end, s.version) for s in self.spans if s.end > first
            ),
            environment=self.environment,
            last=last,
            drafts=join_drafts(self.parts[self.flushed_parts :]),
        )
        self.flushed, self.flushed_generated, self.flushed_s = self.length, self.generated, now_s
        self.flushed_parts = len(self.parts)
        self.flushing = True
        return record

    def partial_published(self, at: Address) -> None:
        """Note that the newest partial is durable at this address."""
        self.partial, self.flushing = at, False

    def to_record(
        self,
        term: int,
        finish: Literal["stop", "length", "dead"],
        now_s: float,
        newest: Version,
        reward: float | None = None,
        scores: dict[str, float] | None = None,
        reason: str = "",
    ) -> Trajectory:
        """Return the record of the whole trajectory, which ends it."""
        assignment, (tokens, sources) = self.assignment, self.content()
        return Trajectory(
            trajectory=assignment.trajectory,
            group=assignment.group,
            index=assignment.index,
            attempt=assignment.attempt,
            task=assignment.task,
            rollout=assignment.rollout,
            rollout_term=term,
            tokens=tokens,
            sources=sources,
            logprobs=_joined(self.logprobs),
            spans=tuple(self.spans),
            finish=finish,
            reward=reward,
            trainer_version=newest,
            started_s=self.started_s,
            finished_s=now_s,
            temperature=assignment.sampling.temperature,
            reason=reason,
            scores=scores,
            environment=self.environment,
            moves=assignment.moves,
            wave=assignment.wave,
            reference=assignment.reference,
            predicted=assignment.predicted,
            drafts=join_drafts(self.parts),
        )


def _tail(parts: Sequence[NDArray[Scalar]], count: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    """Concatenate the last `count` items of all parts. Earlier parts are not copied."""
    kept: list[NDArray[Scalar]] = []
    for part in reversed(parts):
        if count <= 0:
            break
        kept.append(part[-count:])
        count -= len(part)
    return np.concatenate(kept[::-1]) if kept else np.empty(0, dtype)


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
