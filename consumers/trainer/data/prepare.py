"""Decides whether a group is trained, and turns its completions into samples with advantages. Pure:
live training, replay and audit decide alike.

No token above `max_lag` is trained (invariant 5): it is masked, or its trajectory is dropped, and
both are counted.

Reading list: after `consumers/trainer/data/groups.py`, before `consumers/trainer/takes.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollstream.consumers.credit import GAE, PartRewards, token_advantages, turn_ends, whole_reward
from rollstream.consumers.trainer.data.advantages import advantages
from rollstream.consumers.trainer.data.lags import is_dropped, mask_by_lag
from rollstream.consumers.trainer.data.sample import (
    AnnotatedRewards,
    AnnotationsByKey,
    Sample,
    admitted_sample,
    annotated_rewards,
)
from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.streams import admissible
from rollstream.streams.records import Trajectory

REASON_MAX = 200  # characters of each reason in a group's `detail`: rollouts write them freely


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """Without samples `ending` and `detail` are the reason, else `ending` is "". `counts` counts
    members left out and tokens masked, for `StepDone.counts`.
    """

    group: int
    samples: tuple[Sample, ...]
    ending: Literal["", "filtered", "expired", "dead"]
    detail: str
    counts: Mapping[str, int]


def prepare_group(
    group: int,
    records: Sequence[Trajectory],
    annotations: AnnotationsByKey,
    rule: TrainingRule,
    version: int,
    believed: admissible.BelievedVersions | None = None,
) -> PreparedGroup:
    """The samples for training from `version`; `believed` versions, None: all. Left out are dead
    members, untrainable ones (invariant 12) and those that lack a needed annotation; advantages are
    relative to the rest.

    The group closes as dead with fewer than `survivors_min` members; as filtered with equal rewards
    under `filter_equal_rewards`, or if all answers are overlong and masked; as expired if all
    tokens are above `max_lag` or of replaced versions.
    """
    annotated = annotated_rewards(records, annotations, rule.names, rule.terms, rule.by_part)
    trainable, reasons, refused = _trainable_samples(records, annotated, rule.bounds, believed)
    unscored = len(annotated.lacking.keys() - refused.keys())
    left_out = {"dead_members": len(records) - len(trainable) - unscored, "unscored": unscored}
    left_out |= admissible.refused_counts(refused.values())
    if len(trainable) < rule.survivors_min:
        detail = f"{len(trainable)} of {len(records)} lived: {'; '.join(sorted(set(reasons)))}"
        return PreparedGroup(group, (), "dead", detail, left_out)
    rewarded = [
        annotated.parts.get(member.trajectory) or whole_reward(len(member.logprobs), member.reward)
        for member in trainable
    ]
    values = np.concatenate([parts.rewards for parts in rewarded])
    if rule.filter_equal_rewards and np.ptp(values) == 0:
        return PreparedGroup(group, (), "filtered", f"all rewards are {values[0]:g}", left_out)
    overlong = _overlong_names(records) if rule.masks_overlong else frozenset[str]()
    if all(sample.trajectory in overlong for sample in trainable):
        return PreparedGroup(group, (), "filtered", "all answers are overlong", left_out)
    samples: list[Sample] = []
    counts = {**left_out, "masked_tokens": 0, "dropped": 0}
    for unmasked in _with_advantages(trainable, rewarded, rule, records):
        if unmasked.trajectory in overlong:
            counts["overlong"] = counts.get("overlong", 0) + 1
            continue
        sample = _within_lag(unmasked, rule, version, believed)
        if sample is None:
            counts["dropped"] += 1
            continue
        counts["masked_tokens"] += int(np.count_nonzero(unmasked.mask & ~sample.mask))
        if not unmasked.mask.all():
            abandoned = int(np.count_nonzero(~unmasked.mask))
            counts["abandoned_tokens"] = counts.get("abandoned_tokens", 0) + abandoned
        samples.append(sample)
    if not samples:
        return PreparedGroup(
            group, (), "expired", f"all above max_lag at version {version}", counts
        )
    tokens = sum(int(np.count_nonzero(sample.mask)) for sample in samples)
    trained = tuple(replace(sample, group_tokens=tokens) for sample in samples)
    return PreparedGroup(group, trained, "", "", counts)


def _with_advantages(
    trainable: Sequence[Sample],
    rewarded: Sequence[PartRewards],
    rule: TrainingRule,
    records: Sequence[Trajectory],
) -> list[Sample]:
    # An overlong answer loses its penalty at its end.
    shaped = list(rewarded)
    for at, sample in enumerate(trainable):
        loss = _overlong_loss(int(np.count_nonzero(sample.mask)), rule)
        if loss:  # a part of 0 would change the mean of the parts
            shaped[at] = shaped[at].plus(whole_reward(shaped[at].tokens, -loss))
    if rule.advantage == GAE:
        # A critic makes the advantages later, from rewards and turns.
        ends = {r.trajectory: turn_ends(r) for r in records if r.finish != "dead"}
        return [
            replace(sample, parts=parts, turn_ends=ends[sample.trajectory])
            for sample, parts in zip(trainable, shaped, strict=True)
        ]
    each = advantages(np.concatenate([parts.rewards for parts in shaped]), rule.advantage)
    if not rule.by_part:
        return [replace(s, advantage=float(a)) for s, a in zip(trainable, each, strict=True)]
    return [
        replace(sample, advantage=float(by_token[0]), advantages=by_token)
        for sample, by_token in zip(trainable, token_advantages(shaped, each), strict=True)
    ]


def _overlong_names(records: Sequence[Trajectory]) -> frozenset[str]:
    return frozenset(record.trajectory for record in records if record.finish == "length")


def _overlong_loss(generated: int, rule: TrainingRule) -> float:
    if rule.overlong_penalty is None:
        return 0.0
    # From 0 to 1: soft overlong punishment of DAPO, arXiv 2503.14476, eq. 13.
    low, high = rule.overlong_penalty
    return min(1.0, max(0.0, (generated - low) / (high - low)))


def _trainable_samples(
    records: Sequence[Trajectory],
    annotated: AnnotatedRewards,
    bounds: admissible.TrainingBounds,
    believed: admissible.BelievedVersions | None,
) -> tuple[list[Sample], list[str], dict[str, admissible.Refusal]]:
    living: list[Sample] = []
    reasons: list[str] = []
    refused: dict[str, admissible.Refusal] = {}
    for record in records:
        if record.finish == "dead":
            reasons.append(record.reason)
            continue
        wrong = admissible.refusal(record, bounds, believed)
        if wrong is None and record.trajectory in annotated.lacking:
            reasons.append(annotated.lacking[record.trajectory])
            continue
        reward = annotated.rewards.get(record.trajectory, 0.0)
        if wrong is None and not admissible.is_bounded_number(reward):
            wrong = admissible.Refusal("reward", f"a reward of {reward:g} in all")
        if wrong is None:
            sample = admitted_sample(record, 0.0, reward)
            living.append(replace(sample, reference=annotated.reference.get(record.trajectory)))
        else:
            refused[record.trajectory] = wrong
            reasons.append(f"{record.trajectory} {wrong}")
    return living, [reason[:REASON_MAX] for reason in reasons], refused


def _within_lag(
    sample: Sample, rule: TrainingRule, version: int, believed: admissible.BelievedVersions | None
) -> Sample | None:
    # Its trajectories have a single version, so one masked token means that all are.
    if rule.keep_version:
        return None if is_dropped(sample, version, rule.max_lag, believed) else sample
    masked = mask_by_lag(sample, version, rule.max_lag, believed)
    return masked if masked.mask.any() else None
