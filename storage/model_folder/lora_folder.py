"""Reads an adapter of the library PEFT: a plain LoRA with one rank and one alpha for all layers."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollstream.errors import AdapterMissing, ConfigurationError
from rollstream.storage.model_folder.hf_folder import ADAPTER_CONFIG, ADAPTER_TENSORS
from rollstream.storage.model_folder.hf_tokenizer import read_fields
from rollstream.storage.settings import RANK_MAX, LoraSettings

if TYPE_CHECKING:  # settings are checked in processes that need no torch
    from torch import Tensor

ADAPTER_KEYS = ("model.lora.rank", "model.lora.alpha", "model.lora.targets")
ALL_LINEAR = "all-linear"
_PICKLED = "adapter_model.bin"
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    # The others change the base that the adapter belongs to.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "use_bdlora": (False, None),
    "use_qalora": (False, None),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
    "velora_config": (None, {}),
}
"""The values of adapters that are trained here; a field that is absent is plain."""


def adapter_settings(path: str) -> LoraSettings:
    """Raises `ConfigurationError` for a folder without an adapter, and for one of a kind that is
    not trained here; `AdapterMissing` if there is no such folder.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise AdapterMissing(
            f"model.lora.path: this host has no folder {path!r}, and the run's store no adapter: "
            "name the folder of an adapter that PEFT or `rollstream weights export` wrote, or put "
            "it into the store from the host that has it (`rollstream put-model`)"
        )
    for name in (ADAPTER_CONFIG, ADAPTER_TENSORS):
        if not (folder / name).is_file():
            if name == ADAPTER_TENSORS and (folder / _PICKLED).is_file():
                raise _refused(
                    path,
                    f"its tensors are in {_PICKLED}, and pickled ones are not read; load it once "
                    "with PEFT and save it with save_pretrained",
                )
            raise ConfigurationError(
                f"model.lora.path: {path!r} has no {name}: name the folder of an adapter that "
                "PEFT or `rollstream weights export` wrote"
            )
    fields = read_fields(folder / ADAPTER_CONFIG)
    for field, plain in _PLAIN.items():
        if field in fields and fields[field] not in plain:
            raise _refused(path, f"{field} = {fields[field]!r} is not trained here")
    rank, alpha, targets = (fields.get(name) for name in ("r", "lora_alpha", "target_modules"))
    names = [targets] if targets == ALL_LINEAR else targets
    if not (isinstance(rank, int) and 0 < rank <= RANK_MAX):
        raise _refused(path, f"r = {rank!r} must be a whole number from 1 to {RANK_MAX}")
    if not (isinstance(alpha, int | float) and 0 < alpha < math.inf):
        raise _refused(path, f"lora_alpha = {alpha!r} must be a number above 0")
    listed = cast(list[object], names) if isinstance(names, list) else []
    if not listed or not all(isinstance(name, str) for name in listed):
        raise _refused(path, f"target_modules = {targets!r} must be a list of names of layers")
    return LoraSettings(
        path=path, rank=rank, alpha=float(alpha), targets=tuple(sorted(map(str, listed)))
    )


def check_adapter(lora: LoraSettings) -> None:
    """Raise `ConfigurationError` if settings differ from those of the adapter in `lora.path`."""
    assert lora.path is not None
    adapter = adapter_settings(lora.path)
    for field in ("rank", "alpha", "targets"):
        setting, there = getattr(lora, field), getattr(adapter, field)
        if (tuple(sorted(setting)) if field == "targets" else setting) != there:
            raise ConfigurationError(
                f"model.lora.{field} must be {there!r}, as the adapter in {lora.path} has it "
                f"(model.lora.path), got {setting!r}; leave it out"
            )


def adapter_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, "Tensor"]:
    """Returns the tensors as float32, under PEFT's names; `shapes` are those of the model's layers.
    Raises `ConfigurationError` for a tensor that is missing, unknown, of another shape, or not
    finite.
    """
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    try:
        tensors = load_file(folder / ADAPTER_TENSORS)
    except Exception as error:  # the library raises its own class
        raise _refused(str(folder), f"{ADAPTER_TENSORS} cannot be read: {error}") from error
    for name in sorted(shapes.keys() ^ tensors.keys()):
        state = "is missing" if name in shapes else "belongs to no target layer of the model"
        raise _refused(str(folder), f"the tensor {name} {state}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise _refused(
                str(folder), f"{name} has the shape {tuple(tensors[name].shape)}, not {shape}"
            )
        if not math.isfinite(float(tensors[name].float().abs().sum())):
            raise _refused(str(folder), f"{name} has numbers that are not finite")
    return {name: tensor.float() for name, tensor in tensors.items()}


def _refused(folder: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"model.lora.path: the adapter in {folder}: {why}")


def settings_as_set(adapter: LoraSettings) -> dict[str, Any]:
    return dict(
        zip(ADAPTER_KEYS, (adapter.rank, adapter.alpha, list(adapter.targets)), strict=True)
    )
