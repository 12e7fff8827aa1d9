"""Dispatch of the simulated cluster, by the service's planners. They see only what the service
sees: the length of an unfinished answer is hidden.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from rollstream.consumers.dispatch import admission, placement
from rollstream.consumers.dispatch.assignments import slot_room
from rollstream.consumers.dispatch.lengths import PROMPTS_MAX, ExpectedLength, with_sample
from rollstream.consumers.dispatch.repack import RunningRequest
from rollstream.simulator.cluster import Job, SimulatedGroup, SimulatedRollout
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.workload import SimulatedTrajectory, Workload
from rollstream.streams.values import Version

LAYOUTS_MAX = 64  # layouts kept, of the newest waves


@dataclass(slots=True, eq=False)
class WavePlacement:
    """Keeps by wave its layout and the median predicted length. A wave is laid out once: by the
    service's `lay_out_wave` (`SchedulingPolicy.ramp`), else by `_even_layout`.
    """

    policy: SchedulingPolicy
    samples: int
    slots: int
    held_max: int = 0  # samples that may wait for fast rollouts, under the newest layout
    layouts: dict[int, tuple[placement.WaveLayout | None, float]] = field(
        default_factory=dict[int, tuple[placement.WaveLayout | None, float]]
    )

    def lay_out(
        self, wave: int, means: Sequence[float], rollouts: Sequence[SimulatedRollout]
    ) -> None:
        """`means` are its prompts' predicted lengths."""
        workers = [
            placement.RolloutSpeed(
                rollout.replica.name, rollout.speed, kind=rollout.kind, slots=self.slots
            )
            for rollout in rollouts
        ]
        # A rollout with short prompts gets long ones in the next wave.
        ascending = wave % 2 == 0
        if self.policy.ramp:
            is_ranked = self.policy.on_update == "keep_version"
            layout = placement.lay_out_wave(
                means, workers, ascending, self.samples, self.slots, is_ranked
            )
            self.held_max = 0 if layout is None else layout.held_max
        else:
            layout = _even_layout(means, workers, ascending)
        self.layouts[wave] = (layout, median(means))
        self.layouts.pop(wave - LAYOUTS_MAX, None)

    def plan(
        self, groups: Sequence[list[SimulatedTrajectory]], rooms: Sequence[placement.RolloutRoom]
    ) -> dict[str, str]:
        """Returns trajectory → rollout for those that fit."""
        return dict(placement.place_samples([self._work(group) for group in groups], rooms))

    def _work(self, group: list[SimulatedTrajectory]) -> placement.PlacementWork:
        layout, middle = self.layouts.get(group[0].wave, (None, 0.0))
        mean = group[0].predicted
        names = tuple(trajectory.name for trajectory in group)
        return placement.PlacementWork(names, mean, is_short=mean < middle, layout=layout)


def _even_layout(
    means: Sequence[float], workers: Sequence[placement.RolloutSpeed], ascending: bool
) -> placement.WaveLayout | None:
    ranked = tuple(sorted(means))
    if len(workers) < 2 or ranked[0] == ranked[-1]:
        return None
    ordered = workers if ascending else workers[::-1]
    # The first tier of HistoPipe, the placement of RhymeRL (arXiv 2508.18588).
    return placement.WaveLayout(ranked, tuple((worker.rollout,) for worker in ordered))


@dataclass(slots=True, eq=False)
class LengthForecast:
    """Predicts from earlier answers to a group's prompt, as the service's `LengthHistory`, without
    a history by task.
    """

    workload: Workload
    _known: OrderedDict[int, ExpectedLength] = field(
        default_factory=OrderedDict[int, ExpectedLength]
    )

    def mean(self, number: int) -> float:
        """Returns the mean of one answer, 0 without history."""
        length = self.length_of(number)
        return 0.0 if length is None else length.mean

    def length_of(self, number: int) -> ExpectedLength | None:
        """Returns mean and spread of the answers to this group's prompt, None without history."""
        prompt = self.workload.prompt_of(number)
        if prompt not in self._known:
            # The answers of a pass before the first are known at the start, as in a run's second
            # epoch.
            for tokens in self.workload.history(prompt):
                self._add(prompt, tokens)
        return self._known.get(prompt)

    def add(self, number: int, tokens: int) -> None:
        self._add(self.workload.prompt_of(number), tokens)

    def _add(self, prompt: int, tokens: int) -> None:
        lengths = self._known
        lengths[prompt] = with_sample(lengths.get(prompt), tokens)
        # As `LengthHistory.note`: the least recently used prompt is evicted.
        lengths.move_to_end(prompt)
        if len(lengths) > PROMPTS_MAX:
            lengths.popitem(last=False)


UNBOUNDED = 1 << 30  # room of a rollout that takes any number of trajectories


@dataclass(slots=True, eq=False)
class SimulatedDispatch:
    """The loop calls `assignments` in each round and `finish` for each sample, and keeps `closed`,
    `trained` and `version` up to date.
    """

    slots: int  # of each rollout: the most trajectories that it decodes together
    job: Job
    policy: SchedulingPolicy
    workload: Workload
    rollouts: dict[str, SimulatedRollout]
    pace: admission.AdmissionPace
    placing: WavePlacement
    foresight: LengthForecast
    quota: int  # most new trajectories of a rollout under one version, see `_room`
    admitted: int = 0  # groups ever admitted, which is also the number of the next group
    closed: int = 0  # groups that ended untrained
    trained: int = 0  # groups that the trainer has taken
    version: int = 0  # the newest version that rollouts can take
    groups: dict[int, SimulatedGroup] = field(default_factory=dict[int, SimulatedGroup])
    unplaced: list[list[SimulatedTrajectory]] = field(
        default_factory=list[list[SimulatedTrajectory]]
    )
    """Trajectories that were never placed on a rollout, by admitted group."""
    parts: dict[str, list[list[SimulatedTrajectory]]] = field(
        default_factory=dict[str, list[list[SimulatedTrajectory]]]
    )
    """By rollout, the parts of waves that it has not started (`wave = "own"`)."""
    unassigned: list[SimulatedTrajectory] = field(default_factory=list[SimulatedTrajectory])
    """Trajectories whose rollout died or gave them up."""
    restarts: int = 0  # trajectories that had tokens and restarted from the prompt
    lost_tokens: int = 0  # generated tokens that restarts and failures have lost
    _ended: Counter[int] = field(default_factory=Counter[int])  # finished samples by wave

    def assignments(self) -> Iterator[tuple[SimulatedTrajectory, SimulatedRollout]]:
        """Returns the assignments of one round; the caller submits each before it takes the next
        one.
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
        """Returns all samples of its group if it was the last one."""
        group = self.groups[trajectory.group]
        group.missing -= 1
        group.finished.append(trajectory)
        rollout.tokens -= trajectory.predicted
        self._ended[trajectory.wave] += 1
        if self.policy.by_length or self.policy.drafts:
            self.foresight.add(trajectory.group, trajectory.done)
        if group.missing:
            return None
        del self.groups[trajectory.group]
        return group.finished

    def assign(self, trajectory: SimulatedTrajectory, rollout: SimulatedRollout) -> None:
        rollout.tokens += trajectory.predicted

    def restart_trajectory(self, trajectory: SimulatedTrajectory) -> None:
        self.restarts += trajectory.done > 0
        self.lost_tokens += trajectory.done
        trajectory.restart()

    def gains(self, rollout: SimulatedRollout) -> bool:
        """Whether the rollout, once empty, could take new work that it cannot take now."""
        stale = rollout.replica.version < self.version
        return stale or (self.policy.batches and rollout.drawn >= self.quota)

    def unfinished(self) -> dict[int, float]:
        """The unfinished share of each wholly admitted open wave."""
        size = self.pace.groups_per_step * self.workload.samples
        growing = self._wave()
        waves = {group.wave for group in self.groups.values() if group.wave < growing}
        return {wave: 1 - min(size, self._ended[wave]) / size for wave in waves}

    def running(
        self,
        trajectory: SimulatedTrajectory,
        rollout: SimulatedRollout,
        generated: int,
        unfinished: float,
    ) -> RunningRequest:
        """Returns the request for the service's planners, with its `generated` tokens so far and
        the `unfinished` share of its wave.
        """
        lag_left = None
        if self.pace.max_lag is not None:
            lag_left = self.pace.max_lag - (self.version - trajectory.version)
        return RunningRequest(
            trajectory=trajectory.name,
            rollout=rollout.replica.name,
            version=Version(trajectory.version, 0),
            generated=generated,
            kv=trajectory.prompt + generated,
            expected=self.foresight.length_of(trajectory.group),
            unfinished=unfinished,
            lag_left=lag_left,
            longest=self.workload.lengths.longest,
            all_members_open=not self.groups[trajectory.group].finished,
        )

    def _wave(self) -> int:
        counts = (self.admitted, self.closed, self._settled())
        return admission.wave_of(self.pace, self.version, *counts)

    def _settled(self) -> int:
        return self.version * self.pace.groups_per_step

    def _admit(self) -> None:
        allowed = admission.admissible_groups(
            self.pace, self.version, self.admitted, self.closed, self.trained, self._settled()
        )
        if self.policy.wave == "all" and self.groups:
            allowed = min(allowed, -self.admitted % self.pace.groups_per_step)
        if allowed and self.policy.wave is None:
            wave = self._wave()
            room = sum(room.free for room in self._rooms(wave))
            waiting = sum(map(len, self.unplaced))
            room = admission.room_to_admit(room, waiting, self.placing.held_max)
            allowed = min(allowed, max(0, room) // self.workload.samples)
        for _ in range(allowed):
            self._admit_one()

    def _admit_one(self) -> None:
        number, wave = self.admitted, self._wave()
        if self.policy.by_length and self.policy.drains and wave not in self.placing.layouts:
            ahead = range(number, number + self.pace.groups_per_step)
            means = [self.foresight.mean(n) for n in ahead]
            alive = [rollout for rollout in self.rollouts.values() if rollout.alive]
            if 2 * sum(mean > 0 for mean in means) >= len(means):  # as the service does
                self.placing.lay_out(wave, means, alive)
        predicted = self.foresight.mean(number) if self.policy.by_length else 0.0
        lengths, prompt = self.workload.group(number), self.workload.prompt_tokens
        turns = self.workload.turns(number, lengths)
        is_known = self.policy.drafts and self.foresight.length_of(number) is not None
        self.admitted += 1
        self.groups[number] = SimulatedGroup(wave, len(lengths))
        self.unplaced.append([
            SimulatedTrajectory(
                f"{number}.{i}", number, wave, prompt, length, predicted,
                turns=turns[i], is_known=is_known,
            )
            for i, length in enumerate(lengths)
        ])  # fmt: skip

    def _rooms(self, wave: int) -> list[placement.RolloutRoom]:
        needed = admission.version_needed(self.pace, wave)
        return [
            placement.RolloutRoom(name, room, rollout.tokens, rollout.speed, kind=rollout.kind)
            for name, rollout in self.rollouts.items()
            if rollout.is_open()
            and (rollout.replica.version >= needed or self.policy.on_update != "keep_version")
            and (room := self._room(rollout)) > 0
        ]

    def _room(self, rollout: SimulatedRollout) -> int:
        if self.policy.wave == "all":
            return UNBOUNDED - rollout.held()
        parked = len(rollout.replica.parked)
        room = slot_room(self.slots, self.job.queue_per_slot, parked) - rollout.held()
        # The quota is a bound only while a newer version waits for the rollout, or under `batches`.
        stale = rollout.replica.version < self.version and self.policy.drains
        quota = self.quota - rollout.drawn
        return max(0, min(room, quota)) if stale or self.policy.batches else max(0, room)

    def _place_new(self) -> Iterator[tuple[SimulatedTrajectory, SimulatedRollout]]:
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
                unplaced = [trajectory for trajectory in group if trajectory.name not in plan]
                rest += [unplaced] if unplaced else []
        self.unplaced = rest

    def _place_parts(self) -> Iterator[tuple[SimulatedTrajectory, SimulatedRollout]]:
        rest: list[list[SimulatedTrajectory]] = []
        for _, groups in _by_wave(self.unplaced):
            rooms = [
                placement.RolloutRoom(
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
                unplaced = [trajectory for trajectory in group if trajectory.name not in plan]
                rest += [unplaced] if unplaced else []
            for name, part in by_rollout.items():
                self.parts.setdefault(name, []).append(part)
        self.unplaced = rest
        for name, parts in self.parts.items():
            rollout = self.rollouts[name]
            # A rollout starts its part when it has finished all earlier work.
            if not parts or not rollout.is_open() or rollout.held():
                continue
            if rollout.replica.version >= admission.version_needed(self.pace, parts[0][0].wave):
                for trajectory in parts.pop(0):
                    self.assign(trajectory, rollout)
                    yield trajectory, rollout

    def _place_unassigned(self) -> Iterator[tuple[SimulatedTrajectory, SimulatedRollout]]:
        waiting, self.unassigned, keeps = self.unassigned, [], self.policy.drains
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
            # Only a rollout with its version may resume it, so it restarts in a later round.
            if keeps and trajectory.version >= 0:
                self.restart_trajectory(trajectory)
            self.unassigned.append(trajectory)


def _can_resume(
    trajectory: SimulatedTrajectory, rollout: SimulatedRollout, pace: admission.AdmissionPace
) -> bool:
    if trajectory.version >= 0:
        return rollout.replica.version == trajectory.version
    return rollout.replica.version >= admission.version_needed(pace, trajectory.wave)


def _by_wave(
    groups: Iterable[list[SimulatedTrajectory]],
) -> Iterator[tuple[int, list[list[SimulatedTrajectory]]]]:
    waves: dict[int, list[list[SimulatedTrajectory]]] = {}
    for group in groups:
        waves.setdefault(group[0].wave, []).append(group)
    yield from sorted(waves.items())
