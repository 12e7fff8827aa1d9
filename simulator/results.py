"""The simulated trainer and the results of a run, in virtual seconds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from rollstream.simulator.cluster import Cluster, Job, SimulatedRollout
from rollstream.simulator.dispatch import SimulatedDispatch
from rollstream.simulator.policies import SchedulingPolicy
from rollstream.simulator.usage import UsageTotals
from rollstream.simulator.workload import SimulatedTrajectory

CHUNKS = 16  # with `early_start` a piece of a step has a 16th of its groups, but at least one


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Makes version `number`."""

    number: int
    begun_s: float
    ended_s: float
    samples: int
    tokens: int
    lags: Counter[int]
    dropped: int
    """Samples with all tokens above the lag bound."""
    masked: int
    """Of other samples, above the lag bound."""


@dataclass(slots=True, eq=False)
class SimulatedTrainer:
    """Trains complete groups, oldest first, a whole step at a time or, with `early_start`, a part.
    `begin` returns the duration, after which the caller calls `end`.

    A piece takes `token_s` per token, and the last one of a step `fixed_s` more. Tokens above
    `max_lag` are masked; a sample that has no others is dropped (invariant 5).
    """

    groups_per_step: int
    fixed_s: float
    token_s: float
    early_start: bool
    max_lag: int | None
    micro_batch_tokens: int = 0
    version: int = 0
    busy_s: float = 0.0
    ready: list[tuple[int, int, tuple[SimulatedTrajectory, ...]]] = field(
        default_factory=list[tuple[int, int, tuple[SimulatedTrajectory, ...]]]
    )
    """Heap of complete groups that no step has taken, as received."""
    steps: list[SimulatedStep] = field(default_factory=list[SimulatedStep])
    expired: int = 0
    """Groups with all samples above the lag bound."""
    samples_expired: int = 0
    taken: int = 0
    begun_s: float | None = None
    _piece_s: float = 0.0
    samples: int = 0
    _tokens: int = 0
    dropped: int = 0
    _masked: int = 0
    _lags: Counter[int] = field(default_factory=Counter[int])

    def receive(self, group: int, samples: list[SimulatedTrajectory]) -> None:
        """Queues a group, ordered by version (the newest with which any of its samples began), then
        number.
        """
        newest = max(trajectory.spans[0][0] for trajectory in samples)
        heappush(self.ready, (newest, group, tuple(samples)))

    def begin(self, now_s: float) -> float | None:
        """Takes the groups of the next piece and returns its seconds; None if too few are ready."""
        missing = self.groups_per_step - self.taken
        self._expire()
        if not self.ready or (len(self.ready) < missing and not self._may_start()):
            return None
        if self.begun_s is None:
            self.begun_s = now_s
        is_chunked = self.early_start and not self.micro_batch_tokens
        groups_max = max(1, self.groups_per_step // CHUNKS) if is_chunked else missing
        tokens = 0
        for _ in range(min(groups_max, missing, len(self.ready))):
            tokens += sum(map(self._take, heappop(self.ready)[2]))
            self.taken += 1
        complete = self.taken == self.groups_per_step
        seconds = tokens * self.token_s + (self.fixed_s if complete else 0.0)
        self._piece_s = seconds
        return seconds

    def end(self, now_s: float) -> SimulatedStep | None:
        """Returns the step if this was its last piece."""
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

    def _may_start(self) -> bool:
        tokens = sum(t.prompt + t.done for _, _, group in self.ready for t in group)
        return self.early_start and tokens >= self.micro_batch_tokens

    def _expire(self) -> None:
        # The queue is ordered by version.
        while self.ready and all(self._is_late(trajectory) for trajectory in self.ready[0][2]):
            self.samples_expired += len(heappop(self.ready)[2])
            self.expired += 1

    def _is_late(self, trajectory: SimulatedTrajectory) -> bool:
        return self.max_lag is not None and self.version - trajectory.spans[-1][0] > self.max_lag

    def _take(self, trajectory: SimulatedTrajectory) -> int:
        """Returns tokens that the trainer computes: prompt and answer, masked ones included; 0 if
        the sample is dropped.
        """
        if self._is_late(trajectory):
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


ROWS_MAX = 32  # rollouts in the timeline, a chart of what they do over time
ARROWS_MAX = 4_000  # arrows in the timeline


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Counts samples over the whole run. Every admitted sample is in exactly one of `trained`,
    `dropped` (by lag), `expired` (with its group), `ready` (in a complete group), `finished_open`
    (in an incomplete group) and `unfinished` (invariant 1).

    `moves` and `moved_samples` are those of repack and migration, `pulls` loads of a version,
    `restarts` samples that lost tokens, `preempted` sequences put back into a queue for want of KV
    cache, `failures` deaths of rollouts of any kind.
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
    """`move` to another rollout; `pull`, the rollout loads a version; `drain`, from now on it only
    finishes its work (`target` is `source`).
    """

    kind: str
    from_s: float
    to_s: float
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class RolloutBars:
    """The bars in the timeline: start and end of decoding in seconds, and the version."""

    name: str
    bars: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Measures from the end of step `Job.skip` to the end of the last step; `seconds`, `counts`,
    `steps`, `rows` and `arrows` cover the whole run.
    """

    policy: str
    tokens_per_s: float
    generated_per_s: float
    step_s: float
    kv_utilisation: float
    """Mean over time and rollouts."""
    kv_utilisation_held: float
    """The same while a rollout's cache holds any tokens."""
    idle_share: float
    """Of the rollouts' time: neither decoding nor prefill; without the time of training where the
    same cards train.
    """
    trainer_idle_share: float
    lags: dict[int, float]
    """Of the trained tokens, when they were trained."""
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
    tokens: Counter[int] = Counter()
    for step in steps:
        tokens.update(step.lags)
    total = sum(tokens.values())
    return {lag: count / total for lag, count in sorted(tokens.items())} if total else {}


@dataclass(slots=True, eq=False)
class SimulationRecorder:
    """The measured window starts when step `Job.skip` ends, at `since_s`; `before` holds the
    rollouts' totals of that time.
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
        """`trainer_busy_s` is the time that the trainer has worked so far."""
        if step.number == self.job.skip:
            self.since_s, self.before = step.ended_s, self._totals(step.ended_s)
            self.trainer_before_s = trainer_busy_s

    def note_pull(self, rollout: SimulatedRollout, now_s: float, lasts_s: float) -> None:
        self.pulls += 1
        name = rollout.replica.name
        self._draw(TimelineArrow("pull", now_s, now_s + lasts_s, name, name))

    def note_move(
        self, source: SimulatedRollout, target: SimulatedRollout, now_s: float, lasts_s: float
    ) -> None:
        names = source.replica.name, target.replica.name
        self._draw(TimelineArrow("move", now_s, now_s + lasts_s, *names))

    def note_drain_start(self, rollout: SimulatedRollout, now_s: float) -> None:
        name = rollout.replica.name
        self._draw(TimelineArrow("drain", now_s, now_s, name, name))

    def result(
        self, now_s: float, moves: int, moved_samples: int, failures: int
    ) -> SimulationResult:
        """Returns the result of a run that ends at `now_s`."""
        steps = tuple(self.trainer.steps)
        measured = steps[self.job.skip :]
        window_s = max(1e-12, now_s - self.since_s)
        after, count = self._totals(now_s), len(self.rollouts)
        trainer_s = self.trainer.busy_s - self.trainer_before_s
        offered_s = window_s - (trainer_s if self.policy.colocated else 0.0)
        kv_s, capacity = after.kv_s - self.before.kv_s, self.cluster.kv_capacity
        return SimulationResult(
            policy=self.policy.name,
            tokens_per_s=sum(step.tokens for step in measured) / window_s,
            generated_per_s=(after.tokens - self.before.tokens) / window_s,
            step_s=window_s / len(measured),
            kv_utilisation=kv_s / (window_s * count * capacity),
            kv_utilisation_held=kv_s / max(1e-12, (after.held_s - self.before.held_s) * capacity),
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
        placed = sum(rollout.held() for rollout in self.rollouts.values())
        waiting = [part for parts in dispatching.parts.values() for part in parts]
        unplaced = sum(map(len, [*dispatching.unplaced, *waiting])) + len(dispatching.unassigned)
        return SampleCounts(
            admitted=dispatching.admitted * dispatching.workload.samples,
            # Samples that the unfinished step has taken count as trained, dropped ones included:
            # `dropped` below has those of finished steps only.
            trained=sum(step.samples for step in trainer.steps) + trainer.samples + trainer.dropped,
            dropped=sum(step.dropped for step in trainer.steps),
            expired=trainer.samples_expired,
            ready=sum(len(samples) for _, _, samples in trainer.ready),
            finished_open=sum(len(group.finished) for group in dispatching.groups.values()),
            unfinished=placed + unplaced,
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
        shown = [rollout.replica for rollout in self.rollouts.values()][:ROWS_MAX]
        return tuple(RolloutBars(replica.name, tuple(replica.usage.bars)) for replica in shown)

    def _draw(self, arrow: TimelineArrow) -> None:
        if len(self.arrows) < ARROWS_MAX:
            self.arrows.append(arrow)
