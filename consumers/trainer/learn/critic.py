"""The critic of `trainer.advantage = "gae"` (`Critic`): values the actions of a micro-batch, makes
the advantages from these, and learns the values with an optimiser of its own, apart from the
policy's masters and versions.

An advantage is made from the values of a token's first pass in its step, also in further epochs. So
it depends on the state at the step's begin and its takes alone, and checkpoints need not hold it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.forward import (
    recompute_layers,
    row_form,
    scored_states,
)
from rollstream.consumers.trainer.learn.gae import Floats64, Judgement, ValueStatistics, judge
from rollstream.consumers.trainer.learn.llama import PackedDecoder, has_packed_form
from rollstream.consumers.trainer.learn.masters import Masters, Optimiser, restore
from rollstream.consumers.trainer.learn.other_policies import ScoringForm
from rollstream.consumers.trainer.learn.row_layout import LossInputs, TokenRows

PREFIX = "critic."
"""Of the critic's tensors in a checkpoint."""
COUNTERS = PREFIX + "counters"


class ValueModel(nn.Module):
    """A float32 linear value head, which starts at 0, and, with `is_own`, the copy of a model that
    it reads.
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
        """Returns the values [G] for the last hidden states [G, d]."""
        return F.linear(states.float(), self.value.weight, self.value.bias).squeeze(-1)


class Critic:
    """The critic of one learner; it copies `model` (float32, of version 0) if it has a body of its
    own (`is_own`). `judge` may be called from several threads; the others from the learner's
    thread, while no micro-batch is in computation.
    """

    def __init__(self, model: PreTrainedModel, settings: TrainerSettings, form: ScoringForm):
        self._settings, self._own = settings, settings.critic
        self.is_own = self._own.body == "own"
        self._module = ValueModel(model, self.is_own)
        self._states: Callable[[TokenRows], Tensor] | None = None
        if self._module.model is not None:
            recomputes = settings.gradient_checkpointing
            self._states = _state_scorer(self._module.model, form, recomputes)
        self._masters = Masters(self._module, form.compute, form.device, settings.cpu_offload)
        rate = settings.lr if self._own.lr is None else self._own.lr
        alike = {"lr": rate, "optimiser": "adamw", "ess_guard": "off"}
        self._optimiser = Optimiser(
            self._masters.flat, settings.model_copy(update=alike), self._masters.slices
        )
        self._gradient = torch.zeros_like(self._masters.flat)
        self._old: dict[str, Floats64] = {}
        self._statistics = ValueStatistics()

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Parameters with gradients of the value loss, besides a shared body."""
        return self._masters.parameters

    @property
    def state_bytes(self) -> int:
        """Bytes of masters and moments."""
        return 3 * self._masters.flat.nbytes

    def begin_step(self) -> None:
        self._old.clear()

    def is_warming(self, version: int) -> bool:
        """Whether the step from `version` trains the critic alone."""
        return version < self._own.warmup

    def judge(
        self,
        samples: Sequence[Sample],
        rows: TokenRows,
        inputs: LossInputs,
        penalties: Tensor | None,
        states: Tensor | None = None,
    ) -> Judgement:
        """Returns the advantages of the samples' trained tokens and the loss of their values.
        `penalties` [G] are subtracted from the rewards; `states` [G, d] are the policy's last
        hidden states, which a critic without a body of its own reads.
        """
        values = self._values(rows, states)
        old = self._remembered(samples, values.detach().double().cpu().numpy())
        return judge(values, old, samples, inputs, penalties, self._settings)

    def take_gradients(self) -> list[Tensor]:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def join(
        self,
        over_all_ranks: Callable[[Tensor], Tensor],
        gather: Callable[[ValueStatistics], Sequence[ValueStatistics]],
    ) -> None:
        """Replaces sums of gradients and statistics by those of all ranks, which then make the same
        update. A collective.
        """
        self._gradient.copy_(over_all_ranks(self._gradient.cpu()))
        self._statistics = sum(gather(self._statistics), ValueStatistics())

    def add(self, gradients: Sequence[Tensor], statistics: ValueStatistics) -> None:
        self._statistics += statistics
        if gradients:
            self._masters.add(self._gradient, gradients)

    def update(self, weight: float) -> dict[str, float]:
        """Applies the sum of the gradients, divided by `weight`; returns metrics."""
        done = self._optimiser.update(self._gradient, weight, 1.0)
        self._masters.round()
        metrics = {
            **self._statistics.metrics(),
            "critic_gradient_norm": done.gradient_norm,
            "critic_learning_rate": done.learning_rate,
            **({"critic_updates_skipped": 1.0} if done.skipped else {}),
        }
        self._gradient.zero_()
        self._statistics = ValueStatistics()
        return metrics

    def state(self) -> dict[str, Tensor]:
        """Returns the critic's part of a checkpoint, not a copy."""
        counters = torch.tensor([self._optimiser.updates, self._optimiser.applied])
        tensors = {**self._named_masters(), **self._optimiser.moments}
        return {**{PREFIX + name: tensor for name, tensor in tensors.items()}, COUNTERS: counters}

    def load_state(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Restores `state()`; `updates` are those of the policy."""
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

    def _values(self, rows: TokenRows, states: Tensor | None) -> Tensor:
        if self._states is not None:
            return self._module.of_states(self._states(rows))
        assert states is not None, "a critic on the policy's body needs its states"
        detached = states.detach()
        # `loss_weight` weights the gradient of the shared body, not that of the head.
        return self._module.of_states(detached + self._own.loss_weight * (states - detached))

    def _remembered(self, samples: Sequence[Sample], now: Floats64) -> Floats64:
        # Values are kept only where the step repeats its updates.
        if self._settings.epochs == 1:
            return now
        counts = [int(np.count_nonzero(sample.mask)) for sample in samples]
        parts = zip(samples, np.split(now, np.cumsum(counts)[:-1]), strict=True)
        return np.concatenate([self._old.setdefault(sample.trajectory, p) for sample, p in parts])


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
