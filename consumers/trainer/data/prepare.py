"""Turns a group's completions into training samples. Pure: live training, replay and audit call the
same function.

Left out are dead members, members that cannot be trained (invariant 12) and members that lack an
annotation that the configuration names. Advantages are relative to all remaining members. Tokens
above `max_lag` at this version, or of a version that is not believed, are masked under in-flight
policies; under `keep_version` the whole trajectory is dropped (invariant 5). Both are counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from rollstream.consumers.trainer.data.advantages import advantages
from rollstream.consumers.trainer.data.sample import AnnotationsByKey, AnnotatedRewards, names_needed, annotated_rewards
from rollstream.consumers.trainer.data.lag import is_dropped, mask_by_lag
from rollstream.consumers.trainer.data.sample_part import Sample, admitted_sample
from rollstream.streams.admissible import BelievedVersions, Refusal, TrainingBounds, is_bounded_number, refusal, refused_counts
from rollstream.streams.records import Trajectory

if TYPE_CHECKING:  # the audit imports this module and must not load pydantic
    from rollstream.consumers.settings import TrainerSettings


UNBOUNDED = TrainingBounds()
REASON_MAX = 200  # characters of each reason in a group's `detail`: rollouts write them freely


@dataclass(frozen=True, slots=True)
class TrainingRule:
    """The settings that decide which samples of a group are trained."""

    advantage: Literal["grpo", "centred", "leave_one_out"]
    survivors_min: int
    filter_equal_rewards: bool
    max_lag: int | None
    keep_version: bool
    names: tuple[str, ...]
    """Annotations that a sample must have."""
    terms: Mapping[str, float]
    """Annotation → weight: the reward is the weighted sum."""
    bounds: TrainingBounds = UNBOUNDED
    """Token ids and lengths that the model can train."""


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """The samples of a group for training from one version. `ending` is "" when the group is
    trained, else the reason why it is closed.
    """

    group: int
    samples: tuple[Sample, ...]
    ending: Literal["", "filtered", "expired", "dead"]
    detail: str
    counts: Mapping[str, int]


def training_rule(
    settings: "TrainerSettings",
    max_lag: int | None,
    keep_version: bool,
    bounds: TrainingBounds = UNBOUNDED,
) -> TrainingRule:
    """The rule that a run's settings give; without `bounds` any token and any length pass."""
    return TrainingRule(
        settings.advantage,
        settings.survivors_min,
        settings.filter_equal_rewards,
        max_lag,
        keep_version,
        names_needed(settings),
        settings.reward_terms,
        replace(bounds, keep_version=keep_version),
    )


def prepare_group(
    group: int,
    records: Sequence[Trajectory],
    noted: AnnotationsByKey,
    rule: TrainingRule,
    version: int,
    believed: BelievedVersions | None = None,
) -> PreparedGroup:
    """The samples that the group contributes when training from `version`, given its annotations
    (`noted`) and the believed versions (None: all).
    """
    found = annotated_rewards(records, noted, rule.names, rule.terms)
    whole, reasons, refused = _trainable_samples(records, found, rule.bounds, believed)
    unscored = len(found.lacking.keys() - refused.keys())
    left_out = {"dead_members": len(records) - len(whole) - unscored, "unscored": unscored}
    left_out |= refused_counts(refused.values())
    if len(whole) < rule.survivors_min:
        detail = f"{len(whole)} of {len(records)} lived: {'; '.join(sorted(set(reasons)))}"
        return PreparedGroup(group, (), "dead", detail, left_out)
    values = np.array([sample.reward for sample in whole], np.float64)
    if rule.filter_equal_rewards and np.ptp(values) == 0:
        return PreparedGroup(group, (), "filtered", f"all rewards are {values[0]:g}", left_out)
    samples: list[Sample] = []
    counts = {**left_out, "masked_tokens": 0, "dropped": 0}
    for one, advantage in zip(whole, advantages(values, rule.advantage), strict=True):
        sample = _within_lag(replace(one, advantage=float(advantage)), rule, version, believed)
        if sample is None:
            counts["dropped"] += 1
        else:
            counts["masked_tokens"] += int(np.count_nonzero(~sample.mask))
            samples.append(sample)
    if not samples:
        return PreparedGroup(group, (), "expired", f"all above max_lag at version {version}", counts)
    return PreparedGroup(group, tuple(samples), "", "", counts)


def _trainable_samples(
    records: Sequence[Trajectory], found: AnnotatedRewards, bounds: TrainingBounds, believed: BelievedVersions | None
) -> tuple[list[Sample], list[str], dict[str, Refusal]]:
    """Samples of the live members that can be trained and have a reward, the reasons of the others,
    and the refusals by trajectory.
    """
    living: list[Sample] = []
    reasons: list[str] = []
    refused: dict[str, Refusal] = {}
    for record in records:
        if record.finish == "dead":
            reasons.append(record.reason)
            continue
        wrong = refusal(record, bounds, believed)
        if wrong is None and record.trajectory in found.lacking:
            reasons.append(found.lacking[record.trajectory])
            continue
        reward = found.rewards.get(record.trajectory, 0.0)
        if wrong is None and not is_bounded_number(reward):
            wrong = Refusal("reward", f"a reward of {reward:g} in all")
        if wrong is None:
            living.append(admitted_sample(record, 0.0, reward))
        else:
            refused[record.trajectory] = wrong
            reasons.append(f"{record.trajectory} {wrong}")
    return living, [reason[:REASON_MAX] for reason in reasons], refused


def _within_lag(
    sample: Sample, rule: TrainingRule, version: int, believed: BelievedVersions | None
) -> Sample | None:
    """The sample with the tokens masked that may not be trained; None when none is left."""
    if rule.keep_version:
        return None if is_dropped(sample, version, rule.max_lag, believed) else sample
    masked = mask_by_lag(sample, version, rule.max_lag, believed)
    return masked if masked.mask.any() else None
