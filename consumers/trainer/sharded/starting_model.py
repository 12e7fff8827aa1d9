"""The model that ranks start from, and the hashes of it that ranks and checkpoints compare."""

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
    """xxh3-128 that is equal where the initial model is; not a collective."""
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
    """The `state_hash` of the model without its adapters, rounded to `dtype`, in float32; not a
    collective. Of a model that is read by rows, `HASHED_NUMBERS` are in memory at a time.
    """
    state, rows = base_state(start.model.state_dict()), start.rows
    if rows is None:
        return state_hash(state)
    hasher = xxhash.xxh3_128()
    stored = {
        name: next((one for one in mine if one in rows), name)
        for mine in parameter_names(start.model)
        for name in mine
    }
    for name, tensor in sorted(state.items()):
        hasher.update(name.encode())
        if not tensor.is_meta:
            hasher.update(tensor_bytes(tensor))
            continue
        count, each = tensor.shape[0], max(1, HASHED_NUMBERS // math.prod(tensor.shape[1:]))
        for begin in range(0, count, each):
            read = rows.rows(stored[name], begin, min(count, begin + each))
            hasher.update(tensor_bytes(read.to(dtype).float()))
    return hasher.hexdigest()
