"""One rank's part of a model that ranks train together: rows of each parameter's fp32 master and
AdamW moments. The constructor and every method, unless its docstring excludes it, is a collective:
all ranks call the same ones in the same order. Tensors in checkpoints are those of `learner.py`, so
any number of ranks resumes from any other's.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn import masters
from rollstream.consumers.trainer.learn.forward import (
    RowForm,
    ScoringForm,
    compile_layers,
    forward_scores,
    recompute_layers,
    try_sharded,
)
from rollstream.consumers.trainer.learn.mismatch import logprob_gaps
from rollstream.consumers.trainer.learn.objective import MicroBatch, open_objective
from rollstream.consumers.trainer.learn.row_layout import loss_inputs, to_device, token_rows
from rollstream.consumers.trainer.learn.statistics import LossStatistics
from rollstream.consumers.trainer.learn.workers import lends_state, return_freed_memory
from rollstream.consumers.trainer.rank_plan import slice_of
from rollstream.consumers.trainer.sharded.rank_writing import FrozenTensors, RankTensors
from rollstream.consumers.trainer.sharded.ranks import Ranks
from rollstream.consumers.trainer.sharded.shard_optimiser import ShardOptimiser
from rollstream.consumers.trainer.sharded.starting_model import StartingModel, base_hash
from rollstream.consumers.trainer.sharded.tensors import (
    TensorOwnership,
    gather_everywhere,
    shard_model,
)
from rollstream.storage.model_folder.lora import adapter_state, attached_adapter, base_state
from rollstream.storage.starting_model.models import parameter_names
from rollstream.storage.starting_model.rows import ModelRows
from rollstream.storage.weights.adapters import AdapterTensors
from rollstream.storage.weights.shards import StoredTensors, part_name
from rollstream.storage.weights.tensors import state_hash

COUNTERS = "optimiser.counters"
PREFIXES = ("masters.", "optimiser.mean.", "optimiser.square.")
"""Of a trained parameter's three tensors in a checkpoint."""


class Shard:
    """Owns and divides the float32 model `start`, the same at all ranks. `ShardedLearner` calls
    `train` for each round of an update, then `finish`.

    With LoRA adapters only these are trained, published and saved, as in `learner.py`; each rank
    holds its slices of the frozen base too.
    """

    def __init__(self, start: StartingModel, settings: TrainerSettings, ranks: Ranks) -> None:
        model = start.model
        self._settings, self._ranks, self._model = settings, ranks, model.eval()
        self._home = torch.device("cpu") if settings.cpu_offload else ranks.device
        self._ownership = TensorOwnership(model, ranks)
        self._adapter = attached_adapter(model)
        self._base_hash: Tensor | None = None
        if self._adapter is None:
            model.requires_grad_()
        else:
            digest = base_hash(start, self._adapter.dtype) if ranks.rank == 0 else ""
            self._base_hash = masters.hash_tensor(ranks.gather(digest, str)[0])
        if lends_state(_state_bytes(self._ownership.shapes), self._home):
            return_freed_memory()
        if settings.compile:
            compile_layers(model)
        if settings.gradient_checkpointing:
            recompute_layers(model)
        names = parameter_names(model)
        shard_model(model, ranks.mesh, settings.compute, settings.cpu_offload)
        if start.rows is not None:
            self._fill(start.rows, names)
        self._form: RowForm = try_sharded(model, settings.compute, settings.varlen_attention)
        if isinstance(model, FSDPModule):
            model.reshard()  # FSDP leaves the parameters outside of the layers gathered
        parameters = dict(model.named_parameters())
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._slices = {name: _local(p) for name, p in self._parameters.items()}
        state = {} if self._adapter is None else base_state(model.state_dict())
        self._frozen = {
            name: _local(tensor) if isinstance(tensor, DTensor) else tensor
            for name, tensor in state.items()
        }
        slices = list(self._slices.values())
        self._optimiser = ShardOptimiser(slices, settings, _over_all_ranks)
        form = ScoringForm(torch.float32, ranks.device, general=True, joins=False)
        # Over the policy's own body, the same at every rank.
        self._objective = open_objective(settings, model, form, None)
        self._statistics = LossStatistics()
        self.busy_s = 0.0

    def _fill(self, rows: ModelRows, names: Sequence[Sequence[str]]) -> None:
        def materialised(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device=self._home)
            return tensor.to(self._home if isinstance(tensor, DTensor) else self._ranks.device)

        # Parameters were without memory (on the meta device); adapters have theirs, with values.
        self._model._apply(materialised)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        parameters = dict(self._model.named_parameters())
        for mine in names:
            local = _local(parameters[mine[0]])
            # `names` has all names of each parameter.
            stored = next((name for name in mine if name in rows), None)
            if local.numel() and stored is not None:
                read = rows.rows(stored, *self._rows(mine[0]))
                local.copy_(read if self._adapter is None else read.to(self._adapter.dtype))

    @property
    def updates(self) -> int:
        return self._optimiser.updates

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._ownership.shapes[name] for name in self._slices}

    def begin_step(self, version: int) -> None:
        """Not a collective."""
        self._objective.begin_step(version, None)

    def add_statistics(self, sums: LossStatistics) -> None:
        """Statistics that no pass gives, each on one rank alone: `finish` adds those of all. Not a
        collective.
        """
        self._statistics += sums

    def train(self, samples: Sequence[Sample], version: int, counts: bool) -> None:
        """Adds the gradients of this rank's micro-batch of a round, or of a part of it, trained
        from `version`. A rank that has less to train passes any samples with `counts` False: it
        makes the same passes and adds zeros.
        """
        began = time.monotonic()
        rows, objective = to_device(token_rows(samples), self._ranks.device), self._objective
        scores = forward_scores(self._model, rows, self._form, objective.reads_states)
        if counts:
            inputs = to_device(loss_inputs(samples, version), self._ranks.device)
            batch = MicroBatch(samples, version, rows, inputs, objective.past(samples))
            # Scored above: every rank makes that pass.
            computed = objective.loss(batch, lambda _: scores)
            loss, statistics = computed.loss, computed.statistics
            if self.updates % self._settings.updates_in_step == 0:  # as in learner.py
                gaps = logprob_gaps(computed.logprobs, samples, version)
                statistics = replace(statistics, gaps=gaps)
            self._statistics += statistics
        else:
            loss = scores.logprobs.sum() * 0.0
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        objective.add([_taken_gradient(p) for p in objective.parameters])
        self.busy_s += time.monotonic() - began

    def finish(self) -> dict[str, float]:
        """Updates the masters by all rounds since the last call. Returns metrics, equal on every
        rank.
        """
        total = LossStatistics()
        for part in self._ranks.gather(self._statistics, LossStatistics):
            total += part
        divisor, objective = self._objective.divisor(total), self._objective
        objective.join(_over_all_ranks)
        learnt = objective.update(divisor)
        if objective.leaves_policy(self.updates // self._settings.updates_in_step):
            done = self._optimiser.hold()
        else:
            gradients = [_gradient(p) for p in self._parameters.values()]
            done = self._optimiser.update(gradients, divisor, total.ess)
        for parameter in self._parameters.values():
            parameter.grad = None
        self._statistics = LossStatistics()
        return {
            **objective.metrics(total),
            **learnt,
            "gradient_norm": done.gradient_norm,
            "learning_rate": done.learning_rate,
            "updates_skipped": float(done.skipped),
        }

    def snapshot(self, dtype: str) -> RankTensors | AdapterTensors:
        """A copy to publish, as `dtype` in host memory: each tensor whole on its owner, under all
        its names; of a model with adapters, the whole adapter on every rank.
        """
        published_type: torch.dtype = getattr(torch, dtype)
        if self._adapter is None:
            mine = self._ownership.gather(self._slices, published_type)
            tensors = self._ownership.named(mine, self._model, published_type)
            return RankTensors(tensors, self._ranks)
        factors = gather_everywhere(self._slices, self.shapes, published_type, self._ranks)
        config, scaling = self._adapter.config, self._adapter.scaling
        return AdapterTensors(
            adapter_state(factors), config, scaling, lambda: self._base(published_type)
        )

    def _base(self, dtype: torch.dtype) -> FrozenTensors:
        owned = self._ownership
        shapes = {name: owned.shapes[name] for name in owned.names if name in owned.shapes}
        # No update changes these: the model is trained while the base is written. Not a collective.
        rows = {name: self._frozen[name] for name in owned.names}
        return FrozenTensors(rows, shapes, owned.tied, dtype, self._ranks)

    def state(self) -> dict[str, Tensor]:
        """Returns this rank's rows (masters, moments, counters): the state itself where
        `lends_state`, else a copy in host memory. With several ranks a name contains the rows
        (`part_name`). Not a collective.
        """
        mine: dict[str, Tensor] = {}
        is_lent, is_alone = self.lends_state, self._ranks.size == 1
        for prefix, slices in self._state().items():
            for name, rows in slices.items():
                start, stop = self._rows(name)
                part = prefix + name if is_alone else part_name(prefix + name, start, stop)
                if is_alone or start < stop:
                    mine[part] = rows if is_lent else rows.to("cpu", copy=True)
        if self._ranks.rank == 0:
            mine |= self._single()
        return mine

    def check(self, tensors: StoredTensors) -> None:
        """Raises `ConfigurationError` for another model's checkpoint. Not a collective."""
        masters.check_base_hash(tensors.get(masters.BASE_HASH), self._base_hash)
        for prefix in PREFIXES:
            for name, shape in self.shapes.items():
                masters.check_checkpoint_shape(prefix + name, tensors.shape(prefix + name), shape)

    def load(self, tensors: StoredTensors) -> None:
        """Loads from a checkpoint of any number of ranks. If any rank finds damage, all raise
        `CorruptObject`, and the state is undefined.
        """
        with self._ranks.together():
            for prefix, slices in self._state().items():
                for name, mine in slices.items():
                    if mine.numel():
                        mine.copy_(tensors.rows(prefix + name, *self._rows(name)))
            updates, applied = (int(count) for count in tensors[COUNTERS])
            self._optimiser.load(updates, applied)
            self._objective.load_state(tensors, updates)

    def _rows(self, name: str) -> tuple[int, int]:
        return slice_of(self._ownership.shapes[name][0], self._ranks.rank, self._ranks.size)

    @property
    def state_bytes(self) -> int:
        return _state_bytes(self.shapes)

    @property
    def lends_state(self) -> bool:
        """Whether `state` returns the state itself (`Learner.lends_state`)."""
        return lends_state(self.state_bytes, self._home)

    def state_hash(self) -> str:
        """Returns xxh3-128 over all ranks; another number of ranks gives another one."""
        flat = {
            p + name: rows for p, slices in self._state().items() for name, rows in slices.items()
        }
        flat |= self._single()
        hashes = self._ranks.gather(state_hash(flat), str)
        return xxhash.xxh3_128_hexdigest("".join(hashes).encode())

    def _state(self) -> dict[str, dict[str, Tensor]]:
        adam, names = self._optimiser, list(self._slices)
        moments = (dict(zip(names, m, strict=True)) for m in (adam.mean, adam.square))
        return dict(zip(PREFIXES, (self._slices, *moments), strict=True))

    def _single(self) -> dict[str, Tensor]:
        counters = torch.tensor([self.updates, self._optimiser.applied])
        base = {} if self._base_hash is None else {masters.BASE_HASH: self._base_hash}
        objective = self._objective.state()
        copied = {name: tensor.to("cpu", copy=True) for name, tensor in objective.items()}
        # What every rank holds whole.
        return {COUNTERS: counters, **base, **copied}


def _state_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return len(PREFIXES) * 4 * sum(math.prod(shape) for shape in shapes.values())


def _local(sharded: Tensor) -> Tensor:
    # Shares the tensor's memory.
    return sharded.detach().to_local()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def _taken_gradient(parameter: Tensor) -> Tensor:
    gradient, parameter.grad = parameter.grad, None
    return torch.zeros_like(parameter) if gradient is None else gradient


def _gradient(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else _local(parameter.grad)


def _over_all_ranks(value: Tensor) -> Tensor:
    dist.all_reduce(value)  # pyright: ignore[reportUnknownMemberType]
    return value
