"""Trains a model in one process (`TorchLearner`), without log or store: holds its masters
(`masters.py`), computes gradients in `workers` threads and applies updates.

Gradients are added in the order of submission, so for given micro-batches the masters are
bit-identical for any number of workers.

Reading list: after `consumers/trainer/ledger.py`, before `consumers/trainer/publisher.py`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.forward import policy_scorer, scoring_form
from rollstream.consumers.trainer.learn.masters import (
    BASE_HASH,
    Masters,
    Optimiser,
    check_base_hash,
    hash_tensor,
    hidden_matrices,
    restore,
)
from rollstream.consumers.trainer.learn.mismatch import logprob_gaps
from rollstream.consumers.trainer.learn.objective import (
    MicroBatch,
    PastVersions,
    PastWeights,
    open_objective,
)
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, to_device, token_rows
from rollstream.consumers.trainer.learn.statistics import LossStatistics
from rollstream.consumers.trainer.learn.workers import (
    BufferPool,
    OrderedWorkers,
    is_out_of_memory,
    keep_freed_memory,
    lends_state,
)
from rollstream.storage.model_folder.lora import adapter_state, attached_adapter, base_state
from rollstream.storage.weights.adapters import AdapterTensors
from rollstream.storage.weights.tensors import state_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _MicroBatchJob:
    samples: Sequence[Sample]
    version: int
    number: int
    """Within its step."""
    past: PastWeights


@dataclass(frozen=True, slots=True)
class _BatchResult:
    """The batch result of the policy's parameters, and of the objective's own: all of each, or
    none.
    """

    policy_gradients: Sequence[Tensor]
    own_gradients: Sequence[Tensor]
    statistics: LossStatistics


class TorchLearner:
    """Owns `model` (float32, and of version 0, which the objective may copy, also where
    `load_state` follows): its parameters become views of the masters, or of the masters rounded to
    `trainer.compute`.

    Of a model with LoRA adapters only these are trained, published and saved, with the hash of the
    frozen base, so that they are not loaded over another one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        past: PastVersions | None = None,
    ) -> None:
        keep_freed_memory()
        self._settings = settings
        self._model = model.eval()
        self._adapter = attached_adapter(model)
        self._base_hash: Tensor | None = None
        if self._adapter is not None:
            self._base_hash = hash_tensor(state_hash(base_state(model.state_dict())))
        form = scoring_form(settings)
        self._device = form.device
        # First: below, parameters become views and layers get other forwards.
        self._objective = open_objective(settings, model, form, past)
        self._policy = policy_scorer(
            model,
            form.compute != torch.float32,
            settings.gradient_checkpointing,
            settings.varlen_attention,
            settings.compile,
            keeps_states=self._objective.reads_states,
        )
        self._masters = Masters(model, form.compute, self._device, settings.cpu_offload)
        matrices = hidden_matrices(model) if settings.optimiser == "muon" else ()
        slices = self._masters.slices
        self._optimiser = Optimiser(self._masters.flat, settings, slices, matrices)
        self._gradient = torch.zeros_like(self._masters.flat)
        self._statistics = LossStatistics()
        self._busy_before_s = 0.0
        self._begins_step = True
        self.micro_batches = 0
        self._workers = OrderedWorkers(settings.workers, settings.threads, self._train, self._add)

    @property
    def updates(self) -> int:
        return self._optimiser.updates

    @property
    def version(self) -> int:
        return self.updates // self._settings.updates_in_step

    @property
    def flat(self) -> Tensor:
        """The masters themselves; `finish_update` changes them."""
        return self._masters.flat

    @property
    def busy_s(self) -> float:
        return self._workers.busy_s

    @property
    def state_bytes(self) -> int:
        moments = sum(moment.nbytes for moment in self._optimiser.moments.values())
        return self._masters.flat.nbytes + moments + self._objective.state_bytes

    def submit(self, samples: Sequence[Sample], shortages: int = 0) -> None:
        """Waits only while as many are queued as there are workers."""
        if self._begins_step:
            self.micro_batches, self._begins_step = 0, False
            self._objective.begin_step(self.version, self._masters.named(self.flat))
        self.micro_batches += 1
        past = self._objective.past(samples)
        self._workers.submit(_MicroBatchJob(samples, self.version, self.micro_batches - 1, past))

    def settle(self) -> None:
        self._workers.wait()

    def finish_update(self) -> dict[str, float]:
        self._workers.wait()
        if self._begins_step:  # nothing was submitted; later steps may need this version
            self._objective.begin_step(self.version, self._masters.named(self.flat))
        divisor = self._objective.divisor(self._statistics)
        learnt = self._objective.update(divisor)
        if self._objective.leaves_policy(self.version):
            done = self._optimiser.hold()
        else:
            done = self._optimiser.update(self._gradient, divisor, self._statistics.ess)
        self._masters.round()
        busy_s = self.busy_s - self._busy_before_s
        metrics = {
            **self._objective.metrics(self._statistics),
            **learnt,
            "gradient_norm": done.gradient_norm,
            "learning_rate": done.learning_rate,
            "updates_skipped": float(done.skipped),
            "busy_s": busy_s,
        }
        self._gradient.zero_()
        self._statistics = LossStatistics()
        self._busy_before_s = self.busy_s
        self._begins_step = self.updates % self._settings.updates_in_step == 0
        return metrics

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> dict[str, Tensor]:
        """Tied tensors share memory. Of a model with adapters, these alone (`AdapterTensors`),
        always in new memory.
        """
        state, kind = self._masters.model_state(self._model), getattr(torch, dtype)
        if self._adapter is None:
            return (pool or BufferPool(1)).copy(state, kind)
        copy = BufferPool(1).copy(adapter_state(state), kind)
        config, scaling = self._adapter.config, self._adapter.scaling
        return AdapterTensors(
            copy, config, scaling, lambda: BufferPool(1).copy(base_state(state), kind)
        )

    def state(self, pool: BufferPool | None = None) -> dict[str, Tensor]:
        """Returns masters and moments by prefixed name, and the counters: a copy, or the state
        itself with a `pool` if `lends_state`.
        """
        if pool is not None and self.lends_state:
            return self._state()
        return (pool or BufferPool(1)).copy(self._state(), None)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        check_base_hash(tensors.get(BASE_HASH), self._base_hash)
        restore(self._masters.named(self.flat), tensors, "masters.")
        restore(self._optimiser.moments, tensors, "optimiser.")
        self._masters.round()
        counters = tensors["optimiser.counters"]
        self._optimiser.load(int(counters[0]), int(counters[1]))
        self._objective.load_state(tensors, self.updates)

    @property
    def lends_state(self) -> bool:
        return lends_state(self.state_bytes, self.flat.device)

    def state_hash(self) -> str:
        return state_hash(self._state())

    def close(self) -> None:
        self._workers.close()

    def _state(self) -> dict[str, Tensor]:
        counters = torch.tensor([self.updates, self._optimiser.applied])
        masters = {f"masters.{name}": view for name, view in self._masters.named(self.flat).items()}
        moments = {f"optimiser.{name}": moment for name, moment in self._optimiser.moments.items()}
        base = {} if self._base_hash is None else {BASE_HASH: self._base_hash}
        objective = self._objective.state()
        return {**masters, **moments, **base, **objective, "optimiser.counters": counters}

    def _train(self, job: _MicroBatchJob) -> _BatchResult:
        try:
            return self._compute_or_halve(job)
        except Exception as error:
            raise ComputeFailed((job.number,), error) from error

    def _compute_or_halve(self, job: _MicroBatchJob) -> _BatchResult:
        try:
            return self._compute(job)
        except (RuntimeError, MemoryError) as error:
            if len(job.samples) < 2 or not is_out_of_memory(error):
                raise
            log.warning("%d samples do not fit into memory together, halved", len(job.samples))
        # Outside the except block: the exception's frames hold the tensors of the failed pass.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(job.samples) // 2
        # Two halves round differently from the whole.
        first, second = (
            self._compute_or_halve(replace(job, samples=part))
            for part in (job.samples[:half], job.samples[half:])
        )
        for mine, other in (
            (first.policy_gradients, second.policy_gradients),
            (first.own_gradients, second.own_gradients),
        ):
            if mine and other:
                for gradient, added in zip(mine, other, strict=True):
                    gradient.add_(added)
        halved = LossStatistics(halved=1.0)
        return _BatchResult(
            first.policy_gradients or second.policy_gradients,
            first.own_gradients or second.own_gradients,
            first.statistics + second.statistics + halved,
        )

    def _compute(self, job: _MicroBatchJob) -> _BatchResult:
        samples, version = job.samples, job.version
        inputs = to_device(loss_inputs(samples, version), self._device)
        if not inputs.sequences:
            return _BatchResult((), (), LossStatistics(masked=float(inputs.masked)))
        rows = to_device(token_rows(samples), self._device)
        batch = MicroBatch(samples, version, rows, inputs, job.past)
        loss = self._objective.loss(batch, self._policy)
        leaves_policy = self._objective.leaves_policy(version)
        trained = () if leaves_policy else self._masters.parameters
        gradients = _gradients(loss.loss, [*trained, *loss.joint])
        own_gradients = loss.own_gradients or gradients[len(trained) :]
        statistics = loss.statistics
        # Only the first update of a step trains from weights that have a version number.
        if self.updates % self._settings.updates_in_step == 0:
            statistics = replace(statistics, gaps=logprob_gaps(loss.logprobs, samples, version))
        return _BatchResult(gradients[: len(trained)], own_gradients, statistics)

    def _add(self, trained: _BatchResult) -> None:
        self._statistics += trained.statistics
        self._objective.add(trained.own_gradients)
        if trained.policy_gradients:
            self._masters.add(self._gradient, trained.policy_gradients)


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    if not parameters:
        return ()
    return torch.autograd.grad(loss, parameters, materialize_grads=True)
