"""Placement in the simulated cluster. Each wave is laid out once, from its prompts' length history,
by the service's planner; policies without that mechanism use plainer layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from consumers.dispatch import place as planner
from consumers.dispatch.layout import Layout, Worker, lay_out
from simulator.policies import Policy
from simulator.seat import Seat
from simulator.work import Work

WAVES_KEPT = 64  # layouts of older waves are dropped


@dataclass(slots=True, eq=False)
class Placing:
    """The layouts by wave, each with the median predicted length."""

    policy: Policy
    samples: int
    slots: int
    layouts: dict[int, tuple[Layout | None, float]] = field(
        default_factory=dict[int, tuple[Layout | None, float]]
    )

    def lay_out(self, wave: int, means: Sequence[float], rollouts: Sequence[Seat]) -> None:
        """Decide which rollouts take which prompts of the wave, by the predicted
        lengths `means`.
        """
        workers = [Worker(rollout.replica.name, rollout.speed) for rollout in rollouts]
        ascending = wave % 2 == 0
        if self.policy.ramp:
            layout = lay_out(means, workers, ascending, self.samples, self.slots)
        else:
            layout = _even(means, workers, ascending)
        self.layouts[wave] = (layout, median(means))
        self.layouts.pop(wave - WAVES_KEPT, None)

    def plan(self, groups: Sequence[list[Work]], rooms: Sequence[planner.Room]) -> dict[str, str]:
        """Map trajectories to rollouts, by the service's planner."""
        return dict(planner.place([self._work(group) for group in groups], rooms))

    def _work(self, group: list[Work]) -> planner.Work:
        layout, middle = self.layouts.get(group[0].wave, (None, 0.0))
        mean = group[0].predicted
        names = tuple(trajectory.name for trajectory in group)
        return planner.Work(names, mean, is_short=mean < middle, layout=layout)


def _even(means: Sequence[float], workers: Sequence[Worker], ascending: bool) -> Layout | None:
    """One ranking group per rollout: the first tier of HistoPipe alone."""
    ranked = tuple(sorted(means))
    if len(workers) < 2 or ranked[0] == ranked[-1]:
        return None
    names = [worker.rollout for worker in workers]
    return Layout(ranked, tuple((name,) for name in (names if ascending else names[::-1])))
