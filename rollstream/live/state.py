"""What the live view knows: a fold over records, without I/O and without a clock."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streams.records import (
    Admitted,
    GroupClosed,
    Record,
    RolloutStatus,
    StepDone,
    Take,
    WeightsAnnounced,
)

BEATS_KEPT = 20  # ten seconds of heartbeats: speed and idle share are means over them
STEPS_KEPT = 240  # of the history that the view draws


@dataclass(slots=True)
class RunState:
    """Apply records of `admissions`, `ledger`, `status` and `weights`; applying one twice changes
    nothing, but for a trajectory that is counted by its group alone.
    """

    admitted: dict[int, int] = field(default_factory=dict[int, int])
    """Open group → its trajectories."""
    finished: dict[int, int] = field(default_factory=dict[int, int])
    """Open group → its finished trajectories."""
    endings: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """`trained`, `filtered`, `expired`, `dead` → groups."""
    steps: deque[StepDone] = field(default_factory=lambda: deque[StepDone](maxlen=STEPS_KEPT))
    rollouts: dict[str, deque[RolloutStatus]] = field(
        default_factory=dict[str, deque[RolloutStatus]]
    )
    """The last heartbeats of each rollout's newest term."""
    weights: WeightsAnnounced | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def apply(self, record: Record) -> None:
        """Take one record into account; those of no interest are passed over."""
        match record:
            case Admitted(group=group, trajectories=trajectories):
                if not self._is_ended(group):
                    self.admitted[group] = len(trajectories)
            case Take(groups=groups):
                for members in groups:
                    self._end(members.group, "trained")
            case GroupClosed(group=group, reason=reason):
                self._end(group, reason)
            case StepDone():
                self._step_done(record)
            case RolloutStatus():
                self._beat(record)
            case WeightsAnnounced():
                if self.weights is None or self.weights.version < record.version:
                    self.weights = record
            case _:
                pass

    def apply_finished(self, group: int) -> None:
        """A trajectory of this group finished."""
        if not self._is_ended(group):
            self.finished[group] = self.finished.get(group, 0) + 1

    def apply_evaluations(self, lines: list[dict[str, Any]]) -> None:
        """All lines of `eval.jsonl`."""
        self.evaluations = sorted(lines, key=lambda line: line["step"])

    def ready(self) -> int:
        """Open groups that are complete and wait to be trained."""
        return sum(
            self.finished.get(group, 0) >= samples for group, samples in self.admitted.items()
        )

    def counts(self) -> Mapping[str, int]:
        """Groups by how they ended (invariant 1)."""
        return {reason: len(groups) for reason, groups in self.endings.items()}

    def _step_done(self, done: StepDone) -> None:
        while self.steps and self.steps[-1].step >= done.step:  # repeated after a crash
            self.steps.pop()
        self.steps.append(done)

    def _beat(self, status: RolloutStatus) -> None:
        beats = self.rollouts.setdefault(status.rollout, deque(maxlen=BEATS_KEPT))
        if beats and status.term > beats[-1].term:
            beats.clear()
        if not beats or (status.term, status.time_s) > (beats[-1].term, beats[-1].time_s):
            beats.append(status)

    def _end(self, group: int, reason: str) -> None:
        self.endings.setdefault(reason, set()).add(group)
        self.admitted.pop(group, None)
        self.finished.pop(group, None)

    def _is_ended(self, group: int) -> bool:
        return any(group in groups for groups in self.endings.values())
