"""Reads and queues the assignments of a rollout (`AssignmentQueue`), and decides by pure functions
when the rollout takes new weights and starts new trajectories (invariant 9).

A rollout follows only assignments of its own name and term. After a restart it therefore resumes
nothing without a new attempt from dispatch, because no old assignment carries its new term.
"""

import logging
from collections import deque
from dataclasses import dataclass

from rollstream.errors import Fenced, PositionLost
from rollstream.producers.engines.base import UpdateMode
from rollstream.streams.bus import Bus
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.records import Assignment
from rollstream.streams.topics import partition_of

log = logging.getLogger(__name__)


class AssignmentQueue:
    """Holds the rollout's assignments: `waiting` has starts and resumes, the most urgent first."""

    def __init__(self, bus: Bus, rollout: str, term: int) -> None:
        """Read the partition from its oldest record, although the old records hold no assignment of
        this term: only a reader that has read the `Opened` records can void assignments of an
        earlier, fenced holder of dispatch (invariant 7).
        """
        self._rollout, self._term = rollout, term
        partition = partition_of(rollout.encode(), bus.partitions("assignments"))
        self._bus, self._partition = bus, partition
        self._reader = self._from_begin()
        self.waiting: deque[Assignment] = deque()

    def readers(self) -> list[TopicReader]:
        return [self._reader]

    def read(self) -> list[Assignment]:
        """Queue new assignments and return the releases. Raises `Fenced` if a higher term of this
        rollout's name has assignments: the rollout was replaced, for instance while its process was
        suspended, and the process must exit.
        """
        released: list[Assignment] = []
        for received in self._poll():
            record = received.record
            if not isinstance(record, Assignment):
                continue
            if record.rollout != self._rollout or record.rollout_term < self._term:
                continue
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
        """Remove and return the waiting assignment of this trajectory (and attempt); None if there
        is none.
        """
        for assignment in self.waiting:
            if assignment.trajectory == trajectory and attempt in (None, assignment.attempt):
                self.waiting.remove(assignment)
                return assignment
        return None

    def _poll(self) -> list[Received]:
        """Read the new records. Assignments that were truncated unread belong to trajectories that
        have ended, because dispatch keeps those of open trajectories (invariant 11).
        """
        try:
            return self._reader.follow()
        except PositionLost as lost:
            log.info("assignments of ended trajectories were truncated unread: %s", lost)
            self._reader = self._from_begin()
            return self._reader.follow()

    def _from_begin(self) -> TopicReader:
        begin = from_begin(self._bus, "assignments")[self._partition]
        return TopicReader(self._bus, "assignments", {self._partition: begin})


def _urgency(assignment: Assignment) -> tuple[bool, int, bool, int]:
    """Return the sort key: resumes first, because under `keep_version` the rollout takes new
    weights only after they end. Then the oldest wave. Within a wave first one probe of each group
    of unknown length (Seer), then the longest expected answers. An unknown length counts as the
    largest.
    """
    is_probe = not assignment.predicted and assignment.index == 0
    length = assignment.predicted or assignment.sampling.tokens_max
    return assignment.kind == "start", assignment.wave, not is_probe, -length


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """Holds the only inputs of the rules (invariant 9); versions are given by their numbers.

    `in_flight` policies (PipelineRL, AReaL) take the newest version as soon as it is fetched.
    `keep_version` (Laminar, arXiv 2510.12633) finishes running trajectories under their version:
    once a newer version exists, the rollout starts new trajectories only until it has started its
    quota under the held version, finishes all of them, and then takes the newest version.
    """

    held: int
    """The version that the engine serves."""
    newest: int
    """The newest announced version."""
    drawn: int
    """New trajectories started under the held version."""
    quota: int
    """The most new trajectories under a version that is not the newest."""
    busy: int
    """Running trajectories, and waiting resumes under the held version."""
    needed: int
    """The version that the next waiting start needs; 0: none."""


def may_draw(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    """Return whether the next waiting assignment may start under the held version."""
    if inputs.needed > inputs.held:
        return False
    return mode != "keep_version" or inputs.newest <= inputs.held or inputs.drawn < inputs.quota


def wants_update(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    """Return whether to take the newest version now; under `keep_version` only an empty engine
    does.
    """
    if inputs.newest <= inputs.held:
        return False
    return mode != "keep_version" or inputs.busy == 0


def quota_left(mode: UpdateMode, inputs: UpdateInputs) -> int:
    """Return how many new trajectories the rollout may start before it drains."""
    return inputs.quota if mode != "keep_version" else max(0, inputs.quota - inputs.drawn)


def is_draining(mode: UpdateMode, inputs: UpdateInputs) -> bool:
    """Return whether the rollout starts no new trajectory until it is empty and has taken the
    newest version.
    """
    stale = mode == "keep_version" and inputs.newest > inputs.held
    return stale and (inputs.drawn >= inputs.quota or inputs.needed > inputs.held)
