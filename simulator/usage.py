"""Sums the work of simulated rollouts and the use of their caches."""

from dataclasses import dataclass, field

BARS_MAX = 2_000  # the timeline draws at most this many bars of one rollout


@dataclass(slots=True)
class ReplicaUsage:
    """Since the start. `busy_s` is decoding and prefill, `kv_s` the integral of cached tokens,
    `held_s` the time in which there were any; `bars` are times of decoding under one version.
    """

    until_s: float = 0.0
    busy_s: float = 0.0
    kv_s: float = 0.0
    held_s: float = 0.0
    tokens: int = 0
    prefilled_tokens: int = 0
    preempted: int = 0
    bars: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])

    def add_jump(
        self, begins_s: float, now_s: float, kv: tuple[int, int], tokens: int, version: int
    ) -> None:
        """Adds the jump with `kv[0]` cached tokens before it and `kv[1]` after it."""
        if kv[0]:
            self.held_s += now_s - self.until_s
        if not tokens:
            self.kv_s += kv[0] * (now_s - self.until_s)
        else:
            lasted_s = now_s - begins_s
            self.kv_s += kv[0] * (begins_s - self.until_s) + sum(kv) / 2 * lasted_s
            self.busy_s += lasted_s
            self.tokens += tokens
            self._draw(begins_s, now_s, version)
        self.until_s = now_s

    def add_prefill(self, tokens: int, seconds: float) -> None:
        self.prefilled_tokens += tokens
        self.busy_s += seconds

    def _draw(self, begins_s: float, ends_s: float, version: int) -> None:
        if self.bars and self.bars[-1][2] == version and begins_s - self.bars[-1][1] < 1.0:
            self.bars[-1] = (self.bars[-1][0], ends_s, version)
        elif len(self.bars) < BARS_MAX:
            self.bars.append((begins_s, ends_s, version))


@dataclass(frozen=True, slots=True)
class UsageTotals:
    busy_s: float = 0.0
    kv_s: float = 0.0
    held_s: float = 0.0
    tokens: int = 0
    prefilled_tokens: int = 0

    def __add__(self, other: "UsageTotals") -> "UsageTotals":
        return UsageTotals(
            self.busy_s + other.busy_s,
            self.kv_s + other.kv_s,
            self.held_s + other.held_s,
            self.tokens + other.tokens,
            self.prefilled_tokens + other.prefilled_tokens,
        )
