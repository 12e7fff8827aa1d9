"""Models as published versions and back, and small versions of a named weight stream, for tests and
benchmarks.
"""

from collections.abc import Iterable
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollstream.consumers.trainer.versions import VersionWriter, open_named_stream
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.starting_model.models import config_from_version
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.form import form_of
from rollstream.storage.weights.named_streams import WeightStream
from rollstream.streams.bus import Bus
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


def small_tensors(number: int) -> dict[str, torch.Tensor]:
    """The tensors of version `number` of a small model, which change a little from version to
    version.
    """
    weight = torch.arange(600, dtype=torch.float32).reshape(30, 20)
    weight.view(-1)[: 3 * number] += 0.5
    return {"weight": weight, "bias": torch.full((20,), float(number))}


def publish_small(
    bus: Bus, store: ObjectStore, run: str, stream: WeightStream, numbers: Iterable[int]
) -> VersionWriter:
    """Publish versions of `small_tensors` in a named stream, under a new term."""
    settings = WeightsSettings(versions_max=4, anchor_every=2, shard_bytes=1000)
    writer = open_named_stream(bus, store, run, stream, settings, {"config.json": b"{}"})
    for number in numbers:
        writer.publish(number, small_tensors(number))
    return writer
