"""One open episode of an agent (`Episode`), the counts of all, and the rules by which it fails and
ends.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from rollstream.errors import DecodeError
from rollstream.metric_values import MetricValues
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.answers import REFUSAL_CODES, TurnAnswer
from rollstream.producers.agents.conversation import (
    FORK_CAUSES,
    Conversation,
    HeldTokens,
    PlannedPrompt,
)
from rollstream.producers.agents.keys import SessionIdentity
from rollstream.producers.agents.requests import TurnRequest
from rollstream.producers.engines.base import Emission
from rollstream.producers.rollout.chain import ChainContent
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.admissible import is_bounded_number, turns_problem
from rollstream.streams.branches import branch_problem, continued_tokens, reached_turns
from rollstream.streams.foreign_text import ForeignValueRefused, read_json, reason_text
from rollstream.streams.values import Turn, Version

Result = TypeVar("Result")


_CODES = (*REFUSAL_CODES, "unforeseen")


def succeed(outcome: "Future[Result]", result: Result) -> None:
    """Sets the outcome of a ticket, whose request may have been cancelled."""
    with suppress(InvalidStateError):
        outcome.set_result(result)


def fail(outcome: "Future[Any]", error: Exception) -> None:
    with suppress(InvalidStateError):
        outcome.set_exception(error)


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A request with the tokens that it adds; the outcome is the turn in the log."""

    request: TurnRequest
    plan: PlannedPrompt
    asked_s: float
    outcome: "Future[Turn]" = field(default_factory=lambda: Future[Turn]())


@dataclass(slots=True)
class OpenTurn:
    """A turn until its tokens are the episode's: before, nothing of it is in the log."""

    pending: PendingTurn
    engine_name: str
    fork: str
    waiting_s: float
    is_kept: bool = False
    """Whether the engine keeps the KV of its path, should it end by itself."""
    emissions: list[Emission] = field(default_factory=list[Emission])
    count: int = 0
    finish: Literal["stop", "length"] | None = None
    ended_s: float = 0.0


@dataclass(slots=True)
class Episode:
    """The loop changes it; the endpoint's thread uses `conversation`, `asked`, `reached` and the
    fields that never change.
    """

    identity: SessionIdentity
    key: str
    running: RunningTrajectory
    conversation: Conversation
    opened_s: float
    """When its program was started, or a service opened it; infinite until then."""
    first_s: float | None = None
    """When its first request came."""
    answered_s: float | None = None
    """When its last answer was durable."""
    generating: dict[str, OpenTurn] = field(default_factory=dict[str, OpenTurn])
    """The turns that the engine generates, by their name there."""
    ended: list[OpenTurn] = field(default_factory=list[OpenTurn])
    """Generated turns that wait for the partial before theirs, in the order of their ends."""
    held: dict[int, str] = field(default_factory=dict[int, str])
    """Names of requests whose KV the engine holds, by the flat index of their newest token."""
    version: Version | None = None
    """The version under which its first turn was begun."""
    asked: "dict[str, list[asyncio.Future[Turn]]]" = field(
        default_factory=lambda: dict[str, "list[asyncio.Future[Turn]]"]()
    )
    """By digest, the futures of requests that are being answered; of the endpoint's event loop."""
    reached: set[str] = field(default_factory=set[str])
    """Digests of earlier attempts' turns that the present program has requested."""
    adopted: SessionIdentity | None = None
    """The earlier attempt whose outside program continues the episode with its own key."""
    seal: Exception | None = None
    """Why its requests are refused; None while it is open."""
    limit: str = ""
    """The run's limit at which it was refused a turn, if any."""

    @property
    def name(self) -> str:
        return self.identity.trajectory

    @property
    def tokens_left(self) -> int:
        return self.running.assignment.sampling.tokens_max - self.running.generated

    @property
    def open_turns(self) -> list[OpenTurn]:
        """The turns whose tokens the episode lacks yet."""
        return [*self.generating.values(), *self.ended]

    @property
    def engine_names(self) -> set[str]:
        return {*self.held.values(), *(turn.engine_name for turn in self.open_turns)}

    def check_open(self) -> None:
        if self.seal is not None:
            raise self.seal

    def is_fork(self, at: int) -> bool:
        """Returns whether a turn behind flat index `at` forks: another turn continues it too, or it
        ends no turn.
        """
        running = self.running
        continued = continued_tokens(running.turns, running.branches)
        if at in continued or any(turn.pending.plan.at == at for turn in self.open_turns):
            return True
        return at >= 0 and all(turn.end - 1 != at for turn in running.turns)

    def adopt(self, identity: SessionIdentity, now_s: float) -> None:
        """Lets a service continue with the key of an earlier attempt."""
        self.adopted, self.opened_s = identity, now_s
        # The service had requested the turns from that attempt on.
        pairs = zip(self.running.turns, self.running.inherited, strict=False)
        self.reached.update(turn.digest for turn, by in pairs if by >= identity.attempt)

    def abandoned(self) -> tuple[int, ...]:
        """Returns the indices of the turns that the present program neither requested nor
        continued.
        """
        running = self.running
        state = read_state(running.environment)
        if state.ended is not None:
            # Recorded when the program ended the episode: none requests turns any more.
            return state.abandoned
        inherited = len(running.inherited)
        requested = [
            number
            for number, turn in enumerate(running.turns)
            if number >= inherited or turn.digest in self.reached
        ]
        if len(requested) == len(running.turns):
            return ()
        reached = reached_turns(running.turns, running.branches, requested)
        return tuple(number for number in range(len(running.turns)) if number not in reached)


@dataclass(slots=True)
class AgentCounts:
    turns: int = 0
    repeated: int = 0
    """Requests that got a stored answer; the endpoint's thread counts them."""
    abandoned: int = 0
    """Turns that are not trained: the restarted program took another way."""
    forks: Counter[str] = field(default_factory=Counter[str])
    failures: int = 0
    retried: int = 0
    """Failed tries of episodes that were tried again."""
    broken: int = 0
    """Turns and episodes that ended because their content could not be handled."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Refused requests by code; the endpoint's thread counts them."""
    waiting_s: float = 0.0
    generating_s: float = 0.0

    def add(self, turn: Turn) -> None:
        self.turns += 1
        self.waiting_s += turn.waiting_s
        self.generating_s += turn.generating_s
        if turn.fork:
            self.forks[turn.fork] += 1

    def metric_values(self) -> MetricValues:
        return {
            "rollout_agent_turns_total": self.turns,
            "rollout_agent_repeated_total": self.repeated,
            "rollout_agent_abandoned_total": self.abandoned,
            "rollout_agent_forks_total": {cause: self.forks[cause] for cause in FORK_CAUSES},
            "rollout_agent_seconds_total": {
                "waiting": self.waiting_s,
                "generating": self.generating_s,
            },
            "rollout_agent_failures_total": self.failures,
            "rollout_agent_retried_total": self.retried,
            "rollout_agent_broken_total": self.broken,
            "rollout_agent_refused_total": {code: self.refused[code] for code in _CODES},
        }


def held_tokens(running: RunningTrajectory) -> HeldTokens:
    tokens, sources = running.content()
    return HeldTokens(tokens, sources, running.generated_logprobs(), tuple(running.branches))


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function
    type: str = "function"


class RecordedAnswer(msgspec.Struct):
    """Holds the JSON in `Turn.answer`."""

    content: str
    reasoning: str
    tool_calls: tuple[_Call, ...]


class EpisodeState(msgspec.Struct, omit_defaults=True):
    """The JSON in `Partial.environment` of an episode: its reward, scores and abandoned turns, and
    at its end the failure (`ended`; "": none).
    """

    reward: float | None = None
    scores: dict[str, float] = {}  # msgspec copies empty defaults
    ended: str | None = None
    abandoned: tuple[int, ...] = ()


def read_state(environment: str) -> EpisodeState:
    """Returns a new state for "". Raises `DecodeError` for any other text."""
    if not environment:
        return EpisodeState()
    # Texts of earlier releases are cleaned, too.
    state = _converted(environment, EpisodeState)
    if not all(map(is_bounded_number, (state.reward or 0.0, *state.scores.values()))):
        raise DecodeError("the state of an episode: a reward or a score out of bounds")
    return state


def read_answer(turn: Turn) -> RecordedAnswer:
    """Returns the answer that a turn stores. Raises `DecodeError` for another text."""
    return _converted(turn.answer, RecordedAnswer)


def _converted(text: str, kind: type[Result]) -> Result:
    try:
        return msgspec.convert(read_json(text), kind)
    except (ForeignValueRefused, msgspec.ValidationError) as error:
        raise DecodeError(f"the state of an episode: {reason_text(error)}") from error


def stored_answer(turn: Turn) -> TurnAnswer:
    stored = read_answer(turn)
    return TurnAnswer(
        digest=turn.digest,
        content=stored.content,
        reasoning=stored.reasoning,
        tool_calls=tuple(
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in stored.tool_calls
        ),
        finish=turn.finish,
        prompt_ids=(),
        token_ids=(),
        logprobs=(),
        pieces=(),
        created_s=0.0,
    )


def unusable_chain(content: ChainContent) -> str:
    """Returns why an episode cannot continue from its chain of partials, "" if it can."""
    # Any process can append a partial; only an episode knows what these fields mean.
    turns, length = content.turns, len(content.tokens)
    problem = branch_problem(length, content.branches) or turns_problem(turns, content.sources)
    if problem:
        return problem
    try:
        state = read_state(content.environment)
        for turn in turns:
            read_answer(turn)
    except DecodeError as error:
        return str(error)
    if not all(0 <= number < len(turns) for number in state.abandoned):
        return f"abandoned turns of an episode of {len(turns)}"
    return ""


def failure_of(episode: Episode, reason: str) -> str:
    """Returns why an ending episode has failed, "" if it has not; `reason` is its program's
    failure.
    """
    if not reason:
        running = episode.running
        has_any = len(running.turns) > len(running.abandoned)
        return "" if has_any else "its program ended without a turn"
    # The limit at which the episode was refused a turn comes first.
    return f"{episode.limit}; {reason}" if episode.limit else reason


def is_retried(episode: Episode, reason: str, retries: int) -> bool:
    """Returns whether an episode that failed for this `reason` is tried again."""
    # Not at a limit of the run: the same requests would reach it again, and where they would not,
    # the retries would prefer short episodes.
    return bool(reason) and not episode.limit and len(episode.running.failures) < retries


def overdue(episode: Episode, settings: AgentSettings, now_s: float) -> str:
    """Returns why the episode's time is over, or ""."""
    if episode.first_s is None and now_s - episode.opened_s > settings.setup_s:
        return f"no request within {settings.setup_s:g} s"
    if episode.first_s is not None and now_s - episode.first_s > settings.episode_s:
        return f"took longer than {settings.episode_s:g} s"
    return ""


def ended_state(
    environment: str,
    reward: float | None,
    scores: Mapping[str, float],
    failure: str,
    abandoned: Collection[int],
) -> str:
    """Returns the state of an ended episode: with this reward and scores, else the earlier ones."""
    before = read_state(environment)
    chosen = (before.reward, before.scores) if reward is None else (reward, dict(scores))
    # No program runs any more that could name the abandoned turns.
    return state_text(EpisodeState(*chosen, failure, tuple(abandoned)))


def state_text(state: EpisodeState) -> str:
    fields = msgspec.to_builtins(state)
    # Earlier releases need `reward` and `scores` in it.
    return json.dumps({"reward": state.reward, "scores": state.scores, **fields})


def end_of(environment: str) -> str | None:
    """Returns the failure as which the program ended the episode: "" for a normal end, None before
    it.
    """
    return read_state(environment).ended
