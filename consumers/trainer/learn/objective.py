"""What a learner maximises, the same in one process and over ranks: the samples of a micro-batch
become a loss; what it needs besides the policy (other policies, a value function, masks) is the
objective's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.objectives.losses.base import LossInputs
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.forward import PolicyScorer, ScoringForm
from rollstream.consumers.trainer.learn.row_layout import TokenRows
from rollstream.consumers.trainer.learn.statistics import LossStatistics
from rollstream.import_path import load_option
from rollstream.streams.values import Version

OBJECTIVES: Mapping[str, str] = {
    "gae": "rollstream.consumers.objectives.critic.objective:CriticObjective",
}
SURROGATE = "rollstream.consumers.objectives.surrogate:SurrogateObjective"
"""The objective of all other advantages, which follow from the rewards alone."""


PastWeights = Mapping[Version, Mapping[str, Tensor]]
"""Version → its weights by name."""


class PastVersions(Protocol):
    @property
    def dtype(self) -> str: ...

    def read(self, number: int, term: int | None = None) -> Mapping[str, Tensor]:
        """The believed version of this number, or that of `term`. Raises `ConfigurationError` if it
        is not kept.
        """
        ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Trained from `version`: `rows` and `inputs` on the learner's device, and what
    `Objective.past` returned.
    """

    samples: Sequence[Sample]
    version: int
    rows: TokenRows
    inputs: LossInputs
    past: PastWeights


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """A sum, not divided by its weight, differentiable in the policy's parameters, unless the step
    leaves the policy, and in `joint`, parameters of the objective.

    `own_gradients` are those of the objective's parameters where they are computed already, instead
    of `joint`. `logprobs` [G] are those of the trained tokens.
    """

    loss: Tensor
    logprobs: Tensor
    statistics: LossStatistics
    joint: Sequence[Tensor] = ()
    own_gradients: Sequence[Tensor] = ()


class Objective(ABC):
    """Turns micro-batches into losses, and holds the loss's own state. Created before the model's
    parameters are changed or divided.

    `past` and `loss` may be called from several threads, `past` in the order of the micro-batches;
    the others from the learner's thread while no micro-batch is in computation. A learner calls
    `begin_step` before the first micro-batch of a step (or, in a step without one, before its
    update), `past`, `loss` and `add` for each micro-batch, `join` over ranks, then `update`.
    """

    reads_states: bool
    """Whether `loss` needs the `states` of the policy's scores."""

    @staticmethod
    @abstractmethod
    def check_over_ranks(settings: TrainerSettings) -> None:
        """Raises `ConfigurationError` if ranks cannot train it with these settings."""

    @abstractmethod
    def has_gradient(self, sample: Sample) -> bool:
        """Where False, the sample's share in every gradient is exactly zero, and only its
        statistics count.
        """

    @abstractmethod
    def begin_step(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        """Begins the step that trains from `version`, whose trained parameters are `weights` (None:
        ranks share them).
        """

    @abstractmethod
    def past(self, samples: Sequence[Sample]) -> PastWeights:
        """Returns weights of earlier versions that the loss of these samples needs."""

    @abstractmethod
    def leaves_policy(self, version: int) -> bool:
        """The step from `version` trains the objective's own parameters alone."""

    @abstractmethod
    def loss(self, batch: MicroBatch, score: PolicyScorer) -> BatchLoss:
        """Returns the loss of a micro-batch that has a trained token. `score` is called once, after
        what needs much memory is done.
        """

    @abstractmethod
    def divisor(self, statistics: LossStatistics) -> float:
        """Returns the divisor of an update's summed gradient."""

    @abstractmethod
    def metrics(self, statistics: LossStatistics) -> dict[str, float]:
        """Returns the metrics of an update, the objective's own sums among them."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        return ()

    @property
    def state_bytes(self) -> int:
        """Returns the state bytes of the objective's own masters and moments."""
        return 0

    # Below: what an objective that learns something itself does; the others have no parameters.

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Adds the gradients of `parameters`, for one micro-batch: all of them or none."""
        assert not gradients, "gradients of an objective without parameters"

    def join(self, over_all_ranks: Callable[[Tensor], Tensor]) -> None:
        """Sums the gradients over all ranks, which then make the same update. A collective."""
        del over_all_ranks

    def update(self, divisor: float) -> dict[str, float]:
        """Applies the summed gradients, divided by `divisor`; returns metrics."""
        del divisor
        return {}

    def state(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint, not a copy."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Loads the state after `updates` updates of the policy."""
        del tensors, updates


def open_objective(
    settings: TrainerSettings,
    model: PreTrainedModel,
    form: ScoringForm,
    past: PastVersions | None,
) -> Objective:
    """Opens the objective for `model` (of version 0), which computes in `form`. Raises
    `ConfigurationError` for an own loss that breaks its contract, or a reference that cannot be
    loaded.
    """
    return load_option(_name(settings))(settings, model, form, past)


def check_over_ranks(settings: TrainerSettings) -> None:
    """Raises `ConfigurationError` if ranks that share a model cannot train with these settings."""
    load_option(_name(settings)).check_over_ranks(settings)


def _name(settings: TrainerSettings) -> str:
    return OBJECTIVES.get(settings.advantage, SURROGATE)
