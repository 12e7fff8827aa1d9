"""Placement in the simulated cluster, and the predicted answer lengths that it uses.

Each wave is laid out once, from its prompts' length history, by the service's planner; policies
without that mechanism use plainer layouts. The history follows the rule of the service's length
history and is updated with finished answers. It starts with one full pass over the prompts, as in a
run's second epoch. Prompts are identified by number, so nothing is hashed. There is no history by
task.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rollstream.consumers.dispatch import placement as planner
from rollstream.consumers.dispatch.lengths import PROMPTS_MAX, ExpectedLength, with_sample
from rollstream.consumers.dispatch.placement import RolloutSpeed, WaveLayout, lay_out_wave
from rollstream.simulator.cluster import SimulatedRollout
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.workload import SimulatedTrajectory, Workload

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

    def lay_out(
        self, wave: int, means: Sequence[float], rollouts: Sequence[SimulatedRollout]
    ) -> None:
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

    def plan(
        self, groups: Sequence[list[SimulatedTrajectory]], rooms: Sequence[planner.RolloutRoom]
    ) -> dict[str, str]:
        """Map trajectories to rollouts, by the service's planner."""
        return dict(planner.place_samples([self._work(group) for group in groups], rooms))

    def _work(self, group: list[SimulatedTrajectory]) -> planner.PlacementWork:
        layout, middle = self.layouts.get(group[0].wave, (None, 0.0))
        mean = group[0].predicted
        names = tuple(trajectory.name for trajectory in group)
        return planner.PlacementWork(names, mean, is_short=mean < middle, layout=layout)


def _even_layout(
    means: Sequence[float], workers: Sequence[RolloutSpeed], ascending: bool
) -> WaveLayout | None:
    """One ranking group per rollout: the first tier of HistoPipe alone."""
    ranked = tuple(sorted(means))
    if len(workers) < 2 or ranked[0] == ranked[-1]:
        return None
    names = [worker.rollout for worker in workers]
    return WaveLayout(ranked, tuple((name,) for name in (names if ascending else names[::-1])))


@dataclass(slots=True, eq=False)
class LengthForecast:
    """Length histories, looked up by group number."""

    workload: Workload
    _known: OrderedDict[int, ExpectedLength] = field(
        default_factory=OrderedDict[int, ExpectedLength]
    )

    def mean(self, number: int) -> float:
        """Predicted tokens of one answer, 0 without history."""
        found = self.length_of(number)
        return 0.0 if found is None else found.mean

    def length_of(self, number: int) -> ExpectedLength | None:
        prompt = self.workload.prompt_of(number)
        if prompt not in self._known:
            for tokens in self.workload.earlier(prompt):
                self._add(prompt, tokens)
        return self._known.get(prompt)

    def add(self, number: int, tokens: int) -> None:
        """Add one finished answer."""
        self._add(self.workload.prompt_of(number), tokens)

    def _add(self, prompt: int, tokens: int) -> None:
        """Like `LengthHistory.note`: the least recently used history is evicted."""
        known = self._known
        known[prompt] = with_sample(known.get(prompt), tokens)
        known.move_to_end(prompt)
        if len(known) > PROMPTS_MAX:
            known.popitem(last=False)
