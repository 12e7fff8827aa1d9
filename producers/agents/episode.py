"""Holds one open episode of an agent (`Episode`) with its requests until they are answered, the
counts of all (`AgentCounts`), and the rules by which an episode fails and ends.
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
    """Set the outcome of a ticket, whose request may have been cancelled."""
    with suppress(InvalidStateError):
        outcome.set_result(result)


def fail(outcome: "Future[Any]", error: Exception) -> None:
    """Set the error of a ticket, whose request may have been cancelled."""
    with suppress(InvalidStateError):
        outcome.set_exception(error)


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """Holds a request for a turn with the tokens that it adds; the outcome is the turn, once it is
    in the log.
    """

    request: TurnRequest
    plan: PlannedPrompt
    asked_s: float
    outcome: "Future[Turn]" = field(default_factory=lambda: Future[Turn]())


@dataclass(slots=True)
class OpenTurn:
    """Holds a turn from its begin until its tokens are those of the episode. Until then nothing of
    it is in the log, and no other turn continues it.
    """

    pending: PendingTurn
    engine_name: str
    """The name of its request in the engine."""
    fork: str
    waiting_s: float
    is_kept: bool = False
    """Whether the engine keeps the KV of its path, should it end by itself."""
    emissions: list[Emission] = field(default_factory=list[Emission])
    count: int = 0
    """Number of tokens in `emissions`."""
    finish: Literal["stop", "length"] | None = None
    ended_s: float = 0.0


@dataclass(slots=True)
class Episode:
    """Holds one open episode. The loop changes it; the endpoint's thread uses `conversation`,
    `asked`, `reached` and what never changes.
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
    """By digest, what awaits each request that is being answered; of the endpoint's event loop."""
    reached: set[str] = field(default_factory=set[str])
    """Digests of the turns of earlier attempts that the present program has asked for."""
    adopted: SessionIdentity | None = None
    """The earlier attempt whose outside program continues the episode with its own key."""
    seal: Exception | None = None
    """Why its requests are refused; None while it is open."""
    limit: str = ""
    """The limit of the run for which it was refused a turn, if one was."""

    @property
    def name(self) -> str:
        return self.identity.trajectory

    @property
    def tokens_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.running.assignment.sampling.tokens_max - self.running.generated

    @property
    def open_turns(self) -> list[OpenTurn]:
        """The turns whose tokens the episode does not have yet."""
        return [*self.generating.values(), *self.ended]

    @property
    def engine_names(self) -> set[str]:
        """The names of the requests that the engine has or may have."""
        return {*self.held.values(), *(turn.engine_name for turn in self.open_turns)}

    def check_open(self) -> None:
        """Raise the error that a request of an ended episode gets."""
        if self.seal is not None:
            raise self.seal

    def is_fork(self, at: int) -> bool:
        """Returns whether a turn forks that continues the token at flat index `at`: another turn
        continues it too, or it is no turn's last token.
        """
        running = self.running
        continued = continued_tokens(running.turns, running.branches)
        if at in continued or any(turn.pending.plan.at == at for turn in self.open_turns):
            return True
        return at >= 0 and all(turn.end - 1 != at for turn in running.turns)

    def adopt(self, identity: SessionIdentity, now_s: float) -> None:
        """Let a service continue with the key of an earlier attempt. It had asked for the turns
        from that attempt on.
        """
        self.adopted, self.opened_s = identity, now_s
        pairs = zip(self.running.turns, self.running.inherited, strict=False)
        self.reached.update(turn.digest for turn, by in pairs if by >= identity.attempt)

    def abandoned(self) -> tuple[int, ...]:
        """Returns the indices of the turns that the present program has neither asked for nor
        continued. If it has ended the episode already, they are in the state.
        """
        running = self.running
        state = read_state(running.environment)
        if state.ended is not None:
            return state.abandoned
        inherited = len(running.inherited)
        asked = [
            number
            for number, turn in enumerate(running.turns)
            if number >= inherited or turn.digest in self.reached
        ]
        if len(asked) == len(running.turns):
            return ()
        reached = reached_turns(running.turns, running.branches, asked)
        return tuple(number for number in range(len(running.turns)) if number not in reached)


@dataclass(slots=True)
class AgentCounts:
    """Counts what the metrics show, since the rollout's start."""

    turns: int = 0
    repeated: int = 0
    """Requests that got a stored answer; the endpoint's thread counts them."""
    abandoned: int = 0
    """Turns that are not trained, because the restarted program took another way."""
    forks: Counter[str] = field(default_factory=Counter[str])
    failures: int = 0
    retried: int = 0
    """Failed tries of episodes that were tried again."""
    broken: int = 0
    """Turns and episodes that ended because what they brought could not be handled."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Refused requests by code; the endpoint's thread counts them."""
    waiting_s: float = 0.0
    generating_s: float = 0.0

    def add(self, turn: Turn) -> None:
        """Count an answered turn."""
        self.turns += 1
        self.waiting_s += turn.waiting_s
        self.generating_s += turn.generating_s
        if turn.fork:
            self.forks[turn.fork] += 1

    def metric_values(self) -> MetricValues:
        """Returns the counts as metrics of the rollout."""
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
    """Returns a copy of what an episode has so far."""
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
    """Holds the JSON in `Partial.environment` of an episode: the reward and the scores that its
    program has set, and once it has ended the episode, as what failure (`ended`; "": none), and
    which turns it had abandoned.
    """

    reward: float | None = None
    scores: dict[str, float] = {}  # msgspec copies empty defaults
    ended: str | None = None
    abandoned: tuple[int, ...] = ()


def read_state(environment: str) -> EpisodeState:
    """Returns the state in a partial; a new one for "". Its texts are clean, also where an earlier
    release wrote others. Raises `DecodeError` for any text that is no state of an episode.
    """
    if not environment:
        return EpisodeState()
    state = _converted(environment, EpisodeState)
    if not all(map(is_bounded_number, (state.reward or 0.0, *state.scores.values()))):
        raise DecodeError("the state of an episode: a reward or a score out of bounds")
    return state


def read_answer(turn: Turn) -> RecordedAnswer:
    """Returns the answer that a turn stores. Raises `DecodeError` for a text that is none."""
    return _converted(turn.answer, RecordedAnswer)


def _converted(text: str, kind: type[Result]) -> Result:
    try:
        return msgspec.convert(read_json(text), kind)
    except (ForeignValueRefused, msgspec.ValidationError) as error:
        raise DecodeError(f"the state of an episode: {reason_text(error)}") from error


def stored_answer(turn: Turn) -> TurnAnswer:
    """Returns the answer that a turn stores, without its tokens."""
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
    """Returns why an episode cannot continue from its chain of partials, or "" if it can. Any
    process can append a partial, and only an episode knows what these fields mean.
    """
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
    """Returns why an episode that ends has failed; "" if it has not. `reason` is the failure of its
    program, "" for a normal end. A limit at which it was refused a turn comes first.
    """
    if not reason:
        running = episode.running
        has_any = len(running.turns) > len(running.abandoned)
        return "" if has_any else "its program ended without a turn"
    return f"{episode.limit}; {reason}" if episode.limit else reason


def is_retried(episode: Episode, reason: str, retries: int) -> bool:
    """Returns whether an episode that failed for this `reason` is tried again. At a limit of the
    run it is not: the same requests would reach it again, and where they would not, the retries
    would prefer short episodes.
    """
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
    """Returns the state of an episode that its program has ended: with this reward and its scores,
    else those that it set before, or as a `failure`. It keeps the turns that the program abandoned,
    because none runs any more that could tell.
    """
    before = read_state(environment)
    chosen = (before.reward, before.scores) if reward is None else (reward, dict(scores))
    return state_text(EpisodeState(*chosen, failure, tuple(abandoned)))


def state_text(state: EpisodeState) -> str:
    """Returns the state as the text that a partial has. Earlier releases need `reward` and `scores`
    in it.
    """
    fields = msgspec.to_builtins(state)
    return json.dumps({"reward": state.reward, "scores": state.scores, **fields})


def end_of(environment: str) -> str | None:
    """Returns why the episode's program ended it as a failure, "" if it simply ended it, and None
    if it has not ended it.
    """
    return read_state(environment).ended
