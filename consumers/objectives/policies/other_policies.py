"""Scores tokens under the reference of a KL term (`trainer.reference`) and the proximal policy of
decoupled PPO (`trainer.proximal`).

A version has its weights as published, rounded to `weights.dtype`; version 0 alone is the starting
model. Which one follows from the version that is trained from (`named_version`): a resumed or
replayed step has the recorded policies, and a checkpoint need not hold them.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.credit import scored_reference
from rollstream.consumers.objective_settings import BEHAVIOUR, named_version
from rollstream.consumers.objectives.loss import OtherLogprobs
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.forward import PolicyScorer, ScoringForm, policy_scorer
from rollstream.consumers.trainer.learn.masters import Masters
from rollstream.consumers.trainer.learn.objective import MicroBatch, PastVersions, PastWeights
from rollstream.consumers.trainer.learn.row_layout import (
    TokenRows,
    given_reference,
    to_device,
    token_rows,
)
from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.lora import PREFIX
from rollstream.storage.starting_model.models import load_model
from rollstream.streams.values import Version

BEHAVIOURS_MAX = 8
"""In memory besides those of queued micro-batches: more than usual lags (`dispatch.max_lag` is 4),
so each is read once.
"""


class OtherPolicies:
    """The policies, each a copy of `model` (float32, of version 0) or a model of its own. `follow`
    and `behind` are to be called from the learner's thread, `logprobs` from any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        form: ScoringForm,
        past: PastVersions | None,
    ) -> None:
        self._form, self._past = form, past
        self._behind: OrderedDict[Version, Mapping[str, Tensor]] = OrderedDict()
        self._reference = self._proximal = None
        # The samples then have its log-probabilities, and no model is held here.
        self._is_scored = bool(scored_reference(settings))
        if settings.reference_kl and not self._is_scored:
            self._reference = _frozen_policy(model, settings.reference, form, past)
        if settings.proximal:
            self._proximal = _frozen_policy(model, settings.proximal, form, past)

    def follow(self, version: int, parameters: Mapping[str, Tensor] | None) -> None:
        """Gives each policy its weights for the step that trains from `version`, whose trained
        parameters are `parameters` (None: its published ones). No micro-batch may be in
        computation.
        """
        for policy in (self._reference, self._proximal):
            if policy is not None:
                # A copy of the learner's own version has the same bits as the published one.
                policy.follow(version, parameters)

    def behind(self, samples: Sequence[Sample]) -> PastWeights:
        """Returns weights of the versions that emitted these samples' tokens, where the proximal
        policy is the behaviour policy; else {}.
        """
        if self._proximal is None or not self._proximal.is_behaviour:
            return {}
        needed = {
            version for sample in samples for version, count in _trained_spans(sample) if count
        }
        if self._past is None:
            raise ConfigurationError("trainer.proximal: no versions are stored here")
        by_version: dict[Version, Mapping[str, Tensor]] = {}
        for version in sorted(needed):
            weights = self._behind.pop(version, None)
            if weights is None:
                weights = self._past.read(version.number, version.term)
            by_version[version] = self._behind[version] = weights
        while len(self._behind) > BEHAVIOURS_MAX:
            self._behind.popitem(last=False)
        return by_version

    def logprobs(self, batch: MicroBatch) -> OtherLogprobs:
        reference = None if self._reference is None else self._reference.score(batch.rows)
        if self._is_scored:
            reference = given_reference(batch.samples).to(self._form.device)
        if self._proximal is None:
            return OtherLogprobs(reference)
        if self._proximal.is_behaviour:
            return OtherLogprobs(reference, self._proximal.score_each(batch.samples, batch.past))
        return OtherLogprobs(reference, self._proximal.score(batch.rows))


class FrozenPolicy:
    """Scores under a version (`named_version`), each token's own version (`BEHAVIOUR`), or another
    model. It owns `frozen`: that model, or the one of version 0.
    """

    def __init__(
        self, frozen: PreTrainedModel, name: str, form: ScoringForm, past: PastVersions | None
    ) -> None:
        self.is_behaviour = name == BEHAVIOUR
        self._name, self._form, self._past = name, form, past
        self.version = 0
        frozen.eval()
        self._trained = {n: p for n, p in frozen.named_parameters() if p.requires_grad}
        frozen.requires_grad_(False)
        self._score: PolicyScorer = policy_scorer(frozen, general=form.general, joins=form.joins)
        Masters(frozen, form.compute, form.device)  # rounds and moves them as the policy's
        self._lock = threading.Lock()

    def follow(self, version: int, parameters: Mapping[str, Tensor] | None) -> None:
        """Follows for a step that trains from `version`; the published weights if `parameters` is
        None.
        """
        number = named_version(self._name, version)
        if number is None or number == self.version:
            return
        if number == version and parameters is not None:
            self._fill(parameters)
        elif self._past is not None:
            self._fill(self._past.read(number))
        else:
            raise ConfigurationError(f"version {number} ({self._name!r}) is not stored here")
        self.version = number

    @torch.no_grad()
    def score(self, rows: TokenRows) -> Tensor:
        return self._score(rows).logprobs

    def score_alone(self, sample: Sample) -> Tensor:
        return self.score(to_device(token_rows([sample]), self._form.device))

    def score_each(self, samples: Sequence[Sample], past_weights: PastWeights) -> Tensor:
        """Returns log-probabilities [G], each under the version of its span, whose weights are in
        `past_weights`.
        """
        numbers = {version: number for number, version in enumerate(past_weights)}
        spans = [
            (owner, numbers[version], count)
            for owner, sample in enumerate(samples)
            for version, count in _trained_spans(sample)
            if count
        ]
        owners, versions, counts = np.array(spans, np.int64).T
        owner, which = np.repeat(owners, counts), np.repeat(versions, counts)
        result = torch.empty(len(which), device=self._form.device)
        # Threads share the model.
        with self._lock:
            for number, weights in enumerate(past_weights.values()):
                chosen: list[int] = np.unique(owner[which == number]).tolist()
                if not chosen:
                    continue
                self._fill(weights)
                rows = to_device(token_rows([samples[i] for i in chosen]), self._form.device)
                is_scored: NDArray[np.bool_] = np.isin(owner, chosen)
                mine = torch.from_numpy(which[is_scored] == number).to(self._form.device)  # pyright: ignore[reportUnknownMemberType]
                places = np.flatnonzero(is_scored & (which == number))
                result[torch.from_numpy(places).to(self._form.device)] = self.score(rows)[mine]  # pyright: ignore[reportUnknownMemberType]
        return result

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        dtype = torch.float32 if self._past is None else getattr(torch, self._past.dtype)
        for name, parameter in self._trained.items():
            weights = tensors[name] if name in tensors else tensors[PREFIX + name]
            # Rounded as versions are published.
            parameter.copy_(weights.to(dtype))


def _frozen_policy(
    model: PreTrainedModel, name: str, form: ScoringForm, past: PastVersions | None
) -> FrozenPolicy:
    is_version = name == BEHAVIOUR or named_version(name, 0) is not None
    frozen = copy.deepcopy(model) if is_version else load_reference(name, vocabulary_of(model))
    return FrozenPolicy(frozen, name, form, past)


def _trained_spans(sample: Sample) -> list[tuple[Version, int]]:
    return [
        (span.version, int(np.count_nonzero(sample.mask[span.start : span.end])))
        for span in sample.spans
    ]


def vocabulary_of(model: PreTrainedModel) -> int:
    fields: Any = model.config.get_text_config()  # pyright: ignore[reportUnknownMemberType]
    return int(fields.vocab_size)


def load_reference(path: str, tokens_min: int) -> PreTrainedModel:
    """Raises `ConfigurationError` if the model has fewer tokens than the trained one (`tokens_min`)
    and cannot score what that writes.
    """
    try:
        other = load_model(path)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("model.path:", "trainer.reference:")) from error
    tokens = vocabulary_of(other)
    if tokens < tokens_min:
        raise ConfigurationError(
            f"trainer.reference: {path} has {tokens} tokens, the trained model {tokens_min}; the "
            "reference must have the trained model's tokens"
        )
    return other
