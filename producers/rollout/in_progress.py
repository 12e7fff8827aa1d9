"""Takes a rollout's trajectories from assignment to record; its half of invariants 2 and 4: one
attempt of a trajectory at a time, a failure is a completion, and under `keep_version` no trajectory
resumes under another version.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from rollstream.errors import DecodeError, EngineRefused
from rollstream.producers.rollout.chain import (
    AttemptKey,
    ChainContent,
    ChainPrefetch,
    ChainRequest,
    read_chains,
)
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.turn_driver import TurnDriver
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.codec import encoding_problem
from rollstream.streams.foreign_text import clean_text
from rollstream.streams.records import Assignment, Trajectory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class InProgress:
    """One term's trajectories; `done` are finished and not published yet. `driver.drop` ends one
    without a record, `give_up` with a last partial, from which another rollout resumes it.
    """

    driver: TurnDriver
    bounds: TrainingBounds = TrainingBounds()  # noqa: RUF009  frozen, and bounds nothing
    done: list[Trajectory] = field(default_factory=list[Trajectory])
    chains: dict[AttemptKey, ChainContent | DecodeError] = field(
        default_factory=dict[AttemptKey, ChainContent | DecodeError]
    )
    """By trajectory and attempt, for assignments that start soon: the content of the chain of
    partials, or why it cannot be used.
    """
    prefetch: ChainPrefetch | None = None
    """Reads chains in a thread. None: they are read at `start`."""
    broken_chains: int = 0
    """Number of chains that could not be resumed: the trajectories restarted from the prompt."""

    def __len__(self) -> int:
        return len(self.driver.running) + len(self.driver.parked)

    def read_chains_ahead(self, assignments: Iterable[Assignment]) -> list[Assignment]:
        """Read these chains in one pass, and remove all others. Returns the assignments whose
        chains are still being read.
        """
        due = [assignment for assignment in assignments if assignment.partial is not None]
        if self.prefetch is not None:
            self.chains |= self.prefetch.take()
        keys = {_attempt_of(assignment) for assignment in due}
        self.chains = {key: content for key, content in self.chains.items() if key in keys}
        missing = [assignment for assignment in due if _attempt_of(assignment) not in self.chains]
        if missing and self.prefetch is not None:
            self.prefetch.request(
                {_attempt_of(resume): self._chain_request(resume) for resume in missing}
            )
            return missing
        self._read_chains(missing)
        return []

    def _read_chains(self, assignments: Iterable[Assignment]) -> None:
        requests = {
            _attempt_of(assignment): self._chain_request(assignment) for assignment in assignments
        }
        contents = read_chains(self.driver.parts.publisher.bus, requests.values())
        self.chains |= {key: contents[request.trajectory] for key, request in requests.items()}

    def _chain_request(self, assignment: Assignment) -> ChainRequest:
        assert assignment.partial is not None, "only a resume has a chain"
        tokens_max = assignment.sampling.tokens_max
        start = len(assignment.tokens) if self.driver.has_prompt else 0
        name, newest = assignment.trajectory, assignment.partial
        return ChainRequest(name, newest, assignment.first, start, tokens_max)

    def start(self, assignment: Assignment) -> None:
        """Starts or resumes a trajectory. With an unusable chain it restarts from the prompt;
        refused by the engine, it ends dead with the reason. A resume under a version that the
        engine does not hold is given back to dispatch.
        """
        self.driver.drop(assignment.trajectory)  # of an earlier attempt, replaced by this one
        parts = self.driver.parts
        running = self._begin(assignment, self._gained(assignment))
        exact = parts.keep_version and assignment.kind == "resume"
        if exact and assignment.version not in parts.engine.versions:
            # The engine took other weights since dispatch planned, or could not load the version.
            # A resume never continues under another version.
            log.info(
                "%s is given back: version %s is not held",
                assignment.trajectory,
                assignment.version,
            )
            parts.publisher.give_up([running])
            return
        refused = self._refusal(running)
        if refused is not None and running.partial is not None:
            self._note_broken(assignment, refused)
            running = self._begin(assignment, None)
            refused = self._refusal(running)
        if refused is not None:
            log.warning("%s cannot be generated: %s", assignment.trajectory, refused)
            self.done.append(parts.judging.dead_record(running, f"engine: {refused}"))

    def _refusal(self, running: RunningTrajectory) -> EngineRefused | None:
        try:
            self.driver.start(running)
        except EngineRefused as error:
            return error
        return None

    def _begin(self, assignment: Assignment, gained: ChainContent | None) -> RunningTrajectory:
        has_prompt, now_s = self.driver.has_prompt, self.driver.parts.clock()
        return RunningTrajectory.start(assignment, gained, now_s, is_episode=not has_prompt)

    def _note_broken(self, assignment: Assignment, error: Exception) -> None:
        self.broken_chains += 1
        log.warning("%s restarts from its prompt: %s", assignment.trajectory, error)

    def _gained(self, assignment: Assignment) -> ChainContent | None:
        if assignment.partial is None:
            return None
        if _attempt_of(assignment) not in self.chains:
            self._read_chains([assignment])
        content = self.chains.pop(_attempt_of(assignment))
        if isinstance(content, ChainContent):
            reason = self.driver.chain_problem(content)
            if not reason:
                return content
            content = DecodeError(reason)
        self._note_broken(assignment, content)
        return None

    def drop_all(self) -> None:
        for trajectory in [*self.driver.running, *self.driver.parked]:
            self.driver.drop(trajectory)
        self.driver.parts.judging.drop_all()

    def give_up(self, released: Assignment) -> None:
        """Hand over as soon as the driver can (`leave`). A release of another attempt changes
        nothing.
        """
        running = self._here(released.trajectory)
        if running is None or running.assignment.attempt != released.attempt:
            return
        running.leaving = True
        self.driver.leave(released.trajectory)

    def give_up_all(self, waiting: Iterable[Assignment]) -> None:
        """Hand over all running and parked trajectories and the `waiting` assignments. Those that
        wait for their reward are awaited as in `give_up`.
        """
        for running in [*self.driver.running.values(), *self.driver.parked.values()]:
            running.leaving = True
        self.driver.leave_all()
        # Resumes need no final partial: their chain is already in the log.
        fresh = [assignment for assignment in waiting if assignment.partial is None]
        self.driver.parts.publisher.give_up([self._begin(start, None) for start in fresh])

    def collect_outcomes(self) -> None:
        for running, reason in self.driver.parts.publisher.take_refused():
            self._end_refused(running, reason)
        for record in self.driver.poll():
            if record.finish == "dead":
                log.warning("%s died: %s", record.trajectory, record.reason)
            self.done.append(record)

    def publish(self) -> None:
        """Publish finished trajectories, due partials, and last partials whose predecessor is
        durable by now.
        """
        done, self.done = self.done, []
        publisher = self.driver.parts.publisher
        publisher.trajectories([self._admissible(record) for record in done])
        publisher.partials(self.driver.growing())
        publisher.give_up(())

    def _end_refused(self, running: RunningTrajectory, reason: str) -> None:
        name = running.assignment.trajectory
        current = self._here(name)
        # Without a partial no other rollout could resume it. One that has ended, or runs under
        # another attempt, is left alone.
        if current is running or (current is None and running.leaving):
            self.driver.drop(name)
            record = self.driver.parts.judging.dead_record(running, f"partial: {reason}")
            self.done.append(record)

    def _admissible(self, record: Trajectory) -> Trajectory:
        # What the trainer would refuse, or cannot be encoded, ends dead (invariant 12).
        refused = None if record.finish == "dead" else refusal(record, self.bounds)
        if refused is not None:
            log.warning("%s died: %s", record.trajectory, refused)
            record = replace(record, finish="dead", reason=str(refused), reward=None, scores=None)
        if problem := encoding_problem(record):
            log.error("%s died: its record cannot be encoded: %s", record.trajectory, problem)
            return _bare_failure(record, problem)
        return record

    def _here(self, trajectory: str) -> RunningTrajectory | None:
        return self.driver.running.get(trajectory) or self.driver.parked.get(trajectory)


def _bare_failure(record: Trajectory, problem: str) -> Trajectory:
    # What stays can be encoded: the assignment was decoded.
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
        arrays=(),
        array_bytes=None,
        needs=(),
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


def _attempt_of(assignment: Assignment) -> AttemptKey:
    return assignment.trajectory, assignment.attempt
