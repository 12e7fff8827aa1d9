"""Which rollouts suit which groups, as pure functions (invariant 9)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.consumers.dispatch.kinds import relative_speeds, speed_kinds
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.placement import RolloutSpeed, WaveLayout, lay_out_wave
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.streams.records import Prompt, RolloutStatus

LAYOUTS_MAX = 16  # beyond it the oldest is evicted; at most max_lag + 1 waves are open
_Key = tuple[int, tuple[tuple[str, int], ...]]


@dataclass(slots=True)
class WaveLayouts:
    """Computes and caches the layout of each wave: when its first sample is assigned, so that all
    its samples are ranked together, and again when the rollouts or their kinds change.

    With `is_ranked` each rollout gets answers of similar length, which helps only where it finishes
    its work before it takes a new version (`keep_version`). Otherwise only rollouts of unlike kinds
    are laid out. With `by_speed` False all count as equally fast.
    """

    is_ranked: bool
    groups_per_wave: int
    by_speed: bool = True
    per_group: int = 2
    held_max: int = 0
    _layouts: dict[_Key, WaveLayout | None] = field(default_factory=dict[_Key, WaveLayout | None])

    def of(
        self,
        waves: Iterable[int],
        state: DispatchState,
        lengths: LengthHistory,
        ahead: Sequence[Prompt],
    ) -> Mapping[int, WaveLayout]:
        """Returns the layouts by wave, without waves that cannot be ranked. `ahead` are the prompts
        to be admitted next.
        """
        workers = rollout_speeds(state, self.by_speed)
        names = tuple((worker.rollout, worker.kind) for worker in workers)
        if not self.is_ranked and not any(worker.kind for worker in workers):
            self.held_max = 0
            return {}
        for wave in set(waves):
            if (wave, names) not in self._layouts:
                prompts = _prompts_of(state, wave, ahead, self.groups_per_wave)
                slots = min(
                    (rollout.status.slots for rollout in state.rollouts.values()), default=1
                )
                self._layouts[wave, names] = _lay_out_if_known(
                    prompts, lengths, workers, wave, max(1, slots), self
                )
        while len(self._layouts) > LAYOUTS_MAX:
            del self._layouts[next(iter(self._layouts))]
        layout_by_wave = {wave: self._layouts.get((wave, names)) for wave in waves}
        layouts = {wave: layout for wave, layout in layout_by_wave.items() if layout is not None}
        self.held_max = max((layout.held_max for layout in layouts.values()), default=0)
        return layouts


def rollout_speeds(state: DispatchState, by_speed: bool = True) -> list[RolloutSpeed]:
    """The measured speed and kind of each living rollout, ordered by name. Speeds of unlike kinds
    are those in equal batches.
    """
    rollouts = sorted(state.rollouts.items())
    if not by_speed:
        return [RolloutSpeed(n, 1.0, r.status.preemptible) for n, r in rollouts]
    speeds = sorted(rollout.speed for _, rollout in rollouts if rollout.speed)
    # The speed of a rollout that has not generated yet.
    usual = speeds[len(speeds) // 2] if speeds else 1.0
    relative = relative_speeds({name: rollout.reports for name, rollout in rollouts})
    steady = [name for name, rollout in rollouts if _is_steady(rollout.status)]
    kinds = dict(zip(steady, speed_kinds([relative[name] for name in steady]), strict=True))
    if not any(kinds.values()):
        return [RolloutSpeed(n, r.speed or usual, r.status.preemptible) for n, r in rollouts]
    # Preemptible rollouts and those that take no work now are a kind of their own, the lowest: the
    # former get the shortest answers, and no sample waits for the latter.
    above = len(steady) < len(rollouts)
    return [
        RolloutSpeed(
            name,
            usual * relative[name],
            rollout.status.preemptible,
            kinds[name] + above if name in kinds else 0,
            rollout.status.slots,
        )
        for name, rollout in rollouts
    ]


def _is_steady(status: RolloutStatus) -> bool:
    return status.verified and status.health != "leaving" and not status.preemptible


def _prompts_of(
    state: DispatchState, wave: int, ahead: Sequence[Prompt], groups_per_wave: int
) -> list[Prompt]:
    groups = [g for g in state.groups.values() if g.admitted.wave == wave]
    prompts = [g.prompt for g in groups if g.prompt is not None]
    return [*prompts, *ahead[: max(0, groups_per_wave - len(prompts))]]


def _lay_out_if_known(
    prompts: Sequence[Prompt],
    lengths: LengthHistory,
    workers: Sequence[RolloutSpeed],
    wave: int,
    slots: int,
    layouts: WaveLayouts,
) -> WaveLayout | None:
    expected = [e for prompt in prompts if (e := lengths.expected(prompt)) is not None]
    # Too few lengths are known for a ranking.
    if not prompts or 2 * len(expected) < len(prompts):
        return None
    means = [length.mean for length in expected]
    samples, is_ranked = prompts[0].samples, layouts.is_ranked
    return lay_out_wave(means, workers, wave % 2 == 0, samples, slots, is_ranked, layouts.per_group)
