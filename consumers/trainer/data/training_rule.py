"""The settings that decide which samples of a group are trained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from rollstream.consumers.trainer.data.advantages import find_advantage
from rollstream.consumers.trainer.data.sample import names_needed
from rollstream.streams import admissible

if TYPE_CHECKING:
    from rollstream.consumers.settings import TrainerSettings


class Choices(msgspec.Struct, frozen=True):
    """The same settings in a recorded configuration, by their dotted keys."""

    survivors_min: int = msgspec.field(name="trainer.survivors_min")
    filter_equal_rewards: bool = msgspec.field(name="trainer.filter_equal_rewards")
    max_lag: int | None = msgspec.field(name="dispatch.max_lag")
    overlong: str = msgspec.field(name="trainer.overlong", default="train")


UNBOUNDED = admissible.TrainingBounds()


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
    """Raises `ConfigurationError` if the advantage is a function that cannot be imported."""
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
