"""Runs the episodes of agents in the rollout's loop (`AgentEpisodes`): from the assignment over the
turns that the program asks for to the record that ends the episode (invariant 13).

A turn is answered in four steps. Each of them may be the last one before a `kill -9`:

1. The loop appends the prompt's new tokens to the trajectory and generates. Killed here: nothing
   was answered; the program's retry is sampled again, from the same random numbers.
2. At the turn's end one partial has its tokens and its `Turn`. Killed before the log has it: as 1.
3. The log has acknowledged the partial. Killed before the answer leaves: the next rollout reads the
   turn in the chain of partials; the retry has the same digest and gets the stored answer.
4. The answer leaves. A retry whose first answer was lost gets the same one.

So no turn that a program has seen is sampled again. A rollout that was replaced meanwhile may still
answer its own program; what it appends is in no chain that an assignment names. Only one turn of an
episode is generated at a time, so its tokens have one order. Between turns it uses no slot.

An episode that fails is tried again as often as `task.retries` allows: without its turns, with a
fresh program and another key, so that the program of the failed try is refused. A partial records
the failure before that program starts.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rollstream.errors import EngineRefused
from rollstream.metric_values import MetricValues
from rollstream.producers.agents.chat_format import ChatFormat
from rollstream.producers.agents.conversation import Conversation
from rollstream.producers.agents.episode import (
    AgentCounts,
    Episode,
    answered_turn,
    cut_at_limit,
    end_of,
    ended_state,
    failure_of,
    is_retried,
    overdue,
    reward_of,
)
from rollstream.producers.agents.inbox import (
    AgentInbox,
    EndTicket,
    OpenTicket,
    RewardTicket,
    TurnTicket,
)
from rollstream.producers.agents.keys import SessionIdentity, SessionKeys
from rollstream.producers.agents.pending import (
    EpisodeMoved,
    LimitReached,
    PendingTurn,
    SessionSealed,
    fail,
    succeed,
)
from rollstream.producers.agents.program_process import EpisodeOrder
from rollstream.producers.agents.programs import Programs, ServicePrograms, task_of
from rollstream.producers.agents.settings import AgentSettings
from rollstream.producers.engines.base import Emission, Engine
from rollstream.producers.rollout.ended_turns import EndedTurns
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.records import Trajectory

log = logging.getLogger(__name__)

CHECK_S = 0.1  # between two checks of deadlines
SHORT_TOKENS = 32
"""Fewest tokens of a request for which the engine keeps the KV for the next one. It may generate as
many more than asked, which are dropped: more than that costs more than the prompt's prefill.
"""


@dataclass(slots=True)
class AgentEpisodes:
    """Holds the open episodes of one rollout under one term, by trajectory. Used by the rollout's
    loop; `find` and `counts.repeated` also by the endpoint's thread.
    """

    engine: Engine
    ended_turns: EndedTurns
    publisher: RolloutPublisher
    settings: AgentSettings
    chat: ChatFormat
    keys: SessionKeys
    programs: Programs
    inbox: AgentInbox
    keep_version: bool = False
    clock: Callable[[], float] = time.time
    url: str = ""
    """Address of the endpoint, without a path."""
    prompt_text: Callable[[RunningTrajectory], str] = lambda _: ""
    """Returns the text of the task's prompt."""
    open: dict[str, Episode] = field(default_factory=dict[str, Episode])
    generating: dict[str, RunningTrajectory] = field(default_factory=dict[str, RunningTrajectory])
    """The episodes of which the engine generates a turn."""
    parked: dict[str, RunningTrajectory] = field(default_factory=dict[str, RunningTrajectory])
    """The other open episodes, which wait for their program."""
    finished: list[Trajectory] = field(default_factory=list[Trajectory])
    """Records that end episodes, until `take_finished`."""
    retrying: list[Episode] = field(default_factory=list[Episode])
    """Episodes whose program starts again once the log has their failure."""
    counts: AgentCounts = field(default_factory=AgentCounts)
    _checked_s: float = 0.0

    def __len__(self) -> int:
        return len(self.open)

    def find(self, identity: SessionIdentity) -> Episode | None:
        """Return the open episode that a key names; None if it is not open here. Raises
        `SessionSealed` for an attempt that was replaced, and for a try that failed. A service keeps
        the key of an earlier attempt: it continues the episode, unless another program has opened
        the new attempt.
        """
        episode = self.open.get(identity.trajectory)
        if episode is None or identity in (episode.identity, episode.adopted):
            return episode
        if identity.retry != episode.identity.retry:
            raise SessionSealed(f"episode {identity.trajectory} has failed and is tried again")
        is_older, programs = identity.attempt < episode.identity.attempt, self.programs
        if is_older and isinstance(programs, ServicePrograms) and programs.claim(episode.key):
            episode.adopted, episode.opened_s = identity, self.clock()
            return episode
        raise SessionSealed(
            f"attempt {identity.attempt} of episode {identity.trajectory} was replaced"
        )

    def start(self, running: RunningTrajectory) -> None:
        """Open an episode, with the turns that it has if it is resumed, and start its program."""
        assignment = running.assignment
        identity = SessionIdentity(
            assignment.trajectory,
            assignment.attempt,
            self.publisher.name,
            self.publisher.term,
            len(running.failures),
        )
        conversation = Conversation(self.chat)
        for turn in running.turns:
            conversation.add(turn)
        key = self.keys.issue(identity)
        opened_s = float("inf") if isinstance(self.programs, ServicePrograms) else self.clock()
        episode = Episode(identity, key, running, conversation, opened_s)
        self.open[episode.name], self.parked[episode.name] = episode, running
        if (reason := end_of(running.environment)) is not None:
            self._end(episode, None, reason)
        elif running.flushing:
            self.retrying.append(episode)
        else:
            self.programs.start(self.order_of(episode))

    def order_of(self, episode: Episode) -> EpisodeOrder:
        """Return what a program needs to run the episode."""
        assignment = episode.running.assignment
        return EpisodeOrder(
            episode.key,
            f"{self.url}/v1",
            f"{self.url}/sessions/{episode.name}",
            task_of(self.prompt_text(episode.running), assignment.reference),
        )

    def drop(self, trajectory: str) -> None:
        """Close the episode without a record: it was released or assigned again."""
        if (episode := self.open.get(trajectory)) is not None:
            self._close(episode, SessionSealed(f"episode {trajectory} is no longer needed"))

    def leave(self, trajectory: str) -> RunningTrajectory:
        """Close the episode, which another rollout resumes; returns it without the tokens of an
        unanswered turn.
        """
        episode = self.open[trajectory]
        self._close(episode, EpisodeMoved(f"episode {trajectory} continues on another rollout"))
        return episode.running

    def close(self) -> None:
        """Refuse all requests and end all programs."""
        self.inbox.close()
        self.programs.close()

    def _close(self, episode: Episode, seal: Exception) -> None:
        """Seal an episode: end its program, free its place in the engine, undo an unanswered
        turn.
        """
        episode.seal = seal
        del self.open[episode.name]
        self.generating.pop(episode.name, None)
        self.parked.pop(episode.name, None)
        self.programs.kill(episode.key)
        self._release(episode)
        if (pending := episode.pending) is not None:
            episode.pending = None
            episode.running.undo_turn(episode.start)
            fail(pending.outcome, seal)

    def _release(self, episode: Episode) -> None:
        """Drop the episode from the engine, if it is there."""
        if episode.pending is not None or episode.held >= 0:
            self.engine.abort(episode.name)
        episode.held = -1

    def metric_values(self) -> MetricValues:
        """Return the rollout's metrics about agents."""
        return {**self.counts.metric_values(), "rollout_agent_episodes": len(self.open)}

    def accept(self) -> None:
        """Take the requests that arrived and the programs that ended, and check deadlines."""
        for ticket in self.inbox.take():
            if not isinstance(ticket, OpenTicket) and ticket.episode.running.flushing:
                self.inbox.defer(ticket)  # until the log has what the episode gained before
            elif isinstance(ticket, TurnTicket):
                self._begin_turn(ticket.episode, ticket.turn)
            elif isinstance(ticket, RewardTicket):
                self._set_reward(ticket)
            elif isinstance(ticket, EndTicket):
                self._end_by_request(ticket)
            else:
                self._open_next(ticket)
        for ended in self.programs.poll():
            if (episode := self._by_key(ended.key)) is not None:
                self._end(episode, ended.reward, ended.reason)
        now = self.clock()
        if now - self._checked_s >= CHECK_S:
            self._checked_s = now
            for episode in list(self.open.values()):
                if reason := overdue(episode, self.settings, now):
                    self._end(episode, None, reason)
        waiting, self.retrying = self.retrying, []
        for episode in waiting:
            if episode.running.flushing:
                self.retrying.append(episode)
            elif episode.seal is None:
                self.programs.start(self.order_of(episode))

    def _by_key(self, key: str) -> Episode | None:
        identity = self.keys.identity(key)
        episode = None if identity is None else self.open.get(identity.trajectory)
        return episode if episode is not None and episode.key == key else None

    def _open_next(self, ticket: OpenTicket) -> None:
        programs, found = self.programs, None
        if isinstance(programs, ServicePrograms) and (key := programs.next()):
            found = self._by_key(key)
        if found is not None:
            found.opened_s = self.clock()
        succeed(ticket.outcome, found)

    def _begin_turn(self, episode: Episode, pending: PendingTurn) -> None:
        """Append the prompt's new tokens and let the engine continue the path (step 1)."""
        plan = pending.plan
        if episode.seal is not None or episode.pending is not None:
            busy = SessionSealed(f"episode {episode.name} generates another turn")
            fail(pending.outcome, episode.seal or busy)
            return
        if isinstance(self.programs, ServicePrograms):
            self.programs.claim(episode.key)  # it is opened now
        running, now = episode.running, self.clock()
        episode.first_s = now if episode.first_s is None else episode.first_s
        episode.opened_s = min(episode.opened_s, now)
        episode.start = running.length
        running.extend_prompt(plan.tokens, plan.at)
        episode.pending = pending
        try:
            self._submit(episode, pending)
            self.generating[episode.name] = running
            self.parked.pop(episode.name, None)
        except EngineRefused as error:
            self._release(episode)
            episode.pending = None
            running.undo_turn(episode.start)
            episode.limit = str(error)
            fail(pending.outcome, LimitReached(str(error)))

    def _submit(self, episode: Episode, pending: PendingTurn) -> None:
        """Continue in the engine's KV if the path is the one that it holds, else prefill it."""
        running, plan = episode.running, pending.plan
        sampling = running.assignment.sampling
        wanted = min(pending.request.tokens_max or episode.tokens_left, episode.tokens_left)
        is_held = episode.held == plan.at >= 0
        if is_held and len(plan.tokens) and not plan.fork:
            episode.held, episode.is_kept = -1, True
            self.engine.append(episode.name, plan.tokens)
            return
        if episode.held >= 0:
            self.engine.abort(episode.name)
            episode.held = -1
        version = None
        if self.keep_version and self.engine.is_side_by_side:
            version = running.spans[-1].version if running.spans else self.engine.version
        end = running.length - 1 if len(plan.tokens) else plan.at
        request = running.path_request(end, sampling, version)
        is_short = wanted < min(episode.tokens_left, SHORT_TOKENS)
        most = len(request.logprobs) + (wanted if is_short else episode.tokens_left)
        episode.is_kept = not is_short
        limited = dataclasses.replace(sampling, tokens_max=most)
        self.engine.submit(dataclasses.replace(request, hold=not is_short, sampling=limited))

    def cut(self, emission: Emission) -> Emission:
        """Return the emission without the tokens beyond those that the request asked for; with them
        the turn ends in the engine, too.
        """
        episode = self.open[emission.trajectory]
        within = cut_at_limit(episode, emission)
        if within is not emission:
            self.engine.abort(emission.trajectory)
            episode.is_kept = False
        return within

    def turn_ended(self, running: RunningTrajectory, finish: Literal["stop", "length"]) -> None:
        """Publish the turn's partial (step 2). Once it is in the log, the answer leaves (3, 4)."""
        episode = self.open[running.assignment.trajectory]
        pending, now = episode.pending, self.clock()
        assert pending is not None, "a turn ends that was not begun"
        turn = answered_turn(episode, pending, finish, now)
        is_held = finish == "stop" and episode.is_kept
        episode.pending, episode.held = None, running.length - 1 if is_held else -1
        running.turns.append(turn)
        self.counts.add(turn)

        def on_durable() -> None:
            episode.conversation.add(turn)
            episode.answered_s = now
            succeed(pending.outcome, turn)

        self.publisher.episode(running, on_durable)

    def _set_reward(self, ticket: RewardTicket) -> None:
        """Record the reward in a partial, and acknowledge it when the log has it."""
        episode = ticket.episode
        if episode.seal is not None or episode.pending is not None:
            busy = SessionSealed(f"episode {episode.name} generates a turn")
            fail(ticket.outcome, episode.seal or busy)
            return
        state = {"reward": ticket.reward, "scores": dict(ticket.scores)}
        episode.running.environment = json.dumps(state)
        self.publisher.episode(episode.running, lambda: succeed(ticket.outcome, None))

    def _end_by_request(self, ticket: EndTicket) -> None:
        if ticket.episode.seal is not None:
            fail(ticket.outcome, ticket.episode.seal)
            return
        given = ended_state(ticket.episode.running.environment, ticket.reward, ticket.failure)
        durable = partial(succeed, ticket.outcome, None)
        self._end(ticket.episode, ticket.reward, ticket.failure, durable, given)

    def _end(
        self,
        episode: Episode,
        reward: float | None,
        reason: str,
        on_durable: Callable[[], None] = lambda: None,
        state: str = "",
    ) -> None:
        """End the episode: with the reward that its program gave, else the task judges; or as a
        failure for this reason, after which it is tried again or dead. `on_durable` is called when
        the log has that. A `state` goes to the log at once: if the rollout is killed after that,
        `start` ends the episode, and its program need not ask again.
        """
        self._close(episode, SessionSealed(f"episode {episode.name} has ended"))
        running, reason = episode.running, failure_of(episode, reason)
        if is_retried(episode, reason, self.ended_turns.retries):
            log.info("episode %s is tried again: %s", episode.name, reason)
            self.counts.retried += 1
            again = running.retried(f"agent: {reason}", self.clock())
            self.publisher.episode(again, on_durable)
            self.start(again)
            return
        if state:
            running.environment = state
            self.publisher.episode(running, on_durable)
        self._finish(episode, reward, reason)

    def _finish(self, episode: Episode, reward: float | None, reason: str) -> None:
        """Make the record of a closed episode, or ask for its reward."""
        running = episode.running
        if reason:
            self.counts.failures += 1
            self.finished.append(self.ended_turns.dead_record(running, f"agent: {reason}"))
            return
        finish = "length" if running.turns[-1].finish == "length" else "stop"
        given = reward_of(running.environment)
        reward = given[0] if reward is None else reward
        if reward is None:
            self.ended_turns.judge(running, finish)
            return
        self.finished.append(self.ended_turns.rewarded_record(running, finish, reward, given[1]))

    def take_finished(self) -> list[Trajectory]:
        """Return the records of the episodes that ended since the last call."""
        finished, self.finished = self.finished, []
        return finished
