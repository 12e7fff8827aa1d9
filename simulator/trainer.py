"""The trainer in virtual time: it takes complete groups, oldest first, and publishes a version
after B of them. Lag is counted and bounded by invariant 5.
"""

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush

from rollstream.simulator.workload import SimulatedTrajectory

CHUNKS = 16  # pieces of a step, at most, if it starts before all its groups are ready


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
    """`begin` starts the next piece of work and returns its duration, or None if it cannot start;
    `end` completes it.
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
    _lasts_s: float = 0.0
    _samples: int = 0
    _tokens: int = 0
    _dropped: int = 0
    _masked: int = 0
    _lags: Counter[int] = field(default_factory=Counter[int])

    def receive(self, group: int, samples: list[SimulatedTrajectory]) -> None:
        """Queue a complete group. The queue is ordered by the group's newest first version, then by
        number.
        """
        newest = max(trajectory.spans[0][0] for trajectory in samples)
        heappush(self.ready, (newest, group, tuple(samples)))

    def begin(self, now_s: float) -> float | None:
        """Take the groups of the next piece of work; returns its seconds, or None if too few groups
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
        self._lasts_s = seconds
        return seconds

    def end(self, now_s: float) -> SimulatedStep | None:
        """Complete the piece; returns the step if this was its last piece."""
        self.busy_s += self._lasts_s
        if self.taken < self.groups_per_step:
            return None
        assert self.begun_s is not None
        self.version += 1
        step = SimulatedStep(
            self.version, self.begun_s, now_s, self._samples, self._tokens, self._lags,
            self._dropped, self._masked,
        )  # fmt: skip
        self.steps.append(step)
        self.begun_s, self.taken, self._lags = None, 0, Counter()
        self._samples = self._tokens = self._dropped = self._masked = 0
        return step

    def step_samples(self) -> int:
        """Samples of the present step, including dropped ones."""
        return self._samples + self._dropped

    def _expire(self) -> None:
        """Remove groups whose samples are all too old; they are at the front of the queue."""
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
            self._dropped += 1
            return 0
        for version, tokens in trajectory.spans:
            lag = self.version - version
            if self.max_lag is not None and lag > self.max_lag:
                self._masked += tokens
            else:
                self._lags[lag] += tokens
                self._tokens += tokens
        self._samples += 1
        return trajectory.prompt + trajectory.done
