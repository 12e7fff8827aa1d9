"""Decides whether a group is trained, and turns its completions into samples with advantages. Pure:
live training, replay and audit decide alike.

No token above `max_lag` is trained (invariant 5): it is masked, or its trajectory is dropped, and
both are counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, cast

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollstream.consumers.credit import GAE, PartRewards, token_advantages, turn_ends, whole_reward
from rollstream.consumers.trainer.data.sample import (
    AnnotatedRewards,
    AnnotationsByKey,
    Sample,
    admitted_sample,
    annotated_rewards,
    names_needed,
)
from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable
from rollstream.streams import admissible
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Span

if TYPE_CHECKING:
    from rollstream.consumers.settings import TrainerSettings


SETTING = "trainer.advantage"
EPS = 1e-4  # as in TRL: equal rewards give 0 instead of a quotient of rounding errors


def advantages(rewards: ArrayLike, kind: str) -> NDArray[np.float64]:
    """Returns one group-relative advantage per reward of a group of n; 0 for a group of one.

    * `grpo`: (R − mean) / (std + 1e-4), std with n − 1 in the denominator (DeepSeekMath, arXiv
      2402.03300).
    * `centred`: R − mean (Dr. GRPO, arXiv 2503.20783: dividing by std favours too easy and too hard
      prompts).
    * `leave_one_out`: R − mean of the others (RLOO, arXiv 2402.14740), which is n/(n−1) ×
      `centred`.
    * `batch`: R − mean; the update divides by the std over all its samples (REINFORCE++-baseline,
      arXiv 2501.03262), in `LossStatistics.divisor`.
    * `module:function`: the user's.
    """
    # `gae` is no function of the rewards (`objectives/critic/gae.py`).
    assert kind != GAE, "a critic's advantages"
    values = np.asarray(rewards, np.float64)
    assert values.ndim == 1, "rewards of one group"
    if len(values) < 2:
        return np.zeros(len(values))
    if ":" in kind:
        return find_advantage(kind)(values)
    centred = values - values.mean()
    if kind in ("centred", "batch"):
        return centred
    if kind == "leave_one_out":
        return centred * len(values) / (len(values) - 1)
    return centred / (values.std(ddof=1) + EPS)


@cache
def find_advantage(path: str) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Returns the user's function that `trainer.advantage` names: rewards [n] of a group, n ≥ 2, to
    advantages [n]. Raises `ConfigurationError` if it cannot be imported or returns another shape or
    a number that is not finite.
    """
    function = cast(Callable[[NDArray[np.float64]], ArrayLike], find_callable(path, SETTING))

    def compute(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        group_advantages = np.asarray(function(rewards.copy()), np.float64)
        if group_advantages.shape != rewards.shape or not np.isfinite(group_advantages).all():
            raise ConfigurationError(
                f"{SETTING}: {path!r} returned {group_advantages!r} for the rewards {rewards}; it "
                "must return one finite number for each"
            )
        return group_advantages

    return compute


def lag_of(span: Span, version: int) -> int:
    """Returns the number of versions by which `version`, the one trained from, is ahead of the
    span's.
    """
    # A run that continued as a fork from an older checkpoint has spans of later versions: lag 0.
    return max(0, version - span.version.number)


def lags_of(sample: Sample, version: int) -> NDArray[np.int64]:
    """Returns `lag_of` for each generated token."""
    lags = np.empty(len(sample.logprobs), np.int64)
    for span in sample.spans:
        lags[span.start : span.end] = lag_of(span, version)
    return lags


def mask_by_lag(
    sample: Sample,
    version: int,
    max_lag: int | None,
    believed: admissible.BelievedVersions | None = None,
) -> Sample:
    """Returns the sample, trained from `version`, with these tokens masked too: those above
    `max_lag` (None: no bound), and those of a version that is not `believed` (None: all are), whose
    weights are unknown (docs/reference/invariants.md, Versions that were replaced).
    """
    mask = sample.mask.copy()
    for span in sample.spans:
        is_above = max_lag is not None and lag_of(span, version) > max_lag
        if is_above or (believed is not None and not believed.is_believed(span.version)):
            mask[span.start : span.end] = False
    return replace(sample, mask=mask)


def is_dropped(
    sample: Sample,
    version: int,
    max_lag: int | None,
    believed: admissible.BelievedVersions | None = None,
) -> bool:
    """Whether the policy `keep_version` drops the sample: the others would mask a token of it."""
    return not np.array_equal(mask_by_lag(sample, version, max_lag, believed).mask, sample.mask)


def lag_counts(sample: Sample, version: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for span in sample.spans:
        lag = lag_of(span, version)
        trained = int(np.count_nonzero(sample.mask[span.start : span.end]))
        counts[lag] = counts.get(lag, 0) + trained
    return counts


class Choices(msgspec.Struct, frozen=True):
    """The settings of a recorded configuration that decide which samples of a group are trained, by
    their dotted keys.
    """

    survivors_min: int = msgspec.field(name="trainer.survivors_min")
    filter_equal_rewards: bool = msgspec.field(name="trainer.filter_equal_rewards")
    max_lag: int | None = msgspec.field(name="dispatch.max_lag")
    overlong: str = msgspec.field(name="trainer.overlong", default="train")


UNBOUNDED = admissible.TrainingBounds()
REASON_MAX = 200  # characters of each reason in a group's `detail`: rollouts write them freely


@dataclass(frozen=True, slots=True)
class TrainingRule:
    """The settings that decide which samples of a group are trained. A group needs at least
    `survivors_min` trainable members, and with `filter_equal_rewards` two different rewards;
    `keep_version` is a policy of `rollouts.on_update`.
    """

    advantage: str
    survivors_min: int
    filter_equal_rewards: bool
    max_lag: int | None
    keep_version: bool
    names: tuple[str, ...]
    """Annotations that a sample must have."""
    terms: Mapping[str, float]
    """Annotation → weight: a sample's reward is the weighted sum of its annotations' values."""
    bounds: admissible.TrainingBounds = UNBOUNDED
    masks_overlong: bool = False
    """Whether answers that ended at a limit of their length have no loss."""
    overlong_penalty: tuple[int, int] | None = None
    """Generated tokens from which on an answer loses reward, and at which it loses 1."""
    by_part: bool = False
    """Whether annotations hold rewards of turns or tokens (`trainer.process_rewards`)."""

    def choosing_as(self, earlier: "Choices") -> "TrainingRule":
        return replace(
            self,
            survivors_min=earlier.survivors_min,
            filter_equal_rewards=earlier.filter_equal_rewards,
            max_lag=earlier.max_lag,
            masks_overlong=earlier.overlong == "mask",
        )


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """The samples of a group for training from one version; without samples `ending` and `detail`
    are the reason, else `ending` is "". `counts` counts members left out and tokens masked, for
    `StepDone.counts`.
    """

    group: int
    samples: tuple[Sample, ...]
    ending: Literal["", "filtered", "expired", "dead"]
    detail: str
    counts: Mapping[str, int]


LATER_SETTINGS: Mapping[str, object] = {
    "overlong": "train",
    "overlong_penalty": None,
    "process_rewards": False,
    "reference_kl": 0.0,
    "reference_by": "trainer",
}
"""Settings of `trainer` that a run of an earlier release lacks → the value that means what that
release did.
"""


def training_rule(
    settings: "TrainerSettings",
    max_lag: int | None,
    keep_version: bool,
    bounds: admissible.TrainingBounds = UNBOUNDED,
) -> TrainingRule:
    """Returns the rule of a run's settings. Raises `ConfigurationError` if the advantage is a
    function that cannot be imported.
    """
    if ":" in settings.advantage:
        find_advantage(settings.advantage)
    return TrainingRule(
        settings.advantage,
        settings.survivors_min,
        settings.filter_equal_rewards,
        max_lag,
        keep_version,
        names_needed(settings),
        settings.reward_terms,
        replace(bounds, keep_version=keep_version),
        settings.overlong == "mask",
        settings.overlong_penalty,
        settings.process_rewards,
    )


def prepare_group(
    group: int,
    records: Sequence[Trajectory],
    annotations: AnnotationsByKey,
    rule: TrainingRule,
    version: int,
    believed: admissible.BelievedVersions | None = None,
) -> PreparedGroup:
    """Returns the samples that the group contributes when training from `version`, given its
    completions (`records`) and the believed versions (None: all). Left out are dead members,
    untrainable ones (invariant 12) and those that lack a needed annotation; advantages are relative
    to the rest.

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
    """Returns the samples of trainable members, the reasons of the others, and the refusals by
    trajectory.
    """
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
