"""Models as published versions and back, for tests and benchmarks."""

from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollstream.storage.models import config_from_version
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.form import form_of
from rollstream.streams.values import Version


def model_from_version(
    store: ObjectStore, version: Version, manifest_hash: str | None = None
) -> PreTrainedModel:
    """The model of a stored version as fp32, every tensor verified; an adapter is merged in."""
    manifest, tensors = fetch_tensors(store, version, manifest_hash)
    tensors = form_of(manifest).model_tensors(store, manifest, tensors)
    config = config_from_version(store, manifest)
    config.dtype = torch.float32
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))  # pyright: ignore[reportUnknownMemberType]
    model.load_state_dict(tensors)  # pyright: ignore[reportUnknownMemberType]
    return model


def published_tensors(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers in the dtype of publication; tied ones share memory."""
    cast = {tensor.data_ptr(): tensor.to(dtype) for tensor in model.state_dict().values()}
    return {name: cast[tensor.data_ptr()] for name, tensor in model.state_dict().items()}
