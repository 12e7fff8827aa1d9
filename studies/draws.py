"""Joint draws of what the papers leave open, and the published figures as simulated under one draw.

A draw has the model and its GPUs, lengths and their limit, KV capacity, slots, the split of the
GPUs, the size of a group, outstanding work, the lag bound of the systems that have one, how often
they send weights per batch, and all assumed constants. A family is the figures of one paper, which
are simulated together; each is drawn as often as its runs permit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulator.runs import WHOLE, SetUp, bench
from benchmarks.simulator.simulator import PUBLISHED, SET_UPS
from rollstream.simulator.constants import CONSTANTS, MODELS
from rollstream.simulator.policies import SYNCHRONOUS, SchedulingPolicy, policy_of
from rollstream.simulator.results import SimulationResult

BATCH = 8192  # answers of a step
STEPS = {"steps": 8.0, "steps_skipped": 3.0}
OPEN_RANGES = {
    "length_median": (400.0, 6_000.0),
    "length_p99_over_median": (3.0, 20.0),
    "length_between_prompts": (0.3, 0.97),
    "memory_share": (0.35, 0.9),
    "memory_share_colocated": (0.35, 0.85),
    "slots": (64.0, 1_024.0),
    "waves_outstanding": (2.0, 9.0),
    "quota_waves": (0.25, 8.0),
}
"""Wider than those of the constants."""
LOGARITHMIC = {"length_median", "length_p99_over_median", "slots", "quota_waves"}
CHOICES: Mapping[str, tuple[float, ...]] = {
    "samples_per_group": (4, 8, 16, 32),
    "length_max": (8_192, 16_384, 32_768),
    "rollout_share": (0.25, 0.5, 0.75),
    "baseline_lag": (1, 2, 4, 8),
    "updates_per_batch": (1, 2, 4),
}
"""`baseline_lag` bounds the lag of partial rollout, in batches; it sends its weights
`updates_per_batch` times for each batch that it trains.
"""
OWN = ("rollout_share", "baseline_lag", "updates_per_batch")  # no constants of the simulator
REPLICAS, SCALE_MIN = 16, 4  # most replicas of a slice, trainers included, and its least scale
LAMINAR_SLICES = 2  # the comparison of five systems, with thirteen runs, is on half of that
RHYMERL, RHYMERL_SCALE = ("qwen3-14b", 128), 4
AREAL, AREAL_SCALE = ("qwen2.5-7b", 128), 8
SPLIT_SYNCHRONOUS = replace(SYNCHRONOUS, name="split_synchronous", colocated=False)
"""Generation and training in turn on the GPUs of a split."""

TARGETS = {
    **PUBLISHED,
    "laminar_partial_75": PUBLISHED["laminar_partial"],
    "repack_kv_held_before": PUBLISHED["repack_kv_before"],
    "repack_kv_held_after": PUBLISHED["repack_kv_after"],
    "histopipe_over_sync": PUBLISHED["rhymerl_histopipe"],
    "histopipe_over_split_sync": PUBLISHED["rhymerl_histopipe"],
    "two_tier_over_sync": PUBLISHED["rhymerl_two_tier"],
    "two_tier_over_split_sync": PUBLISHED["rhymerl_two_tier"],
}
"""Published values by figure. Where a paper does not say over what or how it measured, its value
has several figures.
"""
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Draw:
    """One joint draw: constants, Laminar's model on its GPUs, and the factors in `OWN`."""

    number: int
    constants: dict[str, float]
    own: dict[str, float]
    set_up: SetUp

    @property
    def share(self) -> float:
        return self.own["rollout_share"]

    def factors(self) -> dict[str, float]:
        """Returns all that was drawn; the model by its parameters, in units of 10⁹."""
        model = MODELS[self.set_up[0]]
        own = {"parameters": model.parameters / 1e9, "replicas": self.set_up[1] / model.tp}
        return {**self.constants, **self.own, **own}

    def bounded(self, lag: float) -> dict[str, float]:
        """Returns the constants of a system with this lag bound, in batches, which sends weights
        `updates_per_batch` times per batch: its steps are that much smaller.
        """
        parts = self.own["updates_per_batch"]
        c = self.constants
        return {
            **c,
            "groups_per_step": c["groups_per_step"] // parts,
            "waves_outstanding": (lag + 1) * parts,
            "train_fixed_s": c["train_fixed_s"] / parts,
            "steps": c["steps"] * parts,
            "steps_skipped": c["steps_skipped"] * parts,
        }


def draw(number: int) -> Draw:
    """Returns the draw of this number, always the same."""
    random = np.random.default_rng([22, number])
    constants = dict(STEPS)
    ranges = {name: (c.low, c.high) for name, c in CONSTANTS.items() if c.low < c.high}
    for name, (low, high) in {**ranges, **OPEN_RANGES}.items():
        if name in LOGARITHMIC:
            value = math.exp(random.uniform(math.log(low), math.log(high)))
        else:
            value = float(random.uniform(low, high))
        constants[name] = round(value) if name in WHOLE else value
    chosen = {name: float(random.choice(values)) for name, values in CHOICES.items()}
    own = {name: chosen.pop(name) for name in OWN}
    constants |= {**chosen, "groups_per_step": BATCH // int(chosen["samples_per_group"])}
    return Draw(number, constants, own, SET_UPS[int(random.integers(len(SET_UPS)))])


def scale_of(where: SetUp) -> int:
    """Returns the slice of a set-up that has at most `REPLICAS` replicas."""
    return max(SCALE_MIN, where[1] // MODELS[where[0]].tp // REPLICAS)


def laminar(one: Draw) -> dict[str, float]:
    """Laminar over the systems of its comparison, each under its own best split."""
    shares = CHOICES["rollout_share"]
    own = {
        name: _speeds(one, policy_of(name), shares) for name in ("one_step", "stream", "laminar")
    }
    partial = _speeds(one, policy_of("partial_rollout"), shares, one.own["baseline_lag"])
    best = {name: max(speeds) for name, speeds in own.items()} | {"partial": max(partial)}
    synchronous = _speeds(one, SYNCHRONOUS, (1.0,))[0]
    mine = best["laminar"]
    return {
        "laminar_sync": mine / synchronous,
        "laminar_one_step": mine / best["one_step"],
        "laminar_stream": mine / best["stream"],
        "laminar_partial": mine / best["partial"],
        "laminar_partial_75": mine / partial[shares.index(0.75)],
        "one_step_sync": best["one_step"] / synchronous,
        "stream_one_step": best["stream"] / best["one_step"],
        "partial_one_step": best["partial"] / best["one_step"],
        "partial_stream": best["partial"] / best["stream"],
    }


def _speeds(
    one: Draw, policy: SchedulingPolicy, shares: tuple[float, ...], lag: float | None = None
) -> list[float]:
    constants = one.constants if lag is None else one.bounded(lag)
    scale = LAMINAR_SLICES * scale_of(one.set_up)
    on = bench(one.set_up, scale, constants, one.number)
    return [on.run(policy, share).tokens_per_s for share in shares]


def repack(one: Draw) -> dict[str, float]:
    """Laminar with and without repack under the drawn split."""
    on = bench(one.set_up, scale_of(one.set_up), one.constants, one.number)
    after, before = (on.run(policy_of(name), one.share) for name in ("laminar", "laminar-repack"))
    return {
        "repack_throughput": after.generated_per_s / before.generated_per_s,
        "repack_kv_before": before.kv_utilisation,
        "repack_kv_after": after.kv_utilisation,
        "repack_kv_held_before": before.kv_utilisation_held,
        "repack_kv_held_after": after.kv_utilisation_held,
        "repack_idle_before": before.idle_share,
        "repack_lag_max": after.lag_max(),
    }


def rhymerl(one: Draw) -> dict[str, float]:
    """HistoPipe without drafts, with one tier and with both and migration, over one-step, over the
    synchronous system, and over generation and training in turn under the same split.
    """
    on = bench(RHYMERL, RHYMERL_SCALE, one.constants, one.number)

    def speed(policy: SchedulingPolicy) -> float:
        return on.run(policy, one.share).tokens_per_s

    tier, tiers = (
        speed(policy_of(name)) for name in ("rhymerl-ramp-migration-drafts", "rhymerl-drafts")
    )
    step, synchronous = speed(policy_of("one_step")), speed(SYNCHRONOUS)
    split = speed(SPLIT_SYNCHRONOUS)
    return {
        "rhymerl_histopipe": tier / step,
        "rhymerl_two_tier": tiers / step,
        "histopipe_over_sync": tier / synchronous,
        "two_tier_over_sync": tiers / synchronous,
        "histopipe_over_split_sync": tier / split,
        "two_tier_over_split_sync": tiers / split,
    }


def areal(one: Draw) -> dict[str, float]:
    """AReaL's own bound and split over the synchronous system."""
    share, lag = CONSTANTS["areal_rollout_share"].value, CONSTANTS["areal_eta"].value

    def run(policy: SchedulingPolicy, constants: Mapping[str, float]) -> SimulationResult:
        return bench(AREAL, AREAL_SCALE, constants, one.number).run(policy, share)

    mine = run(policy_of("partial_rollout"), one.bounded(lag))
    return {"areal": mine.tokens_per_s / run(SYNCHRONOUS, one.constants).tokens_per_s}


FAMILIES: Mapping[str, Callable[[Draw], dict[str, float]]] = {
    "repack": repack,
    "laminar": laminar,
    "rhymerl": rhymerl,
    "areal": areal,
}
"""The figures of each family, simulated under one draw."""
