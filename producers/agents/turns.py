"""Generates the turns of episodes. One partial of an episode is on its way to the log at a time;
turns that end meanwhile share the next one. Else two would follow the same predecessor: a resume
follows one, and the other, which its program has seen, is sampled again.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from rollstream.errors import ContextFull, EngineRefused
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.answers import assistant_message
from rollstream.producers.agents.conversation import history_hashes
from rollstream.producers.agents.episode import (
    AgentCounts,
    Episode,
    OpenTurn,
    PendingTurn,
    fail,
    held_tokens,
    succeed,
)
from rollstream.producers.agents.requests import LimitReached, RequestRefused, TurnFailed
from rollstream.producers.agents.token_paths import extend_prompt, path_request
from rollstream.producers.engines.base import Emission, Engine
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.foreign_text import clean_text, reason_text
from rollstream.streams.values import Turn

log = logging.getLogger(__name__)

SHORT_TOKENS = 32
"""Fewest tokens of a request for which the engine keeps the KV: it may generate so many in vain."""


@dataclass(slots=True)
class EpisodeTurns:
    """Holds the turns that the engine generates. Used by the rollout's loop."""

    engine: Engine
    publisher: RolloutPublisher
    settings: AgentSettings
    counts: AgentCounts
    keep_version: bool
    clock: Callable[[], float]
    wake: Callable[[], None]
    """Called when a partial is in the log; the next one can follow."""
    generating: dict[str, RunningTrajectory] = field(default_factory=dict[str, RunningTrajectory])
    parked: dict[str, RunningTrajectory] = field(default_factory=dict[str, RunningTrajectory])
    """The other open episodes, which wait for their program."""
    _episodes: dict[str, Episode] = field(default_factory=dict[str, Episode])
    """By the name of a turn in the engine."""
    _waiting: dict[str, Episode] = field(default_factory=dict[str, Episode])
    """The episodes with ended turns that wait for a partial."""

    def begin(self, episode: Episode, pending: PendingTurn) -> None:
        try:
            check_limits(episode, self.settings)
        except LimitReached as error:
            fail(pending.outcome, error)
            return
        at = pending.plan.at
        since_s = episode.opened_s if episode.answered_s is None else episode.answered_s
        waiting_s = 0.0 if episode.open_turns else max(0.0, pending.asked_s - since_s)
        fork = pending.plan.cause if episode.is_fork(at) else ""
        turn = OpenTurn(pending, self._name(episode, at, fork), fork, waiting_s)
        try:
            self._submit(episode, turn)
        except ContextFull as error:
            self._drop(episode, turn)
            episode.limit = str(error)
            fail(pending.outcome, LimitReached(str(error)))
            return
        except EngineRefused as error:  # a fault of this request, such as a token of another model
            self._drop(episode, turn)
            fail(pending.outcome, RequestRefused(str(error)))
            return
        episode.generating[turn.engine_name] = turn
        self._episodes[turn.engine_name] = episode
        self.generating[episode.name] = episode.running
        self.parked.pop(episode.name, None)

    def _name(self, episode: Episode, at: int, fork: str) -> str:
        # The turn continues the request whose KV ends there.
        if not fork and at in episode.held:
            return episode.held[at]
        if not episode.open_turns:
            self._release(episode)  # the program has left the paths that it followed before
        used = episode.engine_names
        names = (f"{episode.name}/{number}" if number else episode.name for number in count())
        return next(name for name in names if name not in used)

    def _submit(self, episode: Episode, turn: OpenTurn) -> None:
        running, plan, request = episode.running, turn.pending.plan, turn.pending.request
        # Random numbers are those of (seed, trajectory, digest) at the positions of the path: a
        # request that is repeated after a kill draws the same ones, in any order of turns.
        noise = f"{episode.name}/{request.digest}"
        request_max = min(request.tokens_max or episode.tokens_left, episode.tokens_left)
        if episode.held.get(plan.at) == turn.engine_name:
            del episode.held[plan.at]
            if len(plan.tokens):
                turn.is_kept = True
                self.engine.append(turn.engine_name, plan.tokens, noise)
                return
            # Without further tokens the path is prefilled again.
            self.engine.abort(turn.engine_name)
        version = None
        if episode.version is None:
            episode.version = running.spans[0].version if running.spans else self.engine.version
        if self.keep_version and self.engine.is_side_by_side:
            version = episode.version
        request = path_request(running, plan.at, plan.tokens)
        is_short = request_max < min(episode.tokens_left, SHORT_TOKENS)
        tokens_max = len(request.logprobs) + (request_max if is_short else episode.tokens_left)
        turn.is_kept = not is_short
        self.engine.submit(
            dataclasses.replace(
                request,
                trajectory=turn.engine_name,
                sampling=dataclasses.replace(request.sampling, tokens_max=tokens_max),
                hold=not is_short,
                version=version,
                noise=noise,
            )
        )

    def grow(self, emission: Emission) -> None:
        """Appends an emission to its turn. At the request's limit the turn ends in the engine,
        too.
        """
        episode = self._episodes.get(emission.trajectory)
        if episode is None:
            return  # the turn has ended
        turn = episode.generating[emission.trajectory]
        within = cut_at_limit(turn, emission)
        if within is not emission:
            self.engine.abort(turn.engine_name)
            turn.is_kept = False
        turn.emissions.append(within)
        turn.count += len(within.tokens)
        if within.finish is None:
            return
        turn.finish, turn.ended_s = within.finish, self.clock()
        turn.is_kept = turn.is_kept and within.finish == "stop"
        del episode.generating[turn.engine_name], self._episodes[turn.engine_name]
        if not episode.generating:
            self.parked[episode.name] = self.generating.pop(episode.name)
        episode.ended.append(turn)
        self._waiting[episode.name] = episode
        self._commit(episode)

    def commit_waiting(self) -> None:
        for episode in list(self._waiting.values()):
            self._commit(episode)

    def _commit(self, episode: Episode) -> None:
        running = episode.running
        # Step 2. A turn stands behind the one that it continues, since a program can only continue
        # an answer that it got: each part of the chain that a kill leaves is whole.
        if running.flushing:
            return
        del self._waiting[episode.name]
        ended, episode.ended = episode.ended, []
        answered = [
            (open_turn.pending, turn)
            for open_turn in ended
            if (turn := self._taken(episode, open_turn)) is not None
        ]
        if not answered:
            return
        running.turns += [turn for _, turn in answered]
        content, now = held_tokens(running), self.clock()

        # Steps 3 and 4: the log has the partial, and the answers leave.
        def on_durable() -> None:
            episode.conversation.add([turn for _, turn in answered], content)
            episode.answered_s = now
            for pending, turn in answered:
                succeed(pending.outcome, turn)
            self.wake()

        def on_refused(reason: str) -> None:
            for pending, _ in answered:
                fail(pending.outcome, TurnFailed(f"its turn cannot be recorded: {reason}"))
            self.wake()

        self.publisher.episode(running, on_durable, on_refused)

    def _taken(self, episode: Episode, ended: OpenTurn) -> Turn | None:
        running, plan, tokens_left = episode.running, ended.pending.plan, episode.tokens_left
        if tokens_left < 1:
            self._drop(episode, ended)
            fail(ended.pending.outcome, _out_of_tokens(episode))
            return None
        # Turns that were generated together have used up the episode's tokens.
        if ended.count > tokens_left:
            self._drop(episode, ended)
            _shorten(ended, tokens_left)
        try:
            turn = answered_turn(episode, ended)
        except Exception as error:  # noqa: BLE001 (the boundary of one turn: text of a model)
            self._fail(episode, ended, error)
            return None
        extend_prompt(running, plan.tokens, plan.at)
        for emission in ended.emissions:
            running.extend(emission)
        if ended.is_kept:
            episode.held[running.length - 1] = ended.engine_name
        self.counts.add(turn)
        return turn

    def _fail(self, episode: Episode, turn: OpenTurn, error: Exception) -> None:
        log.error("a turn of episode %s has no answer", episode.name, exc_info=error)
        self._drop(episode, turn)
        self.counts.broken += 1
        reason = f"the model's answer cannot be read: {type(error).__name__}: {reason_text(error)}"
        fail(turn.pending.outcome, TurnFailed(reason))

    def _drop(self, episode: Episode, turn: OpenTurn) -> None:
        self.engine.abort(turn.engine_name)
        turn.is_kept = False

    def _release(self, episode: Episode) -> None:
        for name in episode.held.values():
            self.engine.abort(name)
        episode.held.clear()

    def close(self, episode: Episode, seal: Exception) -> None:
        """Drops all turns of the episode, failing the requests whose turns are not in the
        trajectory.
        """
        self.generating.pop(episode.name, None)
        self.parked.pop(episode.name, None)
        self._waiting.pop(episode.name, None)
        self._release(episode)
        for turn in episode.open_turns:
            self._drop(episode, turn)
            self._episodes.pop(turn.engine_name, None)
            fail(turn.pending.outcome, seal)
        episode.generating.clear()
        episode.ended.clear()


def check_limits(episode: Episode, settings: AgentSettings) -> None:
    """Raises `LimitReached` if the run's limits allow the episode no further turn."""
    # Turns left by a program that died are none of the present one's; their tokens count all the
    # same.
    turns = len(episode.running.turns) - len(episode.abandoned()) + len(episode.open_turns)
    if turns >= settings.turns_max:
        episode.limit = f"turns_max of {settings.turns_max} reached"
        raise LimitReached(f"agent.{episode.limit}")
    if episode.tokens_left < 1:
        raise _out_of_tokens(episode)


def _out_of_tokens(episode: Episode) -> LimitReached:
    tokens_max = episode.running.assignment.sampling.tokens_max
    episode.limit = f"tokens_max of {tokens_max} generated tokens reached"
    return LimitReached(f"sampling.{episode.limit}")


def cut_at_limit(turn: OpenTurn, emission: Emission) -> Emission:
    """Returns the emission up to the request's limit, at which the turn ends by `length`."""
    # The engine does not know the limit of a request, so that it can keep the KV for the next one.
    tokens_max = turn.pending.request.tokens_max
    if tokens_max is None:
        return emission
    tokens_left = tokens_max - turn.count
    if len(emission.tokens) < tokens_left or (
        len(emission.tokens) == tokens_left and emission.finish
    ):
        return emission
    return emission.first(tokens_left)


def _shorten(turn: OpenTurn, tokens_max: int) -> None:
    emissions: list[Emission] = []
    for emission in turn.emissions:
        if tokens_max > 0:
            emissions.append(emission.first(tokens_max))
        tokens_max -= len(emission.tokens)
    turn.emissions, turn.finish = emissions, "length"


def answered_turn(episode: Episode, ended: OpenTurn) -> Turn:
    """Returns the turn that answers a request, as the episode's next one; the episode is not
    changed.
    """
    request, start, plan = ended.pending.request, episode.running.length, ended.pending.plan
    chat = episode.conversation.chat
    generated = start + len(plan.tokens)
    tokens = [token for emission in ended.emissions for token in emission.tokens.tolist()]
    parsed = chat.parse(tokens, request.tools, f"call_{request.digest[:12]}_")
    calls = tuple(
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in parsed.tool_calls
    )
    content, reasoning = clean_text(parsed.content), clean_text(parsed.reasoning)
    answer = {"content": content, "reasoning": reasoning, "tool_calls": calls}
    history = ""
    if request.messages:
        # The next request finds the turn by the history that ends with its answer.
        message = assistant_message(content, reasoning, calls)
        history = history_hashes([*request.messages, message], request.tools)[-1]
    return Turn(
        digest=request.digest,
        history=history,
        start=start,
        generated=generated,
        end=generated + len(tokens),
        finish="length" if ended.finish == "length" else "tool_calls" if calls else "stop",
        waiting_s=ended.waiting_s,
        generating_s=max(0.0, ended.ended_s - ended.pending.asked_s),
        fork=ended.fork,
        overridden=request.overridden,
        answer=json.dumps(answer),
    )
