"""Statistics of micro-batches as sums, so that the parts of a batch add up to those of the whole.

`weight` is the divisor of the update's gradient (`loss.py`); the other fields are for metrics.
"""

from dataclasses import dataclass, field, fields

from rollstream.consumers.trainer.learn.mismatch import LogprobGaps


@dataclass(frozen=True, slots=True)
class LossStatistics:
    """Sums over trained tokens, except `sequences`, `masked` and the two maxima. `ratio` is π/μ
    before truncation or clipping, per token or per sequence as the loss uses it; `kl` sums
    r − 1 − log r. `gaps` are of the first update of a step only; `halved` counts micro-batches that
    did not fit into memory.
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
    halved: float = 0.0
    gaps: LogprobGaps = field(default_factory=LogprobGaps)

    def __add__(self, other: "LossStatistics") -> "LossStatistics":
        def combined(name: str) -> float:
            pair: tuple[float, float] = getattr(self, name), getattr(other, name)
            return max(pair) if name.endswith("_max") else sum(pair)

        names = (one.name for one in fields(LossStatistics) if one.name != "gaps")
        return LossStatistics(**{name: combined(name) for name in names}, gaps=self.gaps + other.gaps)

    def metrics(self) -> dict[str, float]:
        """Means by name. `kl` estimates KL(μ ‖ π) (k3 of Schulman, "Approximating KL divergence",
        2020). `ess` is the effective sample size as a share, (Σr)² / (N Σr²): 1 on policy, less off
        policy.
        """
        tokens = max(self.tokens, 1.0)
        return {
            "loss": self.loss / max(self.weight, 1.0),
            "entropy": self.entropy / tokens,
            "kl": self.kl / tokens,
            "ratio_mean": self.ratio / tokens,
            "ratio_max": self.ratio_max,
            "clipped": self.clipped / tokens,
            "ess": self.ratio**2 / max(tokens * self.ratio_squared, 1e-300),
            "lag_mean": self.lag / tokens,
            "lag_max": self.lag_max,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "masked_tokens": self.masked,
            **({"micro_batches_halved": self.halved} if self.halved else {}),
            **self.gaps.metrics(),
        }
