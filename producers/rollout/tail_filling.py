"""Decides which new answers a rollout starts beside its last long ones, although it has used up its
quota under the held version (`TailFilling`; docs/explanation/scheduling.md, Filling tails).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollstream.producers.rollout.assignments import UpdateInputs
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.records import Assignment
from rollstream.streams.tails import FILL_LAG_MAX, fits_tail, tokens_left


@dataclass(slots=True)
class TailFilling:
    """Holds the trajectories that were `started` beside a tail under the held version. They have no
    tail of their own: otherwise each could be filled beside in turn, and newer weights would wait
    for ever.
    """

    started: set[str] = field(default_factory=set[str])

    def choose(
        self,
        waiting: Iterable[Assignment],
        inputs: UpdateInputs,
        running: Mapping[str, RunningTrajectory],
        slots: int,
    ) -> Assignment | None:
        """Returns the first new answer that is expected to end before the longest running one that
        was drawn within the quota: slots are free, and the change to newer weights waits for that
        one in any case. It counts as started. None if there is none, no slot is free, or the held
        version is too old (`FILL_LAG_MAX`).
        """
        if len(running) >= slots or inputs.newest - inputs.held > FILL_LAG_MAX:
            return None
        tail = self._tail(running)
        for assignment in waiting:
            is_new = assignment.kind == "start" and assignment.version.number <= inputs.held
            if is_new and fits_tail(assignment.predicted, tail):
                self.started.add(assignment.trajectory)
                return assignment
        return None

    def _tail(self, running: Mapping[str, RunningTrajectory]) -> int:
        """Returns how many tokens the longest of these answers has left."""
        lengths = [
            tokens_left(assignment.predicted, answer.generated, assignment.sampling.tokens_max)
            for trajectory, answer in running.items()
            if trajectory not in self.started and (assignment := answer.assignment)
        ]
        return max(lengths, default=0)
