"""The assignments of one rollout by urgency, and pure functions: when it starts a trajectory and
when it takes new weights (invariant 9).

Only assignments of the rollout's own name and term count: dispatch assigns a restarted rollout's
trajectories again.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.errors import Fenced, PositionLost
from rollstream.producers.engines.base import UpdateMode
from rollstream.streams.bus import Bus
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.records import Assignment
from rollstream.streams.topics import partition_of

log = logging.getLogger(__name__)


class AssignmentQueue:
    """Assignments not begun: `waiting` has starts and resumes, the most urgent first."""

    def __init__(self, bus: Bus, rollout: str, term: int) -> None:
        self._rollout, self._term = rollout, term
        partition = partition_of(rollout.encode(), bus.partitions("assignments"))
        self._bus, self._partition = bus, partition
        # Old records hold no assignment of this term, but `Opened` records of dispatch: a reader
        # that has read them voids what a replaced dispatch writes late (invariant 7).
        self._reader = self._from_begin()
        self.waiting: deque[Assignment] = deque()

    def readers(self) -> list[TopicReader]:
        return [self._reader]

    def read(self) -> list[Assignment]:
        """Queue starts and resumes; returns the releases. A release of a trajectory that no other
        rollout resumes also removes its waiting assignment. Raises `Fenced` if a higher term of
        this rollout's name has assignments: the rollout was replaced.
        """
        released: list[Assignment] = []
        for received in self._poll():
            record = received.record
            if not isinstance(record, Assignment):
                continue
            if record.rollout != self._rollout or record.rollout_term < self._term:
                continue
            # This process may have been suspended meanwhile.
            if record.rollout_term > self._term:
                raise Fenced(
                    f"rollout {self._rollout} of term {self._term} was replaced in term "
                    f"{record.rollout_term}; this process must exit. If two run on purpose, give "
                    "each a name of its own (--name)"
                )
            if record.kind != "release":
                self.waiting.append(record)
            else:
                released.append(record)
                if not record.onward:
                    self.remove(record.trajectory)
        self.waiting = deque(sorted(self.waiting, key=_urgency))
        return released

    def remove(self, trajectory: str, attempt: int | None = None) -> Assignment | None:
        for assignment in self.waiting:
            if assignment.trajectory == trajectory and attempt in (None, assignment.attempt):
                self.waiting.remove(assignment)
                return assignment
        return None

    def put_last(self, assignments: Sequence[Assignment]) -> None:
        for assignment in assignments:
            self.waiting.remove(assignment)
            self.waiting.append(assignment)

    def _poll(self) -> list[Received]:
        try:
            return self._reader.follow()
        except PositionLost as lost:
            log.info("assignments of ended trajectories were truncated unread: %s", lost)
            # Dispatch keeps the assignments of open trajectories (invariant 11).
            self._reader = self._from_begin()
            return self._reader.follow()

    def _from_begin(self) -> TopicReader:
        begin = from_begin(self._bus, "assignments")[self._partition]
        return TopicReader(self._bus, "assignments", {self._partition: begin})


def _urgency(assignment: Assignment) -> tuple[bool, int, bool, int]:
    # Resumes come first: under `keep_version` the rollout takes new weights after they have ended.
    # Then the oldest wave; in it the first sample of each group of unknown length, as a probe that
    # predicts the others' lengths (Seer); then the longest expected answer.
    is_probe = not assignment.predicted and assignment.index == 0
    length = assignment.predicted or assignment.sampling.tokens_max
    return assignment.kind == "start", assignment.wave, not is_probe, -length


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """The `in_flight` modes (PipelineRL, AReaL) take the newest version as soon as it is fetched.
    `keep_version` (Laminar, arXiv 2510.12633) finishes running trajectories under their version:
    once a newer one exists, the rollout starts new trajectories only up to its quota, finishes all,
    and then takes the newest version.
    """

    held: int
    """The version that the engine serves."""
    newest: int
    """The newest announced version."""
    drawn: int
    """New trajectories started under the held version."""
    quota: int
    """`drawn` at which no more start under a version that is not the newest."""
    busy: int
    """Trajectories that run or wait for their environment, and waiting resumes under the held
    version.
    """
    needed: int
    """The version that the next waiting start needs; 0: none."""


def may_draw(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    if inputs.needed > inputs.held:
        return False
    return mode != "keep_version" or inputs.newest <= inputs.held or inputs.drawn < inputs.quota


def wants_update(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    """Returns whether to take the newest version now; under `keep_version` only when empty."""
    if inputs.newest <= inputs.held:
        return False
    return mode != "keep_version" or inputs.busy == 0


def quota_left(mode: UpdateMode, inputs: UpdateInputs) -> int:
    """Returns how many trajectories may still start once a newer version exists; the whole quota in
    modes without a limit.
    """
    return inputs.quota if mode != "keep_version" else max(0, inputs.quota - inputs.drawn)


def is_draining(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    """Returns whether, under `keep_version`, no trajectory starts until the running ones have ended
    and the newest version is taken.
    """
    stale = mode == "keep_version" and inputs.newest > inputs.held
    return stale and (inputs.drawn >= inputs.quota or inputs.needed > inputs.held)
