"""The objective whose advantages follow from the rewards: a surrogate with its masks and penalties,
and the other policies that the settings name.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.credit import scored_reference
from rollstream.consumers.objective_settings import past_policies
from rollstream.consumers.objectives.loss import (
    NO_OTHERS,
    OtherLogprobs,
    objective_means,
    surrogate_loss,
    update_divisor,
)
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.forward import PolicyScorer, ScoringForm
from rollstream.consumers.trainer.learn.objective import (
    BatchLoss,
    MicroBatch,
    Objective,
    PastVersions,
    PastWeights,
)
from rollstream.consumers.trainer.learn.statistics import LossStatistics
from rollstream.consumers.trainer.learn.surrogate_check import check_own_loss
from rollstream.errors import ConfigurationError
from rollstream.import_path import load_option

OTHER_POLICIES = "rollstream.consumers.objectives.policies.other_policies:OtherPolicies"


class ComparedPolicies(Protocol):
    def follow(self, version: int, parameters: Mapping[str, Tensor] | None) -> None: ...

    def behind(self, samples: Sequence[Sample]) -> PastWeights: ...

    def logprobs(self, batch: MicroBatch) -> OtherLogprobs: ...


class NoPolicies:
    """Has no policies, for a loss that compares with the recorded probabilities alone."""

    def follow(self, version: int, parameters: Mapping[str, Tensor] | None) -> None:
        pass

    def behind(self, samples: Sequence[Sample]) -> PastWeights:
        return {}

    def logprobs(self, batch: MicroBatch) -> OtherLogprobs:
        return NO_OTHERS


class SurrogateObjective(Objective):
    """Implements `Objective` without parameters of its own."""

    reads_states = False

    def __init__(
        self,
        settings: TrainerSettings,
        model: PreTrainedModel,
        form: ScoringForm,
        past: PastVersions | None,
    ) -> None:
        check_own_loss(settings)
        self.settings = settings
        self.policies: ComparedPolicies = NoPolicies()
        if past_policies(settings) or scored_reference(settings):
            self.policies = load_option(OTHER_POLICIES)(model, settings, form, past)

    @staticmethod
    def check_over_ranks(settings: TrainerSettings) -> None:
        if past_policies(settings):  # `torchrun` starts ranks whatever `trainer.processes` is
            raise ConfigurationError(
                "trainer.reference_kl must be 0 and trainer.proximal empty where several processes "
                "train one model: they do not share another policy's model; train with one "
                'process, or let scorers compute the reference (trainer.reference_by = "score")'
            )

    def has_gradient(self, sample: Sample) -> bool:
        s = self.settings
        # A loss of the user's, and the sample size that a guard reads, may use any trained token.
        adds_terms = s.entropy_bonus or s.ratio_penalty or s.reference_kl
        if adds_terms or ":" in s.loss or s.ess_guard != "off":
            return bool(sample.mask.any())
        if sample.advantages is None:
            return sample.advantage != 0 and bool(sample.mask.any())
        return bool(sample.advantages[sample.mask].any())

    def begin_step(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        self.policies.follow(version, weights)

    def past(self, samples: Sequence[Sample]) -> PastWeights:
        return self.policies.behind(samples)

    def leaves_policy(self, version: int) -> bool:
        return False

    def loss(self, batch: MicroBatch, score: PolicyScorer) -> BatchLoss:
        # Scored before the policy, whose activations then are not in memory yet.
        others = self.policies.logprobs(batch)
        scores = score(batch.rows)
        loss, statistics = surrogate_loss(scores, batch.inputs, self.settings, others)
        return BatchLoss(loss, scores.logprobs, statistics)

    def divisor(self, statistics: LossStatistics) -> float:
        return update_divisor(statistics, self.settings.advantage)

    def metrics(self, statistics: LossStatistics) -> dict[str, float]:
        return {**statistics.metrics(), **objective_means(statistics)}
