"""Scores recorded tokens as the trainer would, under the version that sampled each. A difference
from the recorded log-probability is the mismatch of engine and trainer
(docs/explanation/learning.md), with rounding of the published weights and, in later spans
(`in_flight`), a KV cache of older weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample, admitted_sample
from rollstream.consumers.trainer.data.selection import pack_micro_batches
from rollstream.consumers.trainer.learn.forward import device_of, policy_scorer
from rollstream.consumers.trainer.learn.masters import Masters
from rollstream.consumers.trainer.learn.row_layout import to_device, token_rows
from rollstream.errors import ObjectMissing
from rollstream.storage.model_folder.lora import PREFIX
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Floats, Version


class VersionScorer:
    """Scores trajectories under the versions in `store`. It owns `model`, the run's starting model
    (float32, with its adapters), and computes in the type and on the device of the trainer's
    `settings`.
    """

    def __init__(
        self, store: ObjectStore, model: PreTrainedModel, settings: TrainerSettings
    ) -> None:
        self._store, self._settings = store, settings
        self._device = device_of(settings.device)
        compute: torch.dtype = getattr(torch, settings.compute)
        is_general = compute != torch.float32 or settings.compile
        self._model = model.eval()
        self._policy = policy_scorer(model, is_general, joins=settings.varlen_attention)
        self._masters = Masters(model, compute, self._device, settings.cpu_offload)
        self._held = ResidentWeights()
        self.missing: set[Version] = set()
        """Needed versions that are no longer in the store."""

    def score(self, records: Sequence[Trajectory]) -> list[tuple[Floats, Floats]]:
        """Returns log-probabilities [G] and entropies [G] of the generated tokens of each record,
        which `refusal` has accepted; NaN for tokens of a version that is not stored.
        """
        scores = [(_unknown(record), _unknown(record)) for record in records]
        for version in sorted({span.version for record in records for span in record.spans}):
            if not self._load(version):
                continue
            masks = [_tokens_of(record, version) for record in records]
            scored = self._scored(
                replace(admitted_sample(record, 0.0), mask=mask)
                for record, mask in zip(records, masks, strict=True)
                if mask.any()
            )
            for record, mask, values in zip(records, masks, scores, strict=True):
                if mask.any():
                    values[0][mask], values[1][mask] = scored[record.trajectory]
        return scores

    def _load(self, version: Version) -> bool:
        if version in self.missing:
            return False
        try:
            self._held.update(self._store, version)
        except ObjectMissing:
            self.missing.add(version)
            return False
        masters = self._masters.named(self._masters.flat)
        others: dict[str, torch.Tensor] = self._model.state_dict()
        with torch.no_grad():
            for stored, tensor in self._held.tensors.items():
                name = stored.removeprefix(PREFIX)
                (masters[name] if name in masters else others[name]).copy_(tensor)
            self._masters.round()
        return True

    def _scored(self, samples: Iterable[Sample]) -> dict[str, tuple[Floats, Floats]]:
        by_trajectory: dict[str, tuple[Floats, Floats]] = {}
        for batch in pack_micro_batches([*samples], self._settings.micro_batch_tokens):
            with torch.no_grad():
                scores = self._policy(to_device(token_rows(batch), self._device))
            logprobs, entropy = (
                values.float().cpu().numpy() for values in (scores.logprobs, scores.entropy)
            )
            start = 0
            for sample in batch:
                end = start + int(np.count_nonzero(sample.mask))
                by_trajectory[sample.trajectory] = (logprobs[start:end], entropy[start:end])
                start = end
        return by_trajectory


def _unknown(record: Trajectory) -> Floats:
    return np.full(len(record.logprobs), np.nan, np.float32)


def _tokens_of(record: Trajectory, version: Version) -> NDArray[np.bool_]:
    mask = np.zeros(len(record.logprobs), np.bool_)
    for span in record.spans:
        if span.version == version:
            mask[span.start : span.end] = True
    return mask
