"""Hashes the model that the ranks start from: they compare it when a term starts, before anything
is trained. Nothing here communicates.
"""

import math
from dataclasses import dataclass

import torch
import xxhash
from transformers import PreTrainedModel

from rollstream.storage.model_folder.lora import attached_adapter, base_state
from rollstream.storage.starting_model.models import parameter_names
from rollstream.storage.starting_model.rows import ModelRows
from rollstream.storage.weights.tensors import state_hash, tensor_bytes

HASHED_NUMBERS = 1 << 24  # read and hashed at a time: 64 MiB as float32


@dataclass(frozen=True, slots=True)
class StartingModel:
    """With `rows` its parameters have no memory yet (torch's meta device), and each rank reads its
    rows from the model's folder.
    """

    model: PreTrainedModel
    rows: ModelRows | None = None


def model_hash(start: StartingModel) -> str:
    """Returns xxh3-128, equal at ranks with equal starting models, over all tensors in memory and
    adapter settings. Of parameters read by rows it covers only `ModelRows.identity` (configuration,
    headers of files, first row of each tensor), so that it is fast.
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
    """The `state_hash` of all tensors without adapters, the same however the model is loaded;
    parameters read by rows are rounded to `dtype` and hashed as float32. With it an adapter never
    continues over another base.
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
        # At most `HASHED_NUMBERS`, or one larger row, are in memory.
        count, step = tensor.shape[0], max(1, HASHED_NUMBERS // math.prod(tensor.shape[1:]))
        for begin in range(0, count, step):
            read = rows.rows(stored[name], begin, min(count, begin + step))
            hasher.update(tensor_bytes(read.to(dtype).float()))
    return hasher.hexdigest()
