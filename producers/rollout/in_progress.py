"""Moves each trajectory of a rollout from its assignment to the record that ends it (`InProgress`).

A trajectory is submitted to the engine, with the tokens of its partials if it is resumed, and grows
by the engine's emissions. At the end of a turn (a stop token or a limit) `EndedTurns` asks the task
for a reward, which ends it, or for its environment's reply, after which the next turn begins. Here
is the rollout's half of invariants 2 and 4: one attempt of a trajectory at a time, a failure is a
completion, and under `keep_version` no trajectory is resumed under another version.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from rollstream.errors import DecodeError, EngineRefused
from rollstream.producers.agents.episode import unusable_chain
from rollstream.producers.agents.episodes import AgentEpisodes
from rollstream.producers.engines.base import Emission, Engine
from rollstream.producers.rollout.chain import (
    AttemptKey,
    ChainContent,
    ChainPrefetch,
    ChainRequest,
    read_chains,
)
from rollstream.producers.rollout.ended_turns import ContinuedTurn, EndedTurns
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.codec import encoding_problem
from rollstream.streams.foreign_text import clean_text
from rollstream.streams.records import Assignment, Trajectory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class InProgress:
    """Holds the trajectories of one rollout under one term. `running` are those that the engine
    generates or has queued, `done` those that are finished and not published yet. A trajectory
    whose turn has ended is in `ended_turns`; it is in `parked` too while the engine keeps it,
    without a slot, for the environment's reply. A trajectory leaves without being finished by
    `drop` (no record) or `give_up` (a last partial, from which another rollout resumes it).
    """

    engine: Engine
    ended_turns: EndedTurns
    publisher: RolloutPublisher
    keep_version: bool
    clock: Callable[[], float] = time.time
    bounds: TrainingBounds = TrainingBounds()  # noqa: RUF009  frozen, and bounds nothing
    running: dict[str, RunningTrajectory] = field(default_factory=dict[str, RunningTrajectory])
    parked: dict[str, RunningTrajectory] = field(default_factory=dict[str, RunningTrajectory])
    done: list[Trajectory] = field(default_factory=list[Trajectory])
    chains: dict[AttemptKey, ChainContent | DecodeError] = field(
        default_factory=dict[AttemptKey, ChainContent | DecodeError]
    )
    """By trajectory and attempt, for assignments that start soon: the content of the trajectory's
    chain of partials (each links to the one before it), or why the chain cannot be used.
    """
    prefetch: ChainPrefetch | None = None
    """Reads chains in a thread. None: they are read where they are needed."""
    agents: AgentEpisodes | None = None
    """Runs the trajectories as episodes of a program, which asks for each turn; None: they are
    answers to prompts. An episode is in `running` only while the engine generates turns of it.
    """
    broken_chains: int = 0
    """Number of chains that could not be resumed; their trajectories restarted from the prompt."""

    def __len__(self) -> int:
        """Returns the number of trajectories that the engine has."""
        return len(self.running) + len(self.parked)

    def read_chains_ahead(self, assignments: Iterable[Assignment]) -> list[Assignment]:
        """Read the chains of all these assignments in one pass over the topic, so that `start`
        finds them. Chains of other assignments are removed. Returns the assignments whose chains
        are still being read (`prefetch`), and which cannot start yet.
        """
        due = [assignment for assignment in assignments if assignment.partial is not None]
        if self.prefetch is not None:
            self.chains |= self.prefetch.take()
        keys = {_attempt_of(assignment) for assignment in due}
        self.chains = {key: found for key, found in self.chains.items() if key in keys}
        missing = [assignment for assignment in due if _attempt_of(assignment) not in self.chains]
        if missing and self.prefetch is not None:
            self.prefetch.request({_attempt_of(one): self._chain_request(one) for one in missing})
            return missing
        self._read_chains(missing)
        return []

    def _read_chains(self, assignments: Iterable[Assignment]) -> None:
        wanted = {_attempt_of(one): self._chain_request(one) for one in assignments}
        found = read_chains(self.publisher.bus, wanted.values())
        self.chains |= {key: found[request.trajectory] for key, request in wanted.items()}

    def _chain_request(self, assignment: Assignment) -> ChainRequest:
        assert assignment.partial is not None, "only a resume has a chain"
        most = assignment.sampling.tokens_max
        start = 0 if self.agents is not None else len(assignment.tokens)
        name, newest = assignment.trajectory, assignment.partial
        return ChainRequest(name, newest, assignment.first, start, most)

    def start(self, assignment: Assignment) -> None:
        """Submit the trajectory to the engine, resuming from its partials if any. If its chain
        cannot be used, it restarts from the prompt, and the tokens generated before are lost. A
        trajectory that the engine refuses ends dead, with the reason. A resume that needs a version
        which the engine does not hold is given back to dispatch.
        """
        self.drop(assignment.trajectory)  # of an earlier attempt, replaced by this one
        is_episode = self.agents is not None
        gained = self._gained(assignment)
        running = RunningTrajectory.start(assignment, gained, self.clock(), is_episode)
        exact = self.keep_version and assignment.kind == "resume"
        if exact and assignment.version not in self.engine.versions:
            # The engine took other weights since dispatch planned, or could not load the version.
            # A resume never continues under another version.
            log.info(
                "%s is given back: version %s is not held",
                assignment.trajectory,
                assignment.version,
            )
            self.publisher.give_up([running])
            return
        if self.agents is not None:
            self.agents.start(running)
            return
        if running.partial is not None and not self._can_resume(running):
            running = RunningTrajectory.start(assignment, None, self.clock())
        if running.partial is None:
            try:
                self._submit(running)
            except EngineRefused as error:
                log.warning("%s cannot be generated: %s", assignment.trajectory, error)
                self.done.append(self.ended_turns.dead_record(running, f"engine: {error}"))
                return
        self.running[assignment.trajectory] = running

    def _gained(self, assignment: Assignment) -> ChainContent | None:
        """Returns the content of the assignment's chain; None for a start, or if the chain cannot
        be used.
        """
        if assignment.partial is None:
            return None
        if _attempt_of(assignment) not in self.chains:
            self._read_chains([assignment])
        found = self.chains.pop(_attempt_of(assignment))
        if isinstance(found, ChainContent):
            reason = unusable_chain(found) if self.agents is not None else _turns_of_none(found)
            if not reason:
                return found
            found = DecodeError(reason)
        self.broken_chains += 1
        log.warning("%s restarts from its prompt: %s", assignment.trajectory, found)
        return None

    def _can_resume(self, running: RunningTrajectory) -> bool:
        """Submit the trajectory with the content of its chain. Returns False, with a warning, if
        the engine refuses it.
        """
        try:
            self._submit(running)
        except EngineRefused as error:
            self.broken_chains += 1
            log.warning("%s restarts from its prompt: %s", running.assignment.trajectory, error)
            return False
        return True

    def _submit(self, running: RunningTrajectory) -> None:
        """Submit the trajectory. An engine that serves several versions side by side under
        `keep_version` is told the version to use: that of the trajectory's last generated tokens,
        or for a new trajectory the engine's newest.
        """
        version = None
        if self.keep_version and self.engine.is_side_by_side:
            version = running.spans[-1].version if running.spans else self.engine.version
        self.engine.submit(running.request(self.ended_turns.dialogue, version))

    def drop(self, trajectory: str) -> None:
        """Remove the trajectory and free its slot; no record of it is published."""
        self.ended_turns.drop(trajectory)
        here = self.running.pop(trajectory, None), self.parked.pop(trajectory, None)
        if self.agents is not None:
            self.agents.drop(trajectory)
        elif here != (None, None):
            self.engine.abort(trajectory)

    def drop_all(self) -> None:
        """Drop all trajectories in progress."""
        for trajectory in [*self.running, *self.parked]:
            self.drop(trajectory)
        self.ended_turns.drop_all()

    def give_up(self, released: Assignment) -> None:
        """Hand the trajectory over to another rollout: free its slot and publish its last partial.
        If its turn has ended, the outcome is awaited first: a reward finishes the trajectory here,
        and after a reply it is handed over. A release of another attempt changes nothing.
        """
        running = self._here(released.trajectory)
        if running is None or running.assignment.attempt != released.attempt:
            return
        running.leaving = True
        if not self.ended_turns.holds(released.trajectory):
            self._leave(running)

    def give_up_all(self, waiting: Iterable[Assignment]) -> None:
        """Hand over all trajectories that the engine has, and the assignments in `waiting`. The
        rollout that resumes one which waits for its environment asks for the reply again. Those
        that wait for their reward are awaited as in `give_up`.
        """
        for running in [*self.running.values(), *self.parked.values()]:
            running.leaving = True
            name = running.assignment.trajectory
            if self.ended_turns.awaits_reply(name):
                self.ended_turns.drop(name)
            if not self.ended_turns.holds(name):
                self._leave(running)
        # Resumes need no final partial: their chain is already in the log.
        fresh = [assignment for assignment in waiting if assignment.partial is None]
        self.publisher.give_up(
            [RunningTrajectory.start(a, None, self.clock(), self.agents is not None) for a in fresh]
        )

    def grow(self, emission: Emission) -> None:
        """Append the emission's tokens to its trajectory. If it finishes the turn, hand the
        trajectory to `ended_turns`; the engine keeps it only if the environment may reply.
        """
        if self.agents is not None:
            self.agents.turns.grow(emission)
            return
        running = self.running[emission.trajectory]
        running.extend(emission)
        if emission.finish is not None:
            del self.running[emission.trajectory]
            if self.ended_turns.dialogue and emission.finish == "stop":
                self.parked[emission.trajectory] = running
            self.ended_turns.submit(running, emission.finish)

    def run_agents(self, agents: AgentEpisodes) -> None:
        """Run all trajectories as episodes of a program."""
        self.agents = agents
        self.running, self.parked = agents.turns.generating, agents.turns.parked

    def take_requests(self) -> None:
        """Take what the programs of episodes ask for: turns enter the engine, episodes end."""
        if self.agents is not None:
            self.agents.accept()
            self.done += self.agents.take_finished()

    def collect_outcomes(self) -> None:
        """Take the outcomes of ended turns: finished trajectories move to `done`, and trajectories
        with a reply continue in the next free slot. A trajectory whose partial was refused ends.
        """
        for running, reason in self.publisher.take_refused():
            self._end_refused(running, reason)
        for decided in self.ended_turns.poll():
            if isinstance(decided, ContinuedTurn):
                self._continue(decided)
                continue
            if self.parked.pop(decided.trajectory, None) is not None:
                self.engine.abort(decided.trajectory)
            if decided.finish == "dead":
                log.warning("%s died: %s", decided.trajectory, decided.reason)
            self.done.append(decided)

    def publish(self) -> None:
        """Publish finished trajectories, the partials that are due, and last partials that waited
        for the one before them.
        """
        done, self.done = self.done, []
        self.publisher.trajectories([self._admissible(record) for record in done])
        if self.agents is None:  # an episode of an agent has a partial for each of its turns
            self.publisher.partials([*self.running.values(), *self.parked.values()])
        self.publisher.give_up(())

    def _end_refused(self, running: RunningTrajectory, reason: str) -> None:
        """End a trajectory of which a partial cannot be in the log: no other rollout could resume
        it. One that has ended meanwhile, or runs again under another attempt, is left alone.
        """
        name = running.assignment.trajectory
        if self.agents is not None:
            episode = self.agents.open.get(name)
            here = running if episode is None and running.leaving else episode and episode.running
            if here is not running:
                return
        elif self._here(name) not in (None, running):
            return
        self.drop(name)
        self.done.append(self.ended_turns.dead_record(running, f"partial: {reason}"))

    def _admissible(self, record: Trajectory) -> Trajectory:
        """Returns the record or, if the trainer would refuse it or it cannot be encoded, a dead one
        with the reason (invariant 12).
        """
        refused = None if record.finish == "dead" else refusal(record, self.bounds)
        if refused is not None:
            log.warning("%s died: %s", record.trajectory, refused)
            record = replace(record, finish="dead", reason=str(refused), reward=None, scores=None)
        if problem := encoding_problem(record):
            log.error("%s died: its record cannot be encoded: %s", record.trajectory, problem)
            return _bare_failure(record, problem)
        return record

    def _here(self, trajectory: str) -> RunningTrajectory | None:
        return self.running.get(trajectory) or self.parked.get(trajectory)

    def _leave(self, running: RunningTrajectory) -> None:
        """Free the trajectory's slot and publish its last partial. If the tokens that the abort
        returns finish its turn, the outcome of the turn is awaited instead.
        """
        name = running.assignment.trajectory
        if self.agents is not None:
            self.publisher.give_up([self.agents.leave(name)])
            return
        if self.parked.pop(name, None) is not None:
            self.engine.abort(name)
            self.publisher.give_up([running])
            return
        emission = self.engine.abort(name)
        if emission is not None and emission.finish is not None:
            self.grow(emission)
            return
        if emission is not None:
            running.extend(emission)
        del self.running[name]
        self.publisher.give_up([running])

    def _continue(self, decided: ContinuedTurn) -> None:
        """Continue after the environment's reply, or hand the trajectory over if it is leaving."""
        running = self.parked[decided.trajectory]
        if running.leaving:
            self._leave(running)
            return
        del self.parked[decided.trajectory]
        try:
            self.engine.append(decided.trajectory, decided.tokens)
            self.running[decided.trajectory] = running
        except EngineRefused as error:  # the environment's error ends one sample
            self.engine.abort(decided.trajectory)
            self.done.append(self.ended_turns.dead_record(running, f"environment: {error}"))


def _bare_failure(record: Trajectory, problem: str) -> Trajectory:
    """Returns the failure of a trajectory whose record cannot be encoded, with what its assignment
    states and its tokens alone: the assignment was decoded, so it can be encoded.
    """
    bare = replace(
        record,
        finish="dead",
        reason=clean_text(f"{record.reason}; {problem}" if record.reason else problem),
        reward=None,
        scores=None,
        environment="",
        failures=tuple(map(clean_text, record.failures)),
        waiting_s=None,
        turns=(),
        branches=(),
        abandoned=(),
    )
    if not encoding_problem(bare):
        return bare
    return replace(
        bare,
        tokens=np.empty(0, np.uint32),
        sources=np.empty(0, np.uint8),
        logprobs=np.empty(0, np.float32),
        spans=(),
        drafts=None,
        failures=(),
        reason="its record cannot be encoded",
    )


def _turns_of_none(content: ChainContent) -> str:
    """Returns why a chain cannot be that of an answer to a prompt, which has neither turns nor
    branches of an agent; "" if it can.
    """
    return "it has turns of an agent" if content.turns or content.branches else ""


def _attempt_of(assignment: Assignment) -> AttemptKey:
    return assignment.trajectory, assignment.attempt
