"""The objective of `trainer.advantage = "gae"`: a critic's values make the advantages, and are
learnt with an optimiser of their own, apart from the policy's masters and versions.

An advantage is made from the values of a token's first pass in its step, also in further epochs: it
depends on the state at the step's begin and its takes alone, and checkpoints need not hold it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from rollstream.consumers.objectives.critic.gae import (
    Floats64,
    Judgement,
    ValueStatistics,
    judge,
)
from rollstream.consumers.objectives.loss import reward_penalties, surrogate_loss
from rollstream.consumers.objectives.surrogate import SurrogateObjective
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.forward import (
    PolicyScorer,
    ScoringForm,
    recompute_layers,
    row_form,
    scored_states,
)
from rollstream.consumers.trainer.learn.llama import PackedDecoder, has_packed_form
from rollstream.consumers.trainer.learn.masters import Masters, Optimiser, restore
from rollstream.consumers.trainer.learn.objective import BatchLoss, MicroBatch, PastVersions
from rollstream.consumers.trainer.learn.row_layout import TokenRows
from rollstream.consumers.trainer.learn.statistics import LossStatistics
from rollstream.errors import ConfigurationError

PREFIX = "critic."
"""Of the critic's tensors in a checkpoint."""
COUNTERS = PREFIX + "counters"
VALUES = "values."


class ValueModel(nn.Module):
    """A float32 linear head, which starts at 0, and, with `is_own`, the copy of a model that it
    reads.
    """

    def __init__(self, model: PreTrainedModel, is_own: bool) -> None:
        super().__init__()
        fields: Any = model.config.get_text_config()  # pyright: ignore[reportUnknownMemberType]
        self.model = copy.deepcopy(model).eval() if is_own else None
        self.value = nn.Linear(int(fields.hidden_size), 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        exact = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        self._keep_in_fp32_modules_strict = {*exact, "value"}

    def of_states(self, states: Tensor) -> Tensor:
        """Returns [G], for the last hidden states [G, d]."""
        return F.linear(states.float(), self.value.weight, self.value.bias).squeeze(-1)


class CriticObjective(SurrogateObjective):
    """A critic with a body of its own copies `model` (float32, of version 0)."""

    def __init__(
        self,
        settings: TrainerSettings,
        model: PreTrainedModel,
        form: ScoringForm,
        past: PastVersions | None,
    ) -> None:
        super().__init__(settings, model, form, past)
        self._critic = settings.critic
        self._is_own = self._critic.body == "own"
        self.reads_states = not self._is_own
        self._module = ValueModel(model, self._is_own)
        self._states: Callable[[TokenRows], Tensor] | None = None
        if self._module.model is not None:
            recomputes = settings.gradient_checkpointing
            self._states = _state_scorer(self._module.model, form, recomputes)
        self._masters = Masters(self._module, form.compute, form.device, settings.cpu_offload)
        rate = settings.lr if self._critic.lr is None else self._critic.lr
        alike = {"lr": rate, "optimiser": "adamw", "ess_guard": "off"}
        self._optimiser = Optimiser(
            self._masters.flat, settings.model_copy(update=alike), self._masters.slices
        )
        self._gradient = torch.zeros_like(self._masters.flat)
        self._old: dict[str, Floats64] = {}

    @staticmethod
    def check_over_ranks(settings: TrainerSettings) -> None:
        SurrogateObjective.check_over_ranks(settings)
        if settings.critic.body == "own":
            raise ConfigurationError(
                "trainer.critic.body must be 'policy' where several processes train one model: "
                "they do not share a second one; or train with one process"
            )

    def has_gradient(self, sample: Sample) -> bool:
        return bool(sample.mask.any())  # of the values

    def begin_step(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        super().begin_step(version, weights)
        self._old.clear()

    def leaves_policy(self, version: int) -> bool:
        return version < self._critic.warmup

    def loss(self, batch: MicroBatch, score: PolicyScorer) -> BatchLoss:
        others = self.policies.logprobs(batch)
        penalties = reward_penalties(batch.inputs, others, self.settings)
        leaves_policy = self.leaves_policy(batch.version)
        judgement: Judgement | None = None
        gradients: Sequence[Tensor] = ()
        if self._is_own:  # its activations are gone before the policy's are in memory
            judgement = self._judge(batch, penalties, None)
            gradients = torch.autograd.grad(judgement.loss, self.parameters, materialize_grads=True)
        with torch.set_grad_enabled(not leaves_policy):
            scores = score(batch.rows)
        if judgement is None:
            judgement = self._judge(batch, penalties, scores.states)
        inputs = replace(batch.inputs, advantage=judgement.advantages)
        loss, statistics = surrogate_loss(scores, inputs, self.settings, others)
        sums = {**statistics.objective_sums, **_named(judgement.statistics)}
        statistics = replace(statistics, objective_sums=sums)
        if self._is_own:
            return BatchLoss(loss, scores.logprobs, statistics, own_gradients=gradients)
        # Where the step leaves the policy, its loss has no gradient.
        return BatchLoss(loss + judgement.loss, scores.logprobs, statistics, self.parameters)

    def metrics(self, statistics: LossStatistics) -> dict[str, float]:
        values = {n: v for n, v in statistics.objective_sums.items() if n.startswith(VALUES)}
        others = {n: v for n, v in statistics.objective_sums.items() if n not in values}
        by_field = {name.removeprefix(VALUES): total for name, total in values.items()}
        return {
            **super().metrics(replace(statistics, objective_sums=others)),
            **ValueStatistics(**by_field).metrics(),
        }

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Returns the parameters with gradients of the value loss, besides a shared body."""
        return self._masters.parameters

    @property
    def state_bytes(self) -> int:
        return 3 * self._masters.flat.nbytes

    def add(self, gradients: Sequence[Tensor]) -> None:
        if gradients:
            self._masters.add(self._gradient, gradients)

    def join(self, over_all_ranks: Callable[[Tensor], Tensor]) -> None:
        self._gradient.copy_(over_all_ranks(self._gradient.cpu()))

    def update(self, divisor: float) -> dict[str, float]:
        done = self._optimiser.update(self._gradient, divisor, 1.0)
        self._masters.round()
        self._gradient.zero_()
        return {
            "critic_gradient_norm": done.gradient_norm,
            "critic_learning_rate": done.learning_rate,
            **({"critic_updates_skipped": 1.0} if done.skipped else {}),
        }

    def state(self) -> dict[str, Tensor]:
        counters = torch.tensor([self._optimiser.updates, self._optimiser.applied])
        tensors = {**self._named_masters(), **self._optimiser.moments}
        return {**{PREFIX + name: tensor for name, tensor in tensors.items()}, COUNTERS: counters}

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        counters = tensors.get(COUNTERS)
        if counters is None:
            # A checkpoint of a run with another advantage leaves the critic as it starts.
            self._optimiser.load(updates, 0)
            return
        restore({**self._named_masters(), **self._optimiser.moments}, tensors, PREFIX)
        self._masters.round()
        self._optimiser.load(int(counters[0]), int(counters[1]))

    def _named_masters(self) -> dict[str, Tensor]:
        views = self._masters.named(self._masters.flat)
        return {f"masters.{name}": view for name, view in views.items()}

    def _judge(
        self, batch: MicroBatch, penalties: Tensor | None, states: Tensor | None
    ) -> Judgement:
        # `penalties` [G] are subtracted from the rewards; `states` [G, d] are the policy's last
        # hidden states, which a critic without a body of its own reads.
        values = self._values(batch.rows, states)
        old = self._remembered(batch.samples, values.detach().double().cpu().numpy())
        return judge(values, old, batch.samples, batch.inputs, penalties, self.settings)

    def _values(self, rows: TokenRows, states: Tensor | None) -> Tensor:
        if self._states is not None:
            return self._module.of_states(self._states(rows))
        assert states is not None, "a critic on the policy's body needs its states"
        detached = states.detach()
        # `loss_weight` weights the gradient of the shared body, not that of the head.
        return self._module.of_states(detached + self._critic.loss_weight * (states - detached))

    def _remembered(self, samples: Sequence[Sample], now: Floats64) -> Floats64:
        # Values are kept only where the step repeats its updates.
        if self.settings.epochs == 1:
            return now
        counts = [int(np.count_nonzero(sample.mask)) for sample in samples]
        parts = zip(samples, np.split(now, np.cumsum(counts)[:-1]), strict=True)
        return np.concatenate([self._old.setdefault(sample.trajectory, p) for sample, p in parts])


def _named(statistics: ValueStatistics) -> dict[str, float]:
    names = [VALUES + field.name for field in fields(ValueStatistics)]
    return dict(zip(names, astuple(statistics), strict=True))


def _state_scorer(
    model: PreTrainedModel, form: ScoringForm, recomputes: bool
) -> Callable[[TokenRows], Tensor]:
    is_packed = has_packed_form(model) and not form.general
    if recomputes and not is_packed:
        recompute_layers(model)
    layout = "packed" if is_packed else row_form(model, form.joins)
    head = cast("Any", model.get_output_embeddings())  # pyright: ignore[reportUnknownMemberType]
    embedding = cast("Any", model.get_input_embeddings())  # pyright: ignore[reportUnknownMemberType]
    # Its memory is free, unless the matrix is that of the embedding.
    if head.weight is not embedding.weight:
        head.weight = None
    if is_packed:
        return PackedDecoder(model, recomputes).states
    return lambda rows: scored_states(model, rows, layout)
