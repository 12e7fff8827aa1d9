"""The policies of `dispatch.placement`: steps of a planner, and repack."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.consumers.dispatch.layouts import WaveLayouts
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.moves import RepackPlanner
from rollstream.consumers.dispatch.planner import (
    AssignmentPlanner,
    IsLoadable,
    Moved,
    PlanStep,
    Resumed,
    Started,
)
from rollstream.consumers.dispatch.policy import MovePlan, PlannedAssignment, PolicyScope
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.dispatch.tails import TailsFilled
from rollstream.consumers.dispatch.version_reload import Reloaded, VersionReload
from rollstream.streams.records import Prompt
from rollstream.streams.values import Version


@dataclass(slots=True)
class PlannedPolicy:
    planner: AssignmentPlanner
    repack: RepackPlanner | None = None

    def plan(
        self, state: DispatchState, lengths: LengthHistory, ahead: Sequence[Prompt], now_s: float
    ) -> list[PlannedAssignment]:
        return self.planner.plan(state, lengths, ahead, now_s)

    def room(self, state: DispatchState) -> int:
        return self.planner.room(state)

    def move(self, state: DispatchState, lengths: LengthHistory, now_s: float) -> MovePlan | None:
        plan = None if self.repack is None else self.repack.plan(state, lengths, now_s)
        if plan is None:
            return None
        restarts = self.planner.restart_on_newest(state, plan.restarts, lengths)
        return MovePlan(plan.releases, tuple(restarts), plan.summaries())


def open_by_ranks(scope: PolicyScope) -> PlannedPolicy:
    """Expected lengths, and under `keep_version` ranking groups of rollouts."""
    # Under the other update modes a mix of long and short answers fills a batch best.
    return _policy(scope, is_ranked=scope.needs_empty, by_length=True)


def open_by_lengths(scope: PolicyScope) -> PlannedPolicy:
    """Expected lengths alone, the longest first."""
    return _policy(scope, is_ranked=False, by_length=True)


def open_by_room(scope: PolicyScope) -> PlannedPolicy:
    """No lengths: where most slots are free."""
    return _policy(scope, is_ranked=False, by_length=False)


def _policy(scope: PolicyScope, is_ranked: bool, by_length: bool) -> PlannedPolicy:
    settings, pace, needs_empty = scope.settings, scope.pace, scope.needs_empty
    waves = WaveLayouts(
        is_ranked, pace.groups_per_step, settings.by_speed, settings.rollouts_per_rank
    )
    steps: list[PlanStep] = [Moved()]
    if needs_empty:
        reload = VersionReload(scope.bytes_of, settings.load_bytes_per_s, pace.max_lag)
        steps.append(Reloaded(reload))
    steps += [Resumed(), Started(waves, by_length)]
    if needs_empty and settings.fill_tails and by_length:
        steps.append(TailsFilled())
    planner = AssignmentPlanner(
        pace,
        scope.keep_version,
        settings.queue_per_slot,
        steps,
        settings.by_speed,
        _loadable_adapters(scope) if scope.keep_version and scope.has_adapters else None,
    )
    repack = None
    if needs_empty and settings.repack:
        every_s, groups = settings.repack_every_s, pace.groups_per_step
        repack = RepackPlanner(every_s, pace.max_lag, groups, settings.by_speed)
    return PlannedPolicy(planner, repack)


def _loadable_adapters(scope: PolicyScope) -> IsLoadable:
    max_lag = scope.pace.max_lag

    def is_loadable(state: DispatchState, version: Version) -> bool:
        lag = state.version.number - version.number
        return (max_lag is None or lag <= max_lag) and scope.bytes_of(version) is not None

    return is_loadable
