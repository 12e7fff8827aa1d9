"""Holds one open episode of an agent (`Episode`), the counts of all (`AgentCounts`), and the limits
that are checked before a turn (`check_limits`).
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from rollstream.metric_values import MetricValues
from rollstream.producers.agents.answers import TurnAnswer, assistant_message
from rollstream.producers.agents.conversation import FORK_CAUSES, Conversation, history_hashes
from rollstream.producers.agents.keys import SessionIdentity
from rollstream.producers.agents.pending import LimitReached, PendingTurn, RequestQueue
from rollstream.producers.agents.settings import AgentSettings
from rollstream.producers.engines.base import Emission
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.values import Turn


@dataclass(slots=True)
class Episode:
    """Holds one open episode. The loop changes it; the endpoint's thread reads it while no turn of
    it is generated.
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
    pending: PendingTurn | None = None
    """The turn that is generated."""
    start: int = 0
    """Number of tokens before that turn."""
    held: int = -1
    """Flat index of the token at which the engine holds the episode's KV; -1: it holds none."""
    is_kept: bool = False
    """Whether the engine keeps the KV of the turn that it generates, should it end by itself."""
    queue: RequestQueue = field(default_factory=RequestQueue)
    """Lets its requests pass one at a time."""
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

    def check_open(self) -> None:
        """Raise the error that a request of an ended episode gets."""
        if self.seal is not None:
            raise self.seal


@dataclass(slots=True)
class AgentCounts:
    """Counts what the metrics show, since the rollout's start."""

    turns: int = 0
    repeated: int = 0
    """Requests that got a stored answer; the endpoint's thread counts them."""
    forks: Counter[str] = field(default_factory=Counter[str])
    failures: int = 0
    retried: int = 0
    """Failed tries of episodes that were tried again."""
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
        """Return the counts as metrics of the rollout."""
        return {
            "rollout_agent_turns_total": self.turns,
            "rollout_agent_repeated_total": self.repeated,
            "rollout_agent_forks_total": {cause: self.forks[cause] for cause in FORK_CAUSES},
            "rollout_agent_seconds_total": {
                "waiting": self.waiting_s,
                "generating": self.generating_s,
            },
            "rollout_agent_failures_total": self.failures,
            "rollout_agent_retried_total": self.retried,
        }


def answered_turn(episode: Episode, pending: PendingTurn, finish: str, now_s: float) -> Turn:
    """Return the turn that answers a request: the newest tokens, parsed, with the hash of the
    history that they end.
    """
    request, running, plan = pending.request, episode.running, pending.plan
    chat = episode.conversation.chat
    generated = episode.start + len(plan.tokens)
    tokens = running.content()[0][generated:].tolist()
    parsed = chat.parse(chat.decode(tokens), request.tools, f"call_{request.digest[:12]}_")
    calls = tuple(
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in parsed.tool_calls
    )
    answer = {"content": parsed.content, "reasoning": parsed.reasoning, "tool_calls": calls}
    turn = Turn(
        digest=request.digest,
        history="",
        start=episode.start,
        generated=generated,
        end=running.length,
        finish="length" if finish == "length" else "tool_calls" if calls else "stop",
        waiting_s=max(0.0, pending.asked_s - (episode.answered_s or episode.opened_s)),
        generating_s=max(0.0, now_s - pending.asked_s),
        fork=plan.fork,
        overridden=request.overridden,
        answer=json.dumps(answer),
    )
    if not request.messages:
        return turn
    said = assistant_message(stored_answer(turn))
    return replace(turn, history=history_hashes([*request.messages, said], request.tools)[-1])


def cut_at_limit(episode: Episode, emission: Emission) -> Emission:
    """Return the emission without the tokens beyond those that the request asked for; the turn then
    ends by `length`. The engine is not told the limit of a request, so that it can keep the KV for
    the next one.
    """
    assert episode.pending is not None, "an emission belongs to a turn"
    wanted = episode.pending.request.tokens_max
    if wanted is None:
        return emission
    left = wanted - (episode.running.length - episode.start - len(episode.pending.plan.tokens))
    if len(emission.tokens) < left or (len(emission.tokens) == left and emission.finish):
        return emission
    return dataclasses.replace(
        emission,
        tokens=emission.tokens[:left],
        logprobs=emission.logprobs[:left],
        finish="length",
        drafts=None if len(emission.tokens) > left else emission.drafts,
    )


def stored_answer(turn: Turn) -> TurnAnswer:
    """Return the answer that a turn stores, without its tokens."""
    stored: dict[str, Any] = json.loads(turn.answer)
    return TurnAnswer(
        digest=turn.digest,
        content=str(stored["content"]),
        reasoning=str(stored["reasoning"]),
        tool_calls=tuple(stored["tool_calls"]),
        finish=turn.finish,
        prompt_ids=(),
        token_ids=(),
        logprobs=(),
        pieces=(),
        created_s=0.0,
    )


def check_limits(episode: Episode, settings: AgentSettings) -> None:
    """Raise `LimitReached` if the run's limits allow the episode no further turn."""
    if len(episode.conversation.turns) >= settings.turns_max:
        episode.limit = f"turns_max of {settings.turns_max} reached"
        raise LimitReached(f"agent.{episode.limit}")
    if episode.tokens_left < 1:
        most = episode.running.assignment.sampling.tokens_max
        episode.limit = f"tokens_max of {most} generated tokens reached"
        raise LimitReached(f"sampling.{episode.limit}")


def failure_of(episode: Episode, reason: str) -> str:
    """Return why an episode that ends has failed; "" if it has not. `reason` is the failure of its
    program, "" for a normal end. A limit at which it was refused a turn comes first.
    """
    if not reason:
        return "" if episode.running.turns else "its program ended without a turn"
    return f"{episode.limit}; {reason}" if episode.limit else reason


def is_retried(episode: Episode, reason: str, retries: int) -> bool:
    """Return whether an episode that failed for this `reason` is tried again. At a limit of the run
    it is not: the same requests would reach it again, and where they would not, the retries would
    prefer short episodes.
    """
    return bool(reason) and not episode.limit and len(episode.running.failures) < retries


def overdue(episode: Episode, settings: AgentSettings, now_s: float) -> str:
    """Return why the episode's time is over, or ""."""
    if episode.first_s is None and now_s - episode.opened_s > settings.setup_s:
        return f"no request within {settings.setup_s:g} s"
    if episode.first_s is not None and now_s - episode.first_s > settings.episode_s:
        return f"took longer than {settings.episode_s:g} s"
    return ""


def reward_of(environment: str) -> tuple[float | None, Mapping[str, float]]:
    """Return the reward and the scores that an episode's program has set."""
    if not environment:
        return None, {}
    state: dict[str, Any] = json.loads(environment)
    return state["reward"], state["scores"]


def ended_state(environment: str, reward: float | None, failure: str) -> str:
    """Return the state of an episode that its program has ended: with this reward, else the one
    that it set before, or as a `failure`.
    """
    before, scores = reward_of(environment)
    chosen = before if reward is None else reward
    return json.dumps({"reward": chosen, "scores": dict(scores), "ended": failure})


def end_of(environment: str) -> str | None:
    """Return why the episode's program ended it as a failure, "" if it simply ended it, and None if
    it has not ended it.
    """
    return json.loads(environment).get("ended") if environment else None
