"""The measurements of a simulated run, as plain values."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.simulator.trainer import SimulatedStep


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Samples of the whole run. Every admitted sample is trained, dropped by lag, expired with its
    group, ready, finished in an incomplete group, or unfinished; `add_up` checks it (invariant 1).
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
    """Bars of a process in the timeline: start, end, version."""

    name: str
    bars: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Measured from the end of step `skip` to the end of the last step; seconds are virtual."""

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
