"""The simulated runs behind `simulator.py`: set-ups under constants, best splits, and joint draws
of the assumed constants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from rollstream.simulator.cluster import constant_values
from rollstream.simulator.constants import CONSTANTS
from rollstream.simulator.experiment import (
    ClusterSettings,
    SimulationSettings,
    SimulationSetup,
    checked_constants,
    setup_of,
)
from rollstream.simulator.policies import policy_of
from rollstream.simulator.results import SimulationResult

WHOLE = ("slots", "waves_outstanding", "prompt_tokens", "length_median")
SetUp = tuple[str, int]
MIDDLE: tuple[SetUp, ...] = (("qwen2.5-7b", 128), ("qwen2.5-32b", 256), ("qwen2.5-72b", 512))
"""One set-up per model, for the ranges."""
LARGE: tuple[SetUp, ...] = (("qwen2.5-7b", 128), ("qwen2.5-32b", 512), ("qwen2.5-72b", 1024))
"""One set-up per model of which a sixteenth still has several rollouts."""


@dataclass(frozen=True, slots=True)
class Best:
    """A policy's fastest run, and the share of GPUs that gave it."""

    share: float
    result: SimulationResult

    @property
    def speed(self) -> float:
        return self.result.tokens_per_s


def bench(
    where: SetUp, scale: int, constants: Mapping[str, float] | None = None, seed: int = 0
) -> SimulationSetup:
    """One model on so many GPUs, and the simulated slice of it."""
    cluster = ClusterSettings(model=where[0], gpus=where[1])
    settings = SimulationSettings(clusters=(cluster,), scale=scale, seed=seed)
    return setup_of(settings, cluster, checked_constants(constant_values(**(constants or {}))))


def best_of(on: SimulationSetup, policies: Sequence[str]) -> dict[str, Best]:
    """Each policy under its own best split."""
    return {name: Best(*on.best(policy_of(name))) for name in policies}


def speeds(on: SimulationSetup, shares: Mapping[str, float]) -> dict[str, float]:
    """Policies under given splits."""
    return {name: on.run(policy_of(name), share).tokens_per_s for name, share in shares.items()}


def ratio(by: Sequence[Mapping[str, float]], over: str, under: str) -> float:
    """Mean over set-ups, as the published averages are."""
    return mean(one[over] / one[under] for one in by)


def drawn(count: int) -> list[dict[str, float]]:
    """Joint uniform draws of every assumed constant from its range; the same draws every time."""
    random = np.random.default_rng(0)
    assumed = {name: c for name, c in CONSTANTS.items() if c.low < c.high}
    return [
        {
            name: round(value) if name in WHOLE else value
            for name, c in assumed.items()
            for value in [float(random.uniform(c.low, c.high))]
        }
        for _ in range(count)
    ]


def shares_of(found: Mapping[str, Best]) -> dict[str, float]:
    return {name: best.share for name, best in found.items()}


def spread(numbers: Sequence[float], form: str = ".2f") -> str:
    """The smallest and the largest value."""
    return f"{min(numbers):{form}} to {max(numbers):{form}} over {len(numbers)} draws of constants"
