"""One trajectory while a rollout generates it.

It grows by emissions (new tokens of the engine, all under one version) and by replies of the
environment. Invariant 3 holds because `extend` lengthens the spans by exactly an emission's tokens,
under its version.

Reading list: after `producers/engines/base.py`, before `producers/rollout/publisher.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from rollstream.producers.engines.base import Emission, GenerationRequest
from rollstream.producers.rollout.chain import ChainContent, extend_spans
from rollstream.producers.tasks.base import turns_of
from rollstream.streams import records
from rollstream.streams.branches import kept_tokens
from rollstream.streams.token_arrays import GrowingArrays, array_fields
from rollstream.streams.values import (
    Address,
    Branch,
    Drafts,
    Floats,
    Sources,
    Span,
    Tokens,
    Turn,
    Version,
    join_drafts,
    split_off_last,
)

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(slots=True)
class RunningTrajectory:
    """The lists hold an array per addition, joined only when needed; flushed content is in
    partials.

    Only generated tokens have log-probabilities: `logprobs` and `spans` count these alone.
    """

    assignment: records.Assignment
    started_s: float
    flushed_s: float
    """Time of the newest partial, or of the start."""
    tokens: list[Tokens]
    """All tokens, from the prompt on."""
    sources: list[Sources]
    """For each token: prompt, generated or environment."""
    logprobs: list[Floats] = field(default_factory=list[Floats])
    spans: list[Span] = field(default_factory=list[Span])
    parts: list[tuple[int, Drafts | None]] = field(default_factory=list[tuple[int, Drafts | None]])
    """For each emission: the number of its tokens, and their draft statistics (`Drafts`)."""
    arrays: GrowingArrays = field(default_factory=GrowingArrays)
    """The named arrays of its tokens, in the emissions and in the resumed chain."""
    length: int = 0
    generated: int = 0
    flushed: int = 0
    """Number of tokens that need no further partial: the prompt's and those in partials."""
    flushed_generated: int = 0
    flushed_parts: int = 0
    partial: Address | None = None
    """Address of the newest durable partial, which the next one names as its predecessor."""
    flushing: bool = False
    """True while the newest partial is not durable: the next one must name its address."""
    environment: str = ""
    """The environment's state after its newest reply with tokens; of an agent's episode, its
    reward.
    """
    turns: list[Turn] = field(default_factory=list[Turn])
    """The answered requests of an episode of an agent."""
    branches: list[Branch] = field(default_factory=list[Branch])
    inherited: tuple[int, ...] = ()
    """The attempts that answered the first of `turns`: those of the resumed chain."""
    abandoned: tuple[int, ...] = ()
    """Indices of the turns that the program which ended the episode did not reach."""
    flushed_turns: int = 0
    flushed_branches: int = 0
    final_state: str | None = None
    """State of the environment after the reply that ended the dialogue; None before."""
    failures: tuple[str, ...] = ()
    """Why the environment failed before its retries."""
    waiting_s: float | None = None
    """Seconds in which the trajectory waited for its environment, if it did."""
    withheld: int = 0
    """1 while the outcome of an ended turn is awaited, else 0: partials then leave out the newest
    token, which a resumed trajectory must generate again to end the turn.
    """
    leaving: bool = False
    """Another rollout is to resume the trajectory. The outcome of an ended turn is awaited first: a
    reward finishes it here, and after a reply it is handed over.
    """

    @classmethod
    def start(
        cls,
        assignment: records.Assignment,
        resumed: ChainContent | None,
        now_s: float,
        is_episode: bool = False,
    ) -> "RunningTrajectory":
        """Resumed content counts as flushed. An agent's episode starts without tokens: the prompt
        comes with its program's first request.
        """
        tokens = assignment.tokens[:0] if is_episode else assignment.tokens
        prompt = np.full(len(tokens), records.PROMPT, np.uint8)
        running = cls(assignment, now_s, now_s, [tokens], [prompt], length=len(tokens))
        if resumed is not None:
            running.tokens.append(resumed.tokens)
            running.sources.append(resumed.sources)
            running.logprobs.append(resumed.logprobs)
            running.spans = list(resumed.spans)
            running.parts = [(len(resumed.logprobs), resumed.drafts)]
            running.arrays = GrowingArrays.resumed(resumed.arrays)
            running.length += len(resumed.tokens)
            running.generated = len(resumed.logprobs)
            running.environment, running.failures = resumed.environment, resumed.failures
            running.turns, running.branches = list(resumed.turns), list(resumed.branches)
            running.inherited = resumed.attempts
            running.partial = assignment.partial
        running.flushed, running.flushed_generated = running.length, running.generated
        running.flushed_parts = len(running.parts)
        running.flushed_turns = len(running.turns)
        running.flushed_branches = len(running.branches)
        return running

    def request(self, hold: bool, version: Version | None = None) -> GenerationRequest:
        """`hold`: keep the trajectory when a turn ends. `version`: generate it under this one only;
        None: always the newest.
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
        if len(self.tokens) > 1:
            self.tokens = [np.concatenate(self.tokens)]
            self.sources = [np.concatenate(self.sources)]
        return self.tokens[0], self.sources[0]

    def judged_turns(self) -> list[list[int]]:
        """Returns the turns without what only abandoned ones gained: no judge sees it."""
        tokens, sources = self.content()
        starts = [branch.start for branch in self.branches]
        if self.abandoned:
            mask = kept_tokens(self.turns, self.branches, self.abandoned)
            tokens, sources = tokens[mask], sources[mask]
            starts = [int(np.count_nonzero(mask[:start])) for start in starts]
        return turns_of(tokens, sources, starts)

    def extend(self, emission: Emission) -> None:
        count = len(emission.tokens)
        self.tokens.append(emission.tokens)
        self.sources.append(np.full(count, records.GENERATED, np.uint8))
        self.logprobs.append(emission.logprobs)
        if count:
            extend_spans(self.spans, Span(self.generated, self.generated + count, emission.version))
            self.parts.append((count, emission.drafts))
        self.length += count
        self.generated += count
        if emission.arrays:
            # Rows before a branch are of the path that another emission has generated.
            path_start = self.branches[-1].start if self.branches else 0
            self.arrays.add(emission.arrays, self.length, path_start)

    def extend_environment(self, tokens: Tokens, state: str) -> None:
        """Append the tokens of the environment's reply; `state` is its new state."""
        self.tokens.append(tokens)
        self.sources.append(np.full(len(tokens), records.ENVIRONMENT, np.uint8))
        self.length += len(tokens)
        self.environment, self.withheld = state, 0

    def end_turn(self) -> None:
        """Withhold the newest token from partials until the turn's outcome is known."""
        # A turn without a generated token, in a full context, ends again wherever it is resumed.
        last = next((sources for sources in reversed(self.sources) if len(sources)), None)
        self.withheld = int(last is not None and last[-1] == records.GENERATED)

    def turn_count(self) -> int:
        is_generated = np.concatenate(self.sources) == records.GENERATED
        return int(np.count_nonzero(np.diff(is_generated.astype(np.int8), prepend=0) == 1))

    @property
    def unpublished(self) -> int:
        return max(0, self.length - self.withheld - self.flushed)

    def generated_logprobs(self) -> Floats:
        return _joined(self.logprobs)

    def has_unpublished(self) -> bool:
        """Whether a partial can be made: it has tokens, and the previous one is durable."""
        return self.unpublished > 0 and not self.flushing

    def take_partial(
        self, rollout: str, term: int, now_s: float, last: bool = False
    ) -> records.Partial:
        """Returns all tokens since the previous partial but the withheld, which count as flushed. A
        `last` partial ends the attempt and may be empty.
        """
        assert not self.flushing, "the previous partial is not durable yet"
        if self.flushed == self.length:
            self.withheld = 0  # it is in a partial already, whose reader ends the turn again
        first, gained, withheld = self.flushed_generated, self.length - self.flushed, self.withheld
        end = self.generated - withheld
        sources = _tail(self.sources, gained, np.uint8)[: gained - withheld]
        record = records.Partial(
            trajectory=self.assignment.trajectory,
            group=self.assignment.group,
            attempt=self.assignment.attempt,
            rollout=rollout,
            rollout_term=term,
            previous=self.partial,
            start=self.flushed,
            tokens=_tail(self.tokens, gained, np.uint32)[: gained - withheld],
            sources=sources[:0] if (sources == records.GENERATED).all() else sources,
            logprobs=_tail(self.logprobs, self.generated - first, np.float32)[: end - first],
            spans=tuple(
                Span(max(s.start, first), min(s.end, end), s.version)
                for s in self.spans
                if s.end > first and s.start < end
            ),
            environment=self.environment,
            last=last,
            drafts=join_drafts(self._parts_to_flush()),
            failures=self.failures,
            turns=tuple(self.turns[self.flushed_turns :]),
            branches=tuple(self.branches[self.flushed_branches :]),
            **array_fields(self.arrays.flush(self.length - withheld)),
        )
        self.flushed_turns, self.flushed_branches = len(self.turns), len(self.branches)
        self.flushed, self.flushed_generated, self.flushed_s = self.length - withheld, end, now_s
        self.flushed_parts = len(self.parts) - withheld
        self.flushing = True
        return record

    def _parts_to_flush(self) -> Sequence[tuple[int, Drafts | None]]:
        # The withheld token becomes a part of its own.
        if self.withheld and self.parts[-1][0] > 1:
            count, drafts = self.parts.pop()
            rest, last = split_off_last(drafts)
            self.parts += [(count - 1, rest), (1, last)]
        return self.parts[self.flushed_parts : len(self.parts) - self.withheld]

    def partial_published(self, at: Address) -> None:
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
    ) -> records.Trajectory:
        """`finish` is `dead` for a failure, with its `reason`. `newest` is the newest version that
        the rollout knows; `reward` is None if an annotation brings it later.
        """
        assignment, (tokens, sources) = self.assignment, self.content()
        return records.Trajectory(
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
            environment=self.environment if self.final_state is None else self.final_state,
            moves=assignment.moves,
            wave=assignment.wave,
            reference=assignment.reference,
            predicted=assignment.predicted,
            drafts=join_drafts(self.parts),
            failures=self.failures,
            waiting_s=self.waiting_s,
            turns=tuple(replace(turn, answer="") for turn in self.turns),
            branches=tuple(self.branches),
            abandoned=self.abandoned,
            **array_fields(self.arrays.pieces),
        )


def _tail(parts: Sequence[NDArray[Scalar]], count: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    tail_parts: list[NDArray[Scalar]] = []
    # Earlier parts are not copied.
    for part in reversed(parts):
        if count <= 0:
            break
        tail_parts.append(part[-count:])
        count -= len(part)
    return np.concatenate(tail_parts[::-1]) if tail_parts else np.empty(0, dtype)


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
