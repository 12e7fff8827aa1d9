"""Computes the number of groups that may start now, and lays the newest waves out over rollouts.

The bound on lag (invariant 5) has priority: a layout only chooses the rollouts of groups that may
start. The functions are pure (invariant 9); `WaveLayouts` caches their results.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.placement import RolloutSpeed, WaveLayout, lay_out_wave
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.streams.records import Prompt


@dataclass(frozen=True, slots=True)
class AdmissionPace:
    """Holds the settings that bound admission; `waves_max` is the number of steps of the run."""

    groups_per_step: int
    max_lag: int | None
    ready_groups_max: int
    waves_max: int


def admissible_groups(
    pace: AdmissionPace, version: int, admitted: int, closed: int, trained: int
) -> int:
    """Returns the number of groups that may be admitted now, by the bound of AReaL
    (arXiv 2505.24298, section on staleness control), written on version numbers so that a version
    seen late or twice changes nothing. All terms count groups.

    `admitted` counts all groups ever admitted, `closed` those that ended untrained (filtered,
    expired, dead), so closed groups never stall admission; `admitted − closed` is the number of
    accepted plus running groups. Without `max_lag` at most `ready_groups_max` of these may be
    untrained. A group admitted at wave w is trained by step w + 1, from version w: it may start at
    version w − `max_lag`, no earlier.
    """
    outstanding = admitted - closed
    if pace.max_lag is None:
        allowed = pace.ready_groups_max + trained
    else:
        allowed = (pace.max_lag + version + 1) * pace.groups_per_step
    return max(0, min(allowed, pace.waves_max * pace.groups_per_step) - outstanding)


def wave_of(pace: AdmissionPace, admitted: int, closed: int) -> int:
    """Returns the wave of the next admitted group; a refill of a closed group joins the wave that
    it completes.
    """
    return (admitted - closed) // pace.groups_per_step


def version_needed(pace: AdmissionPace, wave: int) -> int:
    """Returns the smallest version number under which a group of this wave may start and still obey
    `max_lag`.
    """
    return 0 if pace.max_lag is None else max(0, wave - pace.max_lag)


LAYOUTS_MAX = 16  # beyond it the oldest is evicted; at most max_lag + 1 waves are open

_Key = tuple[int, tuple[str, ...]]


@dataclass(slots=True)
class WaveLayouts:
    """Caches layouts by wave; there are none unless `enabled`. A wave is laid out when its first
    sample is assigned, so that it has one ranking, and again when a rollout comes or goes.

    A layout ranks prompts by expected length (`placement.py`), which helps only where a rollout
    finishes its work before it continues with a new version (`keep_version`); under the other
    policies a mix of long and short answers fills a batch best.
    """

    enabled: bool
    groups_per_wave: int
    _layouts: dict[_Key, WaveLayout | None] = field(default_factory=dict[_Key, WaveLayout | None])

    def of(
        self,
        waves: Iterable[int],
        state: DispatchState,
        lengths: LengthHistory,
        ahead: Sequence[Prompt],
    ) -> Mapping[int, WaveLayout]:
        """Returns the layouts of those waves that can be ranked."""
        if not self.enabled:
            return {}
        workers = rollout_speeds(state)
        names = tuple(worker.rollout for worker in workers)
        for wave in set(waves):
            if (wave, names) not in self._layouts:
                prompts = _prompts_of(state, wave, ahead, self.groups_per_wave)
                slots = min(
                    (rollout.status.slots for rollout in state.rollouts.values()), default=1
                )
                layout = _lay_out_if_known(prompts, lengths, workers, wave, max(1, slots))
                self._layouts[wave, names] = layout
        while len(self._layouts) > LAYOUTS_MAX:
            del self._layouts[next(iter(self._layouts))]
        found = {wave: self._layouts.get((wave, names)) for wave in waves}
        return {wave: layout for wave, layout in found.items() if layout is not None}


def rollout_speeds(state: DispatchState) -> list[RolloutSpeed]:
    """Returns the speed of each living rollout, by name; one that has not generated yet gets the
    median.
    """
    speeds = sorted(rollout.speed for rollout in state.rollouts.values() if rollout.speed)
    usual = speeds[len(speeds) // 2] if speeds else 1.0
    return [
        RolloutSpeed(name, rollout.speed or usual, rollout.status.preemptible)
        for name, rollout in sorted(state.rollouts.items())
    ]


def _prompts_of(
    state: DispatchState, wave: int, ahead: Sequence[Prompt], most: int
) -> list[Prompt]:
    """Returns the wave's known prompts: those of its open groups, and the next ones to be
    admitted.
    """
    groups = [g for g in state.groups.values() if g.admitted.wave == wave]
    prompts = [g.prompt for g in groups if g.prompt is not None]
    return [*prompts, *ahead[: max(0, most - len(prompts))]]


def _lay_out_if_known(
    prompts: Sequence[Prompt],
    lengths: LengthHistory,
    workers: Sequence[RolloutSpeed],
    wave: int,
    slots: int,
) -> WaveLayout | None:
    """Returns the layout; None while less than half of the wave has a length history."""
    known = [found for prompt in prompts if (found := lengths.expected(prompt)) is not None]
    if not prompts or 2 * len(known) < len(prompts):
        return None
    means = [length.mean for length in known]
    return lay_out_wave(means, workers, wave % 2 == 0, prompts[0].samples, slots)
