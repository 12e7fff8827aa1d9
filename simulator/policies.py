"""Scheduling policies as values: one loop simulates all, and each field switches one mechanism. A
rollout "pulls" when it loads the newest weights.

`synchronous` is verl's hybrid engine, `one_step` and `stream` are the usual asynchronous forms
(StreamRL), `partial_rollout` is AReaL, `in_flight` PipelineRL, `laminar` Laminar, `rhymerl`
RhymeRL, `ours` this project's service with the defaults of `keep_version`, `ours_bounded` the same
with `max_lag`, `ours_adapters` where versions are adapters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rollstream.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    name: str
    colocated: bool = False
    """The same accelerators generate, then train."""
    wave: Literal["all", "own"] | None = None
    """Finishes before the next wave starts: all rollouts together, or each its own part."""
    on_update: Literal["keep_version", "in_flight", "in_flight_recompute"] = "keep_version"
    """A new version lets running sequences keep theirs, or continue under the new one, with their
    KV cache kept or computed again.
    """
    relay: bool = False
    """Weights wait beside every rollout, and each pulls alone. Otherwise one collective transfer
    stops rollouts and trainer.
    """
    bounded: bool = True
    """The job's `max_lag` bounds admission, else only the amount of finished, untrained work."""
    lag: int | None = None
    """A bound of the policy that replaces the job's."""
    strict: bool = False
    """Tokens above the bound are not trained (invariant 5). The published systems bound admission
    only.
    """
    batches: bool = False
    """A rollout takes `Job.quota` trajectories, finishes them and pulls. Otherwise the quota limits
    it only under a newer version.
    """
    early_start: bool = False
    """A step starts with the first groups that are ready."""
    repack: bool = False
    """The last trajectories of rollouts that ramp down (`peak`) move onto fewer rollouts."""
    peak: bool = False
    """A rollout ramps down once its KV cache use is below its maximum since the last pull, as in
    the service. Otherwise: below the use at the last check (Laminar).
    """
    by_length: bool = False
    """Groups are placed by predicted length, the longest first, in opposite directions in
    consecutive waves (the first tier of HistoPipe).
    """
    ramp: bool = False
    """The long groups of a wave get extra rollouts (the second tier of HistoPipe)."""
    by_speed: bool = True
    """Dispatch knows the speeds of the rollouts."""
    migrate: bool = False
    """Outliers among the last unfinished trajectories move to other rollouts."""
    drafts: bool = False
    """Tokens are drafted from earlier answers to the same prompt (HistoSpec of RhymeRL)."""
    prefix: bool = True
    """The prompt of a group is prefilled and cached once per rollout, as engines do by default."""
    adapters: bool = False
    """Versions are low-rank adapters: under `keep_version` a rollout serves several side by side.
    """

    @property
    def drains(self) -> bool:
        """A rollout must finish its work before it takes new weights."""
        return self.on_update == "keep_version" and not self.adapters


SYNCHRONOUS = SchedulingPolicy("synchronous", colocated=True, wave="all", lag=0)
ONE_STEP = SchedulingPolicy("one_step", wave="all", lag=1)
STREAM = replace(ONE_STEP, name="stream", early_start=True)
PARTIAL = SchedulingPolicy("partial_rollout", on_update="in_flight_recompute")
IN_FLIGHT = SchedulingPolicy("in_flight", on_update="in_flight")
LAMINAR = SchedulingPolicy("laminar", relay=True, bounded=False, batches=True, repack=True)
RHYMERL = SchedulingPolicy(
    "rhymerl", wave="own", lag=1, by_length=True, ramp=True, migrate=True, drafts=True
)
OURS = SchedulingPolicy(
    "ours",
    relay=True,
    strict=True,
    bounded=False,
    early_start=True,
    repack=True,
    peak=True,
    by_length=True,
    ramp=True,
    migrate=True,
    drafts=True,
)
OURS_BOUNDED = replace(OURS, name="ours_bounded", bounded=True)
OURS_ADAPTERS = replace(
    OURS, name="ours_adapters", adapters=True, repack=False, ramp=False, migrate=False
)

POLICIES = {
    policy.name: policy
    for policy in (
        SYNCHRONOUS, ONE_STEP, STREAM, PARTIAL, IN_FLIGHT, LAMINAR, RHYMERL, OURS, OURS_BOUNDED,
        OURS_ADAPTERS,
    )
}  # fmt: skip

MECHANISMS = {
    "repack": "repack",
    "placement": "by_length",
    "ramp": "ramp",
    "migration": "migrate",
    "early_start": "early_start",
    "relay": "relay",
    "admission": "bounded",
    "drafts": "drafts",
    "prefix": "prefix",
}
"""Its name in a policy's (`ours-repack`) → the field that switches it."""


def policy_of(name: str) -> SchedulingPolicy:
    """`laminar-repack` is `laminar` without repack."""
    base, *without = name.split("-")
    if base not in POLICIES:
        names = ", ".join(POLICIES)
        raise ConfigurationError(f"policies: {name!r} is unknown; known: {names}")
    policy = POLICIES[base]
    for mechanism in without:
        switch = MECHANISMS.get(mechanism)
        if switch is None or not getattr(policy, switch):
            has = ", ".join(m for m, s in MECHANISMS.items() if getattr(policy, s))
            raise ConfigurationError(
                f"policies: {base} has no {mechanism!r} to leave out; it has: {has or 'none'}"
            )
        policy = replace(policy, **{switch: False})
    return replace(policy, name=name)


def ablation(name: str) -> Iterator[str]:
    """The policy's name, then the name without each single mechanism."""
    yield name
    yield from (
        f"{name}-{m}" for m, switch in MECHANISMS.items() if getattr(policy_of(name), switch)
    )
