"""Ranks that start from equal models compute equal hashes, however the model was loaded.

`model_hash` covers the state that a rank holds, so that ranks can compare it; `base_hash` covers
the model without adapters, so that checkpoints can compare it.
"""

import math
from dataclasses import dataclass

import torch
import xxhash
from transformers import PreTrainedModel

from rollstream.storage.lora import attached_adapter, base_state
from rollstream.storage.models import ModelRows, parameter_names
from rollstream.storage.weights.tensors import state_hash, tensor_bytes

HASHED_NUMBERS = 1 << 24  # 64 MiB as float32


@dataclass(frozen=True, slots=True)
class StartingModel:
    """The model that training starts from: whole, or with empty parameters (on the meta device)
    that each rank fills with its `rows`.
    """

    model: PreTrainedModel
    rows: ModelRows | None = None


def model_hash(start: StartingModel) -> str:
    """Returns an xxh3-128 hash; ranks with equal initial models get equal hashes. Each rank
    computes its own, without a collective operation.
    """
    hasher, tensors = xxhash.xxh3_128(), start.model.state_dict()
    adapter = attached_adapter(start.model)
    if adapter is not None:
        hasher.update(f"{adapter.scaling} {adapter.dtype}".encode() + adapter.config)
    if start.rows is not None:
        hasher.update(start.rows.identity().encode())
        tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name}{tuple(tensor.shape)}".encode())
        hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


def base_hash(start: StartingModel, dtype: torch.dtype) -> str:
    """Returns the `state_hash` of the model without adapters, without a collective operation. A
    model that is read by rows is rounded to `dtype` and hashed as float32, with at most
    `HASHED_NUMBERS` numbers in memory, or one row if that is larger.
    """
    state, rows = base_state(start.model.state_dict()), start.rows
    if rows is None:
        return state_hash(state)
    hasher = xxhash.xxh3_128()
    stored = {
        name: next((alias for alias in aliases if alias in rows), name)
        for aliases in parameter_names(start.model)
        for name in aliases
    }
    for name, tensor in sorted(state.items()):
        hasher.update(name.encode())
        if not tensor.is_meta:
            hasher.update(tensor_bytes(tensor))
            continue
        count, step = tensor.shape[0], max(1, HASHED_NUMBERS // math.prod(tensor.shape[1:]))
        for begin in range(0, count, step):
            read = rows.rows(stored[name], begin, min(count, begin + step))
            hasher.update(tensor_bytes(read.to(dtype).float()))
    return hasher.hexdigest()
