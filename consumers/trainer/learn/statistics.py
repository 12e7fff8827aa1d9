"""Statistics of micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from rollstream.consumers.trainer.learn.mismatch import LogprobGaps


@dataclass(frozen=True, slots=True)
class LossStatistics:
    """Sums that learners add, over ranks too; the two maxima are over trained tokens. `weight` is
    the divisor of the update's gradient.

    `masked` counts generated tokens that are not trained, `halved` micro-batches that did not fit
    into memory. `ratio` is r = π/μ before truncation or clipping, as the loss uses it; `kl` sums r
    − 1 − log r; `clipped` counts truncated or clipped ratios. `advantage_squared` is over
    sequences. `objective_sums` are the objective's own (`Objective.metrics`). `gaps`
    (`mismatch.py`) are those of a step's first update only.
    """

    loss: float = 0.0
    weight: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0
    masked: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    clipped: float = 0.0
    lag: float = 0.0
    ratio_max: float = 0.0
    lag_max: float = 0.0
    advantage_squared: float = 0.0
    halved: float = 0.0
    objective_sums: Mapping[str, float] = field(default_factory=dict[str, float])
    gaps: LogprobGaps = field(default_factory=LogprobGaps)

    def __add__(self, other: "LossStatistics") -> "LossStatistics":
        def combined(name: str) -> float:
            pair: tuple[float, float] = getattr(self, name), getattr(other, name)
            return max(pair) if name.endswith("_max") else sum(pair)

        names = (f.name for f in fields(LossStatistics) if f.name not in ("objective_sums", "gaps"))
        return LossStatistics(
            **{name: combined(name) for name in names},
            objective_sums=added(self.objective_sums, other.objective_sums),
            gaps=self.gaps + other.gaps,
        )

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the N trained tokens, (Σr)² / (N Σr²): 1 on policy,
        less off policy.
        """
        return self.ratio**2 / max(max(self.tokens, 1.0) * self.ratio_squared, 1e-300)

    def metrics(self) -> dict[str, float]:
        """Returns means per trained token (`loss` per `weight`), maxima and counts. `kl` estimates
        KL(μ ‖ π) (k3 of Schulman, "Approximating KL divergence", 2020).
        """
        tokens = max(self.tokens, 1.0)
        return {
            "loss": self.loss / max(self.weight, 1.0),
            "entropy": self.entropy / tokens,
            "kl": self.kl / tokens,
            "ratio_mean": self.ratio / tokens,
            "ratio_max": self.ratio_max,
            "clipped": self.clipped / tokens,
            "ess": self.ess,
            "lag_mean": self.lag / tokens,
            "lag_max": self.lag_max,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "masked_tokens": self.masked,
            **({"micro_batches_halved": self.halved} if self.halved else {}),
            **self.gaps.metrics(),
        }


def added(sums: Mapping[str, float], others: Mapping[str, float]) -> Mapping[str, float]:
    """Returns the sums by name; a missing one counts 0."""
    names = dict.fromkeys((*sums, *others))
    return {name: sums.get(name, 0.0) + others.get(name, 0.0) for name in names}
