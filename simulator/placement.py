"""Placement in the simulated cluster. Each wave is laid out once, from its prompts' length history,
by the service's planner; policies without that mechanism use plainer layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rollstream.consumers.dispatch import place as planner
from rollstream.consumers.dispatch.placement import WaveLayout, RolloutSpeed, lay_out_wave
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.seat import SimulatedRollout
from rollstream.simulator.work import SimulatedTrajectory

LAYOUTS_MAX = 64  # layouts of older waves are dropped


@dataclass(slots=True, eq=False)
class WavePlacement:
    """The layouts by wave, each with the median predicted length."""

    policy: SchedulingPolicy
    samples: int
    slots: int
    layouts: dict[int, tuple[WaveLayout | None, float]] = field(
        default_factory=dict[int, tuple[WaveLayout | None, float]]
    )

    def lay_out(self, wave: int, means: Sequence[float], rollouts: Sequence[SimulatedRollout]) -> None:
        """Decide which rollouts take which prompts of the wave, by the predicted
        lengths `means`.
        """
        workers = [RolloutSpeed(rollout.replica.name, rollout.speed) for rollout in rollouts]
        ascending = wave % 2 == 0
        if self.policy.ramp:
            layout = lay_out_wave(means, workers, ascending, self.samples, self.slots)
        else:
            layout = _even_layout(means, workers, ascending)
        self.layouts[wave] = (layout, median(means))
        self.layouts.pop(wave - LAYOUTS_MAX, None)

    def plan(self, groups: Sequence[list[SimulatedTrajectory]], rooms: Sequence[planner.RolloutRoom]) -> dict[str, str]:
        """Map trajectories to rollouts, by the service's planner."""
        return dict(planner.place_samples([self._work(group) for group in groups], rooms))

    def _work(self, group: list[SimulatedTrajectory]) -> planner.PlacementWork:
        layout, middle = self.layouts.get(group[0].wave, (None, 0.0))
        mean = group[0].predicted
        names = tuple(trajectory.name for trajectory in group)
        return planner.PlacementWork(names, mean, is_short=mean < middle, layout=layout)


def _even_layout(means: Sequence[float], workers: Sequence[RolloutSpeed], ascending: bool) -> WaveLayout | None:
    """One ranking group per rollout: the first tier of HistoPipe alone."""
    ranked = tuple(sorted(means))
    if len(workers) < 2 or ranked[0] == ranked[-1]:
        return None
    names = [worker.rollout for worker in workers]
    return WaveLayout(ranked, tuple((name,) for name in (names if ascending else names[::-1])))
