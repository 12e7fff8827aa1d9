"""Runs the episodes of agents in the rollout's loop (`AgentEpisodes`; invariant 13). A turn that a
program has seen is never sampled again, whichever step is the last before a `kill -9`:

1. The engine generates. Killed here: the program's retry is sampled again, from the same random
   numbers.
2. One partial has the turn's tokens and its `Turn`, with those of turns that ended meanwhile
   (`turns.py`). Killed before the log has it: as 1.
3. The log has acknowledged the partial. Killed before the answer leaves: the next rollout reads the
   turn in the chain; the retry has the same digest and gets the stored answer.
4. The answer leaves. A retry whose first answer was lost gets the same one.

A replaced rollout may still answer its own program: its partials are in no chain that an assignment
names.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rollstream.errors import RollstreamError
from rollstream.metric_values import MetricValues
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.chat_format import ChatFormat
from rollstream.producers.agents.conversation import Conversation
from rollstream.producers.agents.episode import (
    AgentCounts,
    Episode,
    EpisodeState,
    end_of,
    ended_state,
    fail,
    failure_of,
    held_tokens,
    is_retried,
    overdue,
    read_state,
    state_text,
    succeed,
    unusable_chain,
)
from rollstream.producers.agents.inbox import (
    AgentInbox,
    EndTicket,
    OpenTicket,
    RewardTicket,
    TurnTicket,
)
from rollstream.producers.agents.keys import SessionIdentity, SessionKeys
from rollstream.producers.agents.program_process import EpisodeOrder
from rollstream.producers.agents.programs import ProgramEnd, Programs, ServicePrograms, task_of
from rollstream.producers.agents.requests import (
    EpisodeMoved,
    RequestRefused,
    SessionSealed,
    TurnFailed,
    scores_in,
)
from rollstream.producers.agents.token_paths import retried
from rollstream.producers.agents.turns import EpisodeTurns
from rollstream.producers.engines.base import Emission
from rollstream.producers.rollout.chain import ChainContent
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.turn_driver import RolloutParts
from rollstream.streams.foreign_text import reason_text
from rollstream.streams.records import Trajectory

if TYPE_CHECKING:
    from rollstream.producers.agents.serving import EndpointThread

log = logging.getLogger(__name__)

TURN_S = 0.002  # of decoding between two looks for requests
CHECK_S = 0.1  # between two checks of deadlines
LEAVE_S = 10.0  # within which a program that has ended its episode ends itself
VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of a value that nothing foresaw; a failing device or network raises others."""


@dataclass(slots=True)
class AgentEpisodes:
    """The `TurnDriver` of episodes: the open ones of a rollout, by trajectory. Used by the
    rollout's loop; `find` and `counts.repeated` also by the endpoint's thread.
    """

    parts: RolloutParts
    settings: AgentSettings
    chat: ChatFormat
    keys: SessionKeys
    programs: Programs
    inbox: AgentInbox
    retries: int = 0
    """How often an episode that failed is tried again (`task.retries`)."""
    url: str = ""
    """Address of the endpoint, without a path."""
    endpoint: "EndpointThread | None" = None
    """It outlives `close`, so that programs learn that their episodes move on."""
    prompt_text: Callable[[RunningTrajectory], str] = lambda _: ""
    system_text: Callable[[RunningTrajectory], str] = lambda _: ""
    """Returns the text of the task's prompt."""
    open: dict[str, Episode] = field(default_factory=dict[str, Episode])
    has_prompt: bool = False
    poll_s: float = TURN_S
    finished: list[Trajectory] = field(default_factory=list[Trajectory])
    retrying: list[Episode] = field(default_factory=list[Episode])
    """Episodes whose program starts again once the log has their failure."""
    counts: AgentCounts = field(default_factory=AgentCounts)
    turns: EpisodeTurns = field(init=False)
    _leaving: dict[str, float] = field(default_factory=dict[str, float])
    """By key the time at which the program of an episode that has ended is killed."""
    _checked_s: float = 0.0

    def __post_init__(self) -> None:
        self.turns = EpisodeTurns(
            self.parts.engine,
            self.parts.publisher,
            self.settings,
            self.counts,
            self.parts.keep_version,
            self.parts.clock,
            self.inbox.wake,
        )

    def __len__(self) -> int:
        return len(self.open)

    def find(self, identity: SessionIdentity) -> Episode | None:
        """Returns the open episode; None if it is not open here. Raises `SessionSealed` for a
        replaced attempt and a failed try.
        """
        episode = self.open.get(identity.trajectory)
        if episode is None or identity in (episode.identity, episode.adopted):
            return episode
        if identity.retry != episode.identity.retry:
            raise SessionSealed(f"episode {identity.trajectory} has failed and is tried again")
        # A service keeps the key of an earlier attempt: it continues the episode, unless another
        # program has opened the new attempt.
        is_older, programs = identity.attempt < episode.identity.attempt, self.programs
        if is_older and isinstance(programs, ServicePrograms) and programs.claim(episode.key):
            episode.adopt(identity, self.parts.clock())
            return episode
        raise SessionSealed(
            f"attempt {identity.attempt} of episode {identity.trajectory} was replaced"
        )

    def start(self, running: RunningTrajectory) -> None:
        """Opens an episode, with its turns if it is resumed, and starts its program."""
        assignment = running.assignment
        identity = SessionIdentity(
            assignment.trajectory,
            assignment.attempt,
            self.parts.publisher.name,
            self.parts.publisher.term,
            len(running.failures),
        )
        content = held_tokens(running)
        conversation = Conversation(self.chat, content)
        conversation.add(running.turns, content)
        key = self.keys.issue(identity)
        is_outside = isinstance(self.programs, ServicePrograms)
        opened_s = float("inf") if is_outside else self.parts.clock()
        episode = Episode(identity, key, running, conversation, opened_s)
        reason = end_of(running.environment)
        starts = reason is None and not running.flushing
        if starts and is_outside:
            # Before the endpoint's thread can find the episode: a service that repeats a request
            # with its earlier key would be refused for good, as if another had taken the episode.
            self.programs.start(self.order_of(episode))
        self.open[episode.name], self.turns.parked[episode.name] = episode, running
        if reason is not None:
            self._end(episode, None, reason)
            return
        if not is_outside:
            running.environment = ""  # the program runs again, and sets its reward again
        if running.flushing:
            self.retrying.append(episode)
        elif not is_outside:
            self.programs.start(self.order_of(episode))

    def order_of(self, episode: Episode) -> EpisodeOrder:
        assignment = episode.running.assignment
        return EpisodeOrder(
            episode.key,
            f"{self.url}/v1",
            f"{self.url}/sessions/{episode.name}",
            task_of(
                self.prompt_text(episode.running),
                assignment.reference,
                assignment.task,
                self.system_text(episode.running),
            ),
        )

    def drop(self, trajectory: str) -> None:
        self.parts.judging.drop(trajectory)
        if (episode := self.open.get(trajectory)) is not None:
            self._close(episode, SessionSealed(f"episode {trajectory} is no longer needed"))

    def leave(self, trajectory: str) -> None:
        episode = self.open[trajectory]
        self._close(episode, EpisodeMoved(f"episode {trajectory} continues on another rollout"))
        self.parts.publisher.give_up([episode.running])

    def leave_all(self) -> None:
        for trajectory in list(self.open):
            self.leave(trajectory)

    def close(self) -> None:
        self.inbox.close()
        self.programs.close()

    def _close(self, episode: Episode, seal: Exception, leaves: bool = False) -> None:
        episode.seal = seal
        del self.open[episode.name]
        # A program that asked for the end gets the answer and a while to finish.
        if leaves and not isinstance(self.programs, ServicePrograms):
            self._leaving[episode.key] = self.parts.clock() + LEAVE_S
        else:
            self.programs.kill(episode.key)
        self.turns.close(episode, seal)

    def metric_values(self) -> MetricValues:
        return {
            **self.counts.metric_values(),
            "rollout_agent_episodes": len(self.open),
            "rollout_replies_retried_total": 0,  # an environment's, which agents do not have
        }

    @property
    def running(self) -> dict[str, RunningTrajectory]:
        return self.turns.generating

    @property
    def parked(self) -> dict[str, RunningTrajectory]:
        return self.turns.parked

    def chain_problem(self, content: ChainContent) -> str:
        return unusable_chain(content)

    def grow(self, emission: Emission) -> None:
        self.turns.grow(emission)

    def wait(self, seconds: float) -> bool:
        self.inbox.wait(seconds)
        return True

    def growing(self) -> Sequence[RunningTrajectory]:
        return ()

    @property
    def awaited(self) -> int:
        return len(self.parts.judging)

    def open_max(self, room: int) -> int:
        del room  # turns share the engine, not episodes
        return self.settings.open_max(self.parts.settings.episodes_max)

    @property
    def parked_max(self) -> int:
        return max(0, self.open_max(0) - self.parts.settings.slots)

    def accept(self) -> None:
        """Takes the requests that arrived and the programs that ended, and checks deadlines."""
        tickets = self.inbox.take()
        self.turns.commit_waiting()  # a partial that is durable after this wakes the inbox again
        for ticket in tickets:
            if isinstance(ticket, OpenTicket):
                self._open_next(ticket)
                continue
            is_turn = isinstance(ticket, TurnTicket)
            if not is_turn and ticket.episode.running.flushing:
                self.inbox.defer(ticket)  # until the log has what the episode gained before
                continue
            outcome = ticket.turn.outcome if is_turn else ticket.outcome
            with self._boundary(ticket.episode, outcome):
                self._handle(ticket)
        for ended in self.programs.poll():
            self._leaving.pop(ended.key, None)
            if (episode := self._by_key(ended.key)) is not None:
                with self._boundary(episode):
                    self._end_by_program(episode, ended)
        now = self.parts.clock()
        if now - self._checked_s >= CHECK_S:
            self._checked_s = now
            for key in [key for key, until in self._leaving.items() if now >= until]:
                del self._leaving[key]
                self.programs.kill(key)
            for episode in list(self.open.values()):
                if reason := overdue(episode, self.settings, now):
                    with self._boundary(episode):
                        self._end(episode, None, reason)
        waiting, self.retrying = self.retrying, []
        for episode in waiting:
            if episode.running.flushing:
                self.retrying.append(episode)
            elif episode.seal is None:
                with self._boundary(episode):
                    self.programs.start(self.order_of(episode))

    def _handle(self, ticket: TurnTicket | RewardTicket | EndTicket) -> None:
        if isinstance(ticket, TurnTicket):
            self._begin_turn(ticket)
        elif isinstance(ticket, RewardTicket):
            self._set_reward(ticket)
        else:
            self._end_by_request(ticket)

    @contextmanager
    def _boundary(self, episode: Episode, outcome: "Future[Any] | None" = None) -> Generator[None]:
        try:
            yield
        except VALUE_ERRORS as error:
            # Errors of the engine, the log and settings pass: they concern every episode. Others
            # end this episode alone.
            if isinstance(error, RollstreamError):
                raise
            self.give_up(episode, f"{type(error).__name__}: {reason_text(error)}", error)
            if outcome is not None:
                fail(outcome, TurnFailed(f"the episode has ended: {reason_text(error)}"))

    def give_up(self, episode: Episode, reason: str, error: Exception | None = None) -> None:
        """Ends an episode dead, for this reason: there is no other way to end it."""
        log.error("episode %s is given up: %s", episode.name, reason, exc_info=error)
        self.counts.broken += 1
        self.counts.failures += 1
        self.drop(episode.name)
        self.finished.append(self.parts.judging.dead_record(episode.running, f"agent: {reason}"))

    def _by_key(self, key: str) -> Episode | None:
        identity = self.keys.identity(key)
        episode = None if identity is None else self.open.get(identity.trajectory)
        return episode if episode is not None and episode.key == key else None

    def _open_next(self, ticket: OpenTicket) -> None:
        programs, episode = self.programs, None
        if isinstance(programs, ServicePrograms) and (key := programs.next()):
            episode = self._by_key(key)
        if episode is not None:
            episode.opened_s = self.parts.clock()
        succeed(ticket.outcome, episode)

    def _begin_turn(self, ticket: TurnTicket) -> None:
        episode = ticket.episode
        if episode.seal is not None:
            fail(ticket.turn.outcome, episode.seal)
            return
        if isinstance(self.programs, ServicePrograms):
            self.programs.claim(episode.key)  # it is opened now
        now = self.parts.clock()
        episode.first_s = now if episode.first_s is None else episode.first_s
        episode.opened_s = min(episode.opened_s, now)
        self.turns.begin(episode, ticket.turn)

    def _set_reward(self, ticket: RewardTicket) -> None:
        episode = ticket.episode
        if episode.seal is not None:
            fail(ticket.outcome, episode.seal)
            return
        state = EpisodeState(ticket.reward, dict(ticket.scores))
        episode.running.environment = state_text(state)
        self.parts.publisher.episode(
            episode.running,
            lambda: succeed(ticket.outcome, None),
            lambda reason: fail(ticket.outcome, TurnFailed(reason)),
        )

    def _end_by_request(self, ticket: EndTicket) -> None:
        episode = ticket.episode
        if episode.seal is not None:
            fail(ticket.outcome, episode.seal)
            return
        # The end goes to the log at once: after a kill `start` ends the episode, and its program
        # need not ask again.
        before, abandoned = episode.running.environment, episode.abandoned()
        state = ended_state(before, ticket.reward, ticket.scores, ticket.failure, abandoned)
        self._end(episode, ticket.reward, ticket.failure, ticket.outcome, state)

    def _end_by_program(self, episode: Episode, ended: ProgramEnd) -> None:
        reason = ended.reason
        if ended.scores and not reason:
            try:
                scores = scores_in({"scores": ended.scores})
                episode.running.environment = state_text(EpisodeState(scores=scores))
            except RequestRefused as error:
                reason = f"the returned {error}"
        self._end(episode, ended.reward, reason)

    def _end(
        self,
        episode: Episode,
        reward: float | None,
        reason: str,
        outcome: "Future[None] | None" = None,
        state: str = "",
    ) -> None:
        """`outcome` is set when the log has the end, or the `state` if one is given."""
        future = outcome or Future[None]()
        on_durable = partial(succeed, future, None)

        def on_refused(why: str) -> None:
            fail(future, TurnFailed(why))

        seal = SessionSealed(f"episode {episode.name} has ended")
        self._close(episode, seal, leaves=outcome is not None)
        running = episode.running
        # A restarted program may take another way: turns that it neither requests nor continues are
        # abandoned, which the record names, and not trained.
        running.abandoned = episode.abandoned()
        reason = failure_of(episode, reason)
        # The next try has no turns, a fresh program and another key, so the failed try's program is
        # refused. A partial records the failure before the program starts.
        if is_retried(episode, reason, self.retries):
            log.info("episode %s is tried again: %s", episode.name, reason)
            self.counts.retried += 1
            retry = retried(running, f"agent: {reason}", self.parts.clock())
            self.parts.publisher.episode(retry, on_durable, on_refused)
            self.start(retry)
            return
        if state:
            running.environment = state
            self.parts.publisher.episode(running, on_durable, on_refused)
        self.counts.abandoned += len(running.abandoned)
        self._finish(episode, reward, reason)

    def _finish(self, episode: Episode, reward: float | None, reason: str) -> None:
        running = episode.running
        if reason:
            self.counts.failures += 1
            self.finished.append(self.parts.judging.dead_record(running, f"agent: {reason}"))
            return
        # The last trained turn decides how the record ends.
        last = max(set(range(len(running.turns))) - set(running.abandoned))
        finish = "length" if running.turns[last].finish == "length" else "stop"
        state = read_state(running.environment)
        reward = state.reward if reward is None else reward
        if reward is None:
            self.parts.judging.judge(running, finish)
            return
        self.finished.append(
            self.parts.judging.rewarded_record(running, finish, reward, state.scores)
        )

    def poll(self) -> list[Trajectory]:
        finished, self.finished = self.finished, []
        return finished + self.parts.judging.poll()
