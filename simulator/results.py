"""The trainer in virtual time, the measurements of a simulated run as plain values, and the
recorder that collects them during the run.

The trainer takes complete groups, oldest first, and publishes a version after `groups_per_step` of
them. It counts lag and enforces its bound `max_lag` by the rules of invariant 5.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from rollstream.simulator.cluster import Cluster, Job, SimulatedRollout
from rollstream.simulator.dispatch import SimulatedDispatch
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.replica import UsageTotals
from rollstream.simulator.workload import SimulatedTrajectory

CHUNKS = 16  # about as many parts a step has if it starts before all its groups are ready


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One trained version: its times, its samples and tokens, and its tokens by lag."""

    number: int
    begun_s: float
    ended_s: float
    samples: int
    tokens: int
    lags: Counter[int]
    dropped: int
    """Whole samples of `keep_version` whose lag was above the bound."""
    masked: int
    """Tokens of the other policies whose lag was above the bound."""


@dataclass(slots=True, eq=False)
class SimulatedTrainer:
    """The simulated trainer does one piece of work at a time: a whole step or, with `early_start`,
    a part of one. `begin` starts a piece and returns its duration; the caller lets that much
    virtual time pass, then calls `end`.
    """

    groups_per_step: int
    fixed_s: float
    token_s: float
    early_start: bool
    keep_version: bool
    max_lag: int | None
    version: int = 0
    busy_s: float = 0.0
    ready: list[tuple[int, int, tuple[SimulatedTrajectory, ...]]] = field(
        default_factory=list[tuple[int, int, tuple[SimulatedTrajectory, ...]]]
    )
    steps: list[SimulatedStep] = field(default_factory=list[SimulatedStep])
    expired: int = 0
    """Groups with no sample left to train."""
    samples_expired: int = 0
    taken: int = 0
    """Groups of the present step."""
    begun_s: float | None = None
    _piece_s: float = 0.0
    samples: int = 0
    """Samples of the present step, without `dropped` ones."""
    _tokens: int = 0
    dropped: int = 0
    _masked: int = 0
    _lags: Counter[int] = field(default_factory=Counter[int])

    def receive(self, group: int, samples: list[SimulatedTrajectory]) -> None:
        """Queue a complete group. A group's age is the newest version with which one of its samples
        began; the queue is ordered by that version, then by the group's number.
        """
        newest = max(trajectory.spans[0][0] for trajectory in samples)
        heappush(self.ready, (newest, group, tuple(samples)))

    def begin(self, now_s: float) -> float | None:
        """Take the groups of the next piece of work and return its seconds; None if too few groups
        are ready.
        """
        wanted = self.groups_per_step - self.taken
        self._expire()
        if not self.ready or (not self.early_start and len(self.ready) < wanted):
            return None
        if self.begun_s is None:
            self.begun_s = now_s
        most = max(1, self.groups_per_step // CHUNKS) if self.early_start else wanted
        tokens = 0
        for _ in range(min(most, wanted, len(self.ready))):
            tokens += sum(map(self._take, heappop(self.ready)[2]))
            self.taken += 1
        complete = self.taken == self.groups_per_step
        seconds = tokens * self.token_s + (self.fixed_s if complete else 0.0)
        self._piece_s = seconds
        return seconds

    def end(self, now_s: float) -> SimulatedStep | None:
        """Complete the piece that `begin` started; returns the step if this was its last piece."""
        self.busy_s += self._piece_s
        if self.taken < self.groups_per_step:
            return None
        assert self.begun_s is not None
        self.version += 1
        step = SimulatedStep(
            self.version, self.begun_s, now_s, self.samples, self._tokens, self._lags,
            self.dropped, self._masked,
        )  # fmt: skip
        self.steps.append(step)
        self.begun_s, self.taken, self._lags = None, 0, Counter()
        self.samples = self._tokens = self.dropped = self._masked = 0
        return step

    def _expire(self) -> None:
        """Remove groups whose samples are all above the lag bound. The queue is ordered by age, so
        they are at its front.
        """
        if not self.keep_version or self.max_lag is None:
            return
        while self.ready and all(self._is_late(trajectory) for trajectory in self.ready[0][2]):
            self.samples_expired += len(heappop(self.ready)[2])
            self.expired += 1

    def _is_late(self, trajectory: SimulatedTrajectory) -> bool:
        return self.max_lag is not None and self.version - trajectory.spans[0][0] > self.max_lag

    def _take(self, trajectory: SimulatedTrajectory) -> int:
        """Count the sample; returns the tokens that its training costs."""
        if self.keep_version and self._is_late(trajectory):
            self.dropped += 1
            return 0
        for version, tokens in trajectory.spans:
            lag = self.version - version
            if self.max_lag is not None and lag > self.max_lag:
                self._masked += tokens
            else:
                self._lags[lag] += tokens
                self._tokens += tokens
        self.samples += 1
        return trajectory.prompt + trajectory.done


ROWS_MAX = 32  # rollouts in the timeline
ARROWS_MAX = 4_000


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Counts over the whole run. Every admitted sample is in exactly one of the six counts
    `trained`, `dropped` (by lag), `expired` (with its group), `ready` (in a complete group),
    `finished_open` (in an incomplete one) and `unfinished`; `add_up` checks this (invariant 1).
    """

    admitted: int
    trained: int
    dropped: int
    expired: int
    ready: int
    finished_open: int
    unfinished: int
    moves: int
    moved_samples: int
    pulls: int
    restarts: int
    preempted: int
    failures: int
    generated_tokens: int
    lost_tokens: int
    masked_tokens: int
    prefilled_tokens: int

    def add_up(self) -> bool:
        ended = self.trained + self.dropped + self.expired
        return self.admitted == ended + self.ready + self.finished_open + self.unfinished


@dataclass(frozen=True, slots=True)
class TimelineArrow:
    """A move between two rollouts, or a pull or drain of one (`target` is `source` then)."""

    kind: str
    from_s: float
    to_s: float
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class RolloutBars:
    """The bars of one rollout in the timeline: start and end in seconds, and version."""

    name: str
    bars: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The measurements from the end of step `skip` to the end of the last step; `counts` and
    `steps` cover the whole run. Seconds are virtual.
    """

    policy: str
    tokens_per_s: float
    """Trained tokens."""
    generated_per_s: float
    step_s: float
    kv_utilisation: float
    """Mean over time and rollouts."""
    idle_share: float
    """Share of the rollouts' time without decoding, prefill and (where colocated) training."""
    trainer_idle_share: float
    lags: dict[int, float]
    """Share of the trained tokens by lag at consumption."""
    seconds: float
    counts: SampleCounts
    steps: tuple[SimulatedStep, ...]
    rows: tuple[RolloutBars, ...]
    arrows: tuple[TimelineArrow, ...]

    def lag_mean(self) -> float:
        return sum(lag * share for lag, share in self.lags.items())

    def lag_max(self) -> int:
        return max(self.lags, default=0)

    def line(self) -> dict[str, object]:
        """The JSON object that `simulate --json` prints."""
        return {
            "policy": self.policy,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "generated_per_s": round(self.generated_per_s, 1),
            "step_s": round(self.step_s, 3),
            "kv_utilisation": round(self.kv_utilisation, 4),
            "idle_share": round(self.idle_share, 4),
            "trainer_idle_share": round(self.trainer_idle_share, 4),
            "lag_mean": round(self.lag_mean(), 3),
            "lag_max": self.lag_max(),
            "lags": {str(lag): round(share, 4) for lag, share in sorted(self.lags.items())},
            "seconds": round(self.seconds, 1),
            "moves": self.counts.moves,
            "pulls": self.counts.pulls,
            "preempted": self.counts.preempted,
            "dropped": self.counts.dropped,
            "masked_tokens": self.counts.masked_tokens,
            "restarts": self.counts.restarts,
            "failures": self.counts.failures,
        }


def lag_shares(steps: Sequence[SimulatedStep]) -> dict[int, float]:
    """Share of the steps' trained tokens by lag."""
    tokens: Counter[int] = Counter()
    for step in steps:
        tokens.update(step.lags)
    total = sum(tokens.values())
    return {lag: count / total for lag, count in sorted(tokens.items())} if total else {}


@dataclass(slots=True, eq=False)
class SimulationRecorder:
    """Collects the timeline's arrows and the usage totals at the start of the measured window;
    `result` subtracts these from the totals at the end.
    """

    cluster: Cluster
    job: Job
    policy: SchedulingPolicy
    rollouts: dict[str, SimulatedRollout]
    dispatching: SimulatedDispatch
    trainer: SimulatedTrainer
    since_s: float = 0.0
    before: UsageTotals = field(default_factory=UsageTotals)
    trainer_before_s: float = 0.0
    pulls: int = 0
    arrows: list[TimelineArrow] = field(default_factory=list[TimelineArrow])

    def note_step(self, step: SimulatedStep, trainer_busy_s: float) -> None:
        """Note a finished step; the measurement starts when step `skip` ends."""
        if step.number == self.job.skip:
            self.since_s, self.before = step.ended_s, self._totals(step.ended_s)
            self.trainer_before_s = trainer_busy_s

    def note_pull(self, rollout: SimulatedRollout, now_s: float, lasts_s: float) -> None:
        """Note that the rollout pulls a version."""
        self.pulls += 1
        name = rollout.replica.name
        self._draw(TimelineArrow("pull", now_s, now_s + lasts_s, name, name))

    def note_move(
        self, source: SimulatedRollout, target: SimulatedRollout, now_s: float, lasts_s: float
    ) -> None:
        """Note that trajectories move between two rollouts."""
        names = source.replica.name, target.replica.name
        self._draw(TimelineArrow("move", now_s, now_s + lasts_s, *names))

    def note_drain_start(self, rollout: SimulatedRollout, now_s: float) -> None:
        """Note that from now on the rollout only finishes its work."""
        name = rollout.replica.name
        self._draw(TimelineArrow("drain", now_s, now_s, name, name))

    def result(
        self, now_s: float, moves: int, moved_samples: int, failures: int
    ) -> SimulationResult:
        """The measurements of a finished run that ends at `now_s`."""
        steps = tuple(self.trainer.steps)
        measured = steps[self.job.skip :]
        window_s = max(1e-12, now_s - self.since_s)
        after, count = self._totals(now_s), len(self.rollouts)
        trainer_s = self.trainer.busy_s - self.trainer_before_s
        offered_s = window_s - (trainer_s if self.policy.colocated else 0.0)
        kv_s = after.kv_s - self.before.kv_s
        return SimulationResult(
            policy=self.policy.name,
            tokens_per_s=sum(step.tokens for step in measured) / window_s,
            generated_per_s=(after.tokens - self.before.tokens) / window_s,
            step_s=window_s / len(measured),
            kv_utilisation=kv_s / (window_s * count * self.cluster.kv_capacity),
            idle_share=1 - (after.busy_s - self.before.busy_s) / max(1e-12, offered_s * count),
            trainer_idle_share=1 - trainer_s / window_s,
            lags=lag_shares(measured),
            seconds=now_s,
            counts=self._counts(after, moves, moved_samples, failures),
            steps=steps,
            rows=self._rows(),
            arrows=tuple(self.arrows),
        )

    def _counts(
        self, after: UsageTotals, moves: int, moved_samples: int, failures: int
    ) -> SampleCounts:
        dispatching, trainer = self.dispatching, self.trainer
        held = sum(rollout.held() for rollout in self.rollouts.values())
        waiting = [part for parts in dispatching.parts.values() for part in parts]
        unplaced = sum(map(len, [*dispatching.unplaced, *waiting])) + len(dispatching.unassigned)
        return SampleCounts(
            admitted=dispatching.admitted * dispatching.workload.samples,
            # With the samples of the unfinished step, whose dropped ones no step counts yet.
            trained=sum(step.samples for step in trainer.steps) + trainer.samples + trainer.dropped,
            dropped=sum(step.dropped for step in trainer.steps),
            expired=trainer.samples_expired,
            ready=sum(len(samples) for _, _, samples in trainer.ready),
            finished_open=sum(len(group.finished) for group in dispatching.groups.values()),
            unfinished=held + unplaced,
            moves=moves,
            moved_samples=moved_samples,
            pulls=self.pulls,
            restarts=dispatching.restarts,
            preempted=sum(rollout.replica.usage.preempted for rollout in self.rollouts.values()),
            failures=failures,
            generated_tokens=after.tokens,
            lost_tokens=dispatching.lost_tokens,
            masked_tokens=sum(step.masked for step in trainer.steps),
            prefilled_tokens=after.prefilled_tokens,
        )

    def _totals(self, now_s: float) -> UsageTotals:
        return sum(
            (rollout.replica.totals(now_s) for rollout in self.rollouts.values()), UsageTotals()
        )

    def _rows(self) -> tuple[RolloutBars, ...]:
        shown = list(self.rollouts.values())[:ROWS_MAX]
        return tuple(
            RolloutBars(rollout.replica.name, tuple(rollout.replica.usage.bars))
            for rollout in shown
        )

    def _draw(self, arrow: TimelineArrow) -> None:
        if len(self.arrows) < ARROWS_MAX:
            self.arrows.append(arrow)
