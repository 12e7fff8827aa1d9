"""Chooses answers beside a rollout's last long ones, although its quota is used up
(docs/explanation/scheduling.md).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollstream.producers.rollout.assignments import UpdateInputs
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.streams.records import Assignment
from rollstream.streams.tails import FILL_LAG_MAX, fits_tail, tokens_left


@dataclass(slots=True)
class TailFilling:
    """Chooses answers beside a tail. The `started` ones are no tail: else each could be filled
    beside in turn, and newer weights would wait for ever.
    """

    started: set[str] = field(default_factory=set[str])

    def choose(
        self,
        waiting: Iterable[Assignment],
        inputs: UpdateInputs,
        running: Mapping[str, RunningTrajectory],
        slots: int,
    ) -> Assignment | None:
        """Returns the first new answer expected to end before the longest running one within the
        quota. None without one, without a free slot, or if the held version is too old
        (`FILL_LAG_MAX`).
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
        lengths = [
            tokens_left(assignment.predicted, answer.generated, assignment.sampling.tokens_max)
            for trajectory, answer in running.items()
            if trajectory not in self.started and (assignment := answer.assignment)
        ]
        return max(lengths, default=0)
