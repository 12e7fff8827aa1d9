"""Dispatches in the simulated cluster with the planners of the real service
(`rollstream/consumers/dispatch`), over values of the simulator. The planners see only the fields of
a rollout's status; the length of an unfinished answer is hidden.

Each wave is laid out once, from its prompts' length history, by the service's planner; policies
without that mechanism use plainer layouts. The history follows the rule of the service's length
history and is updated with finished answers. It starts with one full pass over the prompts, as in a
run's second epoch. Prompts are identified by number, so nothing is hashed. There is no history by
task.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from rollstream.consumers.dispatch.admission import (
    AdmissionPace,
    admissible_groups,
    version_needed,
    wave_of,
)
from rollstream.consumers.dispatch.lengths import PROMPTS_MAX, ExpectedLength, with_sample
from rollstream.consumers.dispatch.placement import (
    PlacementWork,
    RolloutRoom,
    RolloutSpeed,
    WaveLayout,
    lay_out_wave,
    place_samples,
)
from rollstream.consumers.dispatch.repack import RunningRequest
from rollstream.simulator.cluster import Job, SimulatedGroup, SimulatedRollout
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.workload import SimulatedTrajectory, Workload
from rollstream.streams.values import Version

LAYOUTS_MAX = 64  # layouts of older waves are dropped


@dataclass(slots=True, eq=False)
class WavePlacement:
    """Keeps, by wave, the layout (which rollouts take prompts of which predicted length) and the
    median predicted length.
    """

    policy: SchedulingPolicy
    samples: int
    slots: int
    layouts: dict[int, tuple[WaveLayout | None, float]] = field(
        default_factory=dict[int, tuple[WaveLayout | None, float]]
    )

    def lay_out(
        self, wave: int, means: Sequence[float], rollouts: Sequence[SimulatedRollout]
    ) -> None:
        """Decide which rollouts take which prompts of the wave, by the predicted lengths
        `means`.
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
        self, groups: Sequence[list[SimulatedTrajectory]], rooms: Sequence[RolloutRoom]
    ) -> dict[str, str]:
        """Map trajectories to rollouts with the service's `place_samples`."""
        return dict(place_samples([self._work(group) for group in groups], rooms))

    def _work(self, group: list[SimulatedTrajectory]) -> PlacementWork:
        layout, middle = self.layouts.get(group[0].wave, (None, 0.0))
        mean = group[0].predicted
        names = tuple(trajectory.name for trajectory in group)
        return PlacementWork(names, mean, is_short=mean < middle, layout=layout)


def _even_layout(
    means: Sequence[float], workers: Sequence[RolloutSpeed], ascending: bool
) -> WaveLayout | None:
    """Returns a layout with one ranking group per rollout, which is the first tier of HistoPipe
    alone; None for one rollout or equal predictions.
    """
    ranked = tuple(sorted(means))
    if len(workers) < 2 or ranked[0] == ranked[-1]:
        return None
    names = [worker.rollout for worker in workers]
    return WaveLayout(ranked, tuple((name,) for name in (names if ascending else names[::-1])))


@dataclass(slots=True, eq=False)
class LengthForecast:
    """Predicts answer lengths from the prompts' histories, looked up by group number."""

    workload: Workload
    _known: OrderedDict[int, ExpectedLength] = field(
        default_factory=OrderedDict[int, ExpectedLength]
    )

    def mean(self, number: int) -> float:
        """Returns the predicted tokens of one answer, 0 without history."""
        found = self.length_of(number)
        return 0.0 if found is None else found.mean

    def length_of(self, number: int) -> ExpectedLength | None:
        prompt = self.workload.prompt_of(number)
        if prompt not in self._known:
            for tokens in self.workload.history(prompt):
                self._add(prompt, tokens)
        return self._known.get(prompt)

    def add(self, number: int, tokens: int) -> None:
        """Add one finished answer."""
        self._add(self.workload.prompt_of(number), tokens)

    def _add(self, prompt: int, tokens: int) -> None:
        """Add the sample as `LengthHistory.note` does, which evicts the least recently used
        history.
        """
        known = self._known
        known[prompt] = with_sample(known.get(prompt), tokens)
        known.move_to_end(prompt)
        if len(known) > PROMPTS_MAX:
            known.popitem(last=False)


UNBOUNDED = 1 << 30


@dataclass(slots=True, eq=False)
class SimulatedDispatch:
    """Admits groups, places their trajectories, and keeps trajectories without a rollout. `groups`
    are the open groups by number.
    """

    slots: int
    job: Job
    policy: SchedulingPolicy
    workload: Workload
    rollouts: dict[str, SimulatedRollout]
    pace: AdmissionPace
    placing: WavePlacement
    foresight: LengthForecast
    quota: int
    admitted: int = 0
    closed: int = 0
    trained: int = 0
    version: int = 0
    groups: dict[int, SimulatedGroup] = field(default_factory=dict[int, SimulatedGroup])
    unplaced: list[list[SimulatedTrajectory]] = field(
        default_factory=list[list[SimulatedTrajectory]]
    )
    """Groups that are admitted and not completely assigned; each list has the unassigned
    trajectories.
    """
    parts: dict[str, list[list[SimulatedTrajectory]]] = field(
        default_factory=dict[str, list[list[SimulatedTrajectory]]]
    )
    """By rollout, its parts of waves, which the rollout takes one after another (policies with
    `wave = "own"`).
    """
    unassigned: list[SimulatedTrajectory] = field(default_factory=list[SimulatedTrajectory])
    """Trajectories that were assigned before and lost their rollout, which died or gave them up."""
    restarts: int = 0
    lost_tokens: int = 0
    _ended: Counter[int] = field(default_factory=Counter[int])

    def assignments(self) -> Iterator[tuple[SimulatedTrajectory, SimulatedRollout]]:
        """Admit new groups and place waiting trajectories, as far as there is room; yields each
        assignment.
        """
        yield from self._place_unassigned()
        self._admit()
        if self.policy.wave == "own":
            yield from self._place_parts()
        elif self.unplaced:
            yield from self._place_new()

    def finish(
        self, trajectory: SimulatedTrajectory, rollout: SimulatedRollout
    ) -> list[SimulatedTrajectory] | None:
        """Note a finished sample; returns all samples of its group if it was the last one."""
        group = self.groups[trajectory.group]
        group.missing -= 1
        group.finished.append(trajectory)
        rollout.tokens -= trajectory.predicted
        self._ended[trajectory.wave] += 1
        if self.policy.by_length:
            self.foresight.add(trajectory.group, trajectory.done)
        if group.missing:
            return None
        del self.groups[trajectory.group]
        return group.finished

    def assign(self, trajectory: SimulatedTrajectory, rollout: SimulatedRollout) -> None:
        """Count the trajectory's predicted tokens for this rollout."""
        rollout.tokens += trajectory.predicted

    def restart_trajectory(self, trajectory: SimulatedTrajectory) -> None:
        """Restart the trajectory: no rollout holds its version, or the repack plan restarts it."""
        self.restarts += trajectory.done > 0
        self.lost_tokens += trajectory.done
        trajectory.restart()

    def gains(self, rollout: SimulatedRollout) -> bool:
        """Returns whether the rollout, once empty, could take new work that it cannot take now."""
        stale = rollout.replica.version < self.version
        return stale or (self.policy.batches and rollout.drawn >= self.quota)

    def unfinished(self) -> dict[int, float]:
        """Returns the unfinished share of each open wave. A wave that is still being admitted is
        left out.
        """
        size = self.pace.groups_per_step * self.workload.samples
        growing = wave_of(self.pace, self.admitted, self.closed)
        waves = {group.wave for group in self.groups.values() if group.wave < growing}
        return {wave: 1 - min(size, self._ended[wave]) / size for wave in waves}

    def running(
        self,
        trajectory: SimulatedTrajectory,
        rollout: SimulatedRollout,
        generated: int,
        unfinished: float,
    ) -> RunningRequest:
        """Returns a running trajectory in the form of the service's planners; `generated` is its
        number of tokens, `unfinished` the unfinished share of its wave.
        """
        left = None
        if self.pace.max_lag is not None:
            left = self.pace.max_lag - (self.version - trajectory.version)
        return RunningRequest(
            trajectory=trajectory.name,
            rollout=rollout.replica.name,
            version=Version(trajectory.version, 0),
            generated=generated,
            kv=trajectory.prompt + generated,
            expected=self.foresight.length_of(trajectory.group),
            unfinished=unfinished,
            lag_left=left,
            longest=self.workload.lengths.longest,
            all_members_open=not self.groups[trajectory.group].finished,
        )

    def _admit(self) -> None:
        allowed = admissible_groups(
            self.pace, self.version, self.admitted, self.closed, self.trained
        )
        if self.policy.wave == "all" and self.groups:
            allowed = min(allowed, -self.admitted % self.pace.groups_per_step)
        if allowed and self.policy.wave is None:
            wave = wave_of(self.pace, self.admitted, self.closed)
            room = sum(room.free for room in self._rooms(wave))
            waiting = sum(map(len, self.unplaced))
            allowed = min(allowed, max(0, room - waiting) // self.workload.samples)
        for _ in range(allowed):
            self._admit_one()

    def _admit_one(self) -> None:
        number, wave = self.admitted, wave_of(self.pace, self.admitted, self.closed)
        if self.policy.by_length and wave not in self.placing.layouts:
            ahead = range(number, number + self.pace.groups_per_step)
            means = [self.foresight.mean(n) for n in ahead]
            alive = [rollout for rollout in self.rollouts.values() if rollout.alive]
            if 2 * sum(mean > 0 for mean in means) >= len(means):  # as in `admission.py`
                self.placing.lay_out(wave, means, alive)
        predicted = self.foresight.mean(number) if self.policy.by_length else 0.0
        lengths, prompt = self.workload.group(number), self.workload.prompt_tokens
        self.admitted += 1
        self.groups[number] = SimulatedGroup(wave, len(lengths))
        self.unplaced.append([
            SimulatedTrajectory(f"{number}.{i}", number, wave, prompt, length, predicted)
            for i, length in enumerate(lengths)
        ])  # fmt: skip

    def _rooms(self, wave: int) -> list[RolloutRoom]:
        """Returns the rollouts with room for new trajectories of this wave, under a version that
        the wave allows.
        """
        needed = version_needed(self.pace, wave)
        return [
            RolloutRoom(name, room, rollout.tokens, rollout.speed)
            for name, rollout in self.rollouts.items()
            if rollout.is_open()
            and (rollout.replica.version >= needed or self.policy.on_update != "keep_version")
            and (room := self._room(rollout)) > 0
        ]

    def _room(self, rollout: SimulatedRollout) -> int:
        if self.policy.wave == "all":
            return UNBOUNDED - rollout.held()
        room = self.slots + int(self.job.queue_per_slot * self.slots) - rollout.held()
        stale = rollout.replica.version < self.version and self.policy.on_update == "keep_version"
        quota = self.quota - rollout.drawn
        return max(0, min(room, quota)) if stale or self.policy.batches else max(0, room)

    def _place_new(self) -> Iterator[tuple[SimulatedTrajectory, SimulatedRollout]]:
        """Place unplaced groups, oldest wave first."""
        rest: list[list[SimulatedTrajectory]] = []
        for wave, groups in _by_wave(self.unplaced):
            rooms = self._rooms(wave)
            if self.policy.by_length:  # long answers start first, as in the service
                groups = sorted(groups, key=lambda g: (-g[0].predicted, g[0].group))
            plan = self.placing.plan(groups, rooms) if rooms else {}
            for group in groups:
                for trajectory in group:
                    if trajectory.name in plan:
                        rollout = self.rollouts[plan[trajectory.name]]
                        rollout.drawn += 1
                        self.assign(trajectory, rollout)
                        yield trajectory, rollout
                left = [trajectory for trajectory in group if trajectory.name not in plan]
                rest += [left] if left else []
        self.unplaced = rest

    def _place_parts(self) -> Iterator[tuple[SimulatedTrajectory, SimulatedRollout]]:
        """Place whole waves as soon as any rollout is alive. A rollout takes its part of a wave
        when it has finished the previous part and holds a version that the wave allows.
        """
        rest: list[list[SimulatedTrajectory]] = []
        for _, groups in _by_wave(self.unplaced):
            rooms = [
                RolloutRoom(
                    name, UNBOUNDED, sum(w.predicted for p in self.parts.get(name, []) for w in p),
                     rollout.speed)
                for name, rollout in self.rollouts.items() if rollout.alive
            ]  # fmt: skip
            plan = self.placing.plan(groups, rooms)
            by_rollout: dict[str, list[SimulatedTrajectory]] = {}
            for group in groups:
                for trajectory in group:
                    if trajectory.name in plan:
                        by_rollout.setdefault(plan[trajectory.name], []).append(trajectory)
                left = [trajectory for trajectory in group if trajectory.name not in plan]
                rest += [left] if left else []
            for name, part in by_rollout.items():
                self.parts.setdefault(name, []).append(part)
        self.unplaced = rest
        for name, parts in self.parts.items():
            rollout = self.rollouts[name]
            if not parts or not rollout.is_open() or rollout.held():
                continue
            if rollout.replica.version >= version_needed(self.pace, parts[0][0].wave):
                for trajectory in parts.pop(0):
                    self.assign(trajectory, rollout)
                    yield trajectory, rollout

    def _place_unassigned(self) -> Iterator[tuple[SimulatedTrajectory, SimulatedRollout]]:
        """Place trajectories that lost their rollout. Under `keep_version` only a rollout with
        their version may resume them; without one they restart from the prompt.
        """
        waiting, self.unassigned = self.unassigned, []
        keeps = self.policy.on_update == "keep_version"
        for trajectory in waiting:
            able = [
                rollout
                for rollout in self.rollouts.values()
                if rollout.is_open() and (not keeps or _can_resume(trajectory, rollout, self.pace))
            ]
            if able:
                rollout = min(able, key=lambda s: (s.held(), s.replica.name))
                self.assign(trajectory, rollout)
                yield trajectory, rollout
                continue
            if keeps and trajectory.version >= 0:
                self.restart_trajectory(trajectory)
            self.unassigned.append(trajectory)


def _can_resume(
    trajectory: SimulatedTrajectory, rollout: SimulatedRollout, pace: AdmissionPace
) -> bool:
    if trajectory.version >= 0:
        return rollout.replica.version == trajectory.version
    return rollout.replica.version >= version_needed(pace, trajectory.wave)


def _by_wave(
    groups: Iterable[list[SimulatedTrajectory]],
) -> Iterator[tuple[int, list[list[SimulatedTrajectory]]]]:
    waves: dict[int, list[list[SimulatedTrajectory]]] = {}
    for group in groups:
        waves.setdefault(group[0].wave, []).append(group)
    yield from sorted(waves.items())
