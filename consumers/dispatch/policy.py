"""Defines which rollout gets which trajectory. `ASSIGNMENT_POLICIES` names policies by strings
(`dispatch.placement`), so that dispatch imports only its run's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.consumers.dispatch.admission import AdmissionPace
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.settings import DispatchSettings
from rollstream.import_path import load_option
from rollstream.streams.records import Assignment, Prompt
from rollstream.streams.values import Version

ASSIGNMENT_POLICIES: Mapping[str, str] = {
    "ranks": "rollstream.consumers.dispatch.planned_policy:open_by_ranks",
    "lengths": "rollstream.consumers.dispatch.planned_policy:open_by_lengths",
    "room": "rollstream.consumers.dispatch.planned_policy:open_by_room",
}
"""`module:function` that opens the policy (`OpenPolicy`)."""


@dataclass(frozen=True, slots=True)
class PolicyScope:
    """The settings and functions of a run that its policy needs."""

    settings: DispatchSettings
    pace: AdmissionPace
    keep_version: bool
    has_adapters: bool
    """Whether versions are adapters, of which a rollout serves several side by side."""
    bytes_of: Callable[[Version], int | None]
    """Returns the bytes to load a version; None if it is no longer stored."""

    @property
    def needs_empty(self) -> bool:
        """Whether a rollout must be empty before it takes new weights."""
        return self.keep_version and not self.has_adapters


@dataclass(frozen=True, slots=True)
class PlannedAssignment:
    record: Assignment
    discards_tokens: bool


@dataclass(frozen=True, slots=True)
class MoveSummary:
    """The number of requests that move between two rollouts."""

    source: str
    destination: str
    requests: int


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The releases by which rollouts give trajectories up, and the restarts on the newest
    version.
    """

    releases: tuple[Assignment, ...] = ()
    restarts: tuple[PlannedAssignment, ...] = ()
    summaries: tuple[MoveSummary, ...] = ()


class AssignmentPolicy(Protocol):
    """Plans from dispatch's state; planning changes no argument (invariant 9), and dispatch appends
    the records. A method may keep measurements for its next call, but the policy must work without
    them after a crash.
    """

    def plan(
        self, state: DispatchState, lengths: LengthHistory, ahead: Sequence[Prompt], now_s: float
    ) -> list[PlannedAssignment]:
        """Returns the assignments that can be given now: at most one for each open trajectory that
        no living rollout generates, to rollouts that have room. Under `keep_version` a resume goes
        to a rollout that serves its version or loads it (invariant 4).
        """
        ...

    def room(self, state: DispatchState) -> int:
        """Returns how many new samples may be admitted now; a negative number counts as none."""
        ...

    def move(self, state: DispatchState, lengths: LengthHistory, now_s: float) -> MovePlan | None:
        """The moves that are due now; None while none is due."""
        ...


OpenPolicy = Callable[[PolicyScope], AssignmentPolicy]


def open_policy(scope: PolicyScope) -> AssignmentPolicy:
    opener: OpenPolicy = load_option(ASSIGNMENT_POLICIES[scope.settings.placement])
    return opener(scope)
