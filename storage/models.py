"""Builds transformers models in fp32 from a configuration, a checkpoint folder or a weight version;
nothing is downloaded.

All code that knows transformers' configuration classes is here.
"""

import copy
import difflib
import inspect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollstream.errors import ConfigurationError
from rollstream.storage.hf_folder import check_hf_weights, find_hf_folder, read_hf_config
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.fetch import fetch_model_file
from rollstream.storage.weights.manifest import Manifest

Setting = int | float | bool | str


def build_model(architecture: str, config: Mapping[str, Setting], seed: int) -> PreTrainedModel:
    """A new fp32 model of this transformers class; equal arguments give equal weights.

    The process's own random state stays as it was. `ConfigurationError` names the nearest known
    class or field.
    """
    model_class = _model_class(architecture)
    config_class: Any = model_class.config_class  # Any: every class has its own fields
    known = set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs"}
    known |= set(config_class.attribute_map) | {"rope_theta"}
    for field in config:
        if field not in known:
            raise ConfigurationError(
                f"model.config: {config_class.__name__} has no field {field!r}"
                + _nearest(field, known)
            )
    try:
        made = config_class(**config)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigurationError(f"model.config of {config_class.__name__}: {error}") from error
    return _new_model(model_class, made, seed)


def load_model(path: str) -> PreTrainedModel:
    """The causal language model of a Hugging Face checkpoint (`find_hf_folder`) in fp32,
    whatever its stored dtype and number of files. Raises `ConfigurationError` if anything is
    missing or wrong.
    """
    folder = find_hf_folder(path)
    fields = read_hf_config(folder)
    if "quantization_config" in fields:
        raise ConfigurationError(
            f"model.path: {folder} holds quantised weights, which have no masters to train; "
            "give the original checkpoint"
        )
    for architecture in fields.get("architectures") or ():
        _model_class(architecture, f"model.path: {folder}")
    check_hf_weights(folder)
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportUnknownMemberType]
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, SafetensorError, StrictDataclassError, ValueError) as error:
        raise ConfigurationError(f"model.path: {folder} cannot be loaded: {error}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ConfigurationError(
            f"model.path: {folder} has no {missing[0]} ({len(missing)} tensors of "
            f"{type(model).__name__} are missing), and none is invented: is it another model's?"
        )
    return model


def config_from_version(store: ObjectStore, manifest: Manifest) -> PreTrainedConfig:
    """The model configuration in a version; it names the architecture."""
    fields = json.loads(fetch_model_file(store, manifest, "config.json"))
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)  # pyright: ignore[reportUnknownMemberType]


def model_files(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype
) -> dict[str, bytes]:
    """The files beside the weights: `config.json` (it names `dtype`), generation, tokenizer."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    files["generation_config.json"] = model.generation_config.to_json_string().encode()
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
            files.update({path.name: path.read_bytes() for path in Path(folder).iterdir()})
    return files


def _new_model(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int
) -> PreTrainedModel:
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        return model_class(config)


def _model_class(architecture: str, where: str = "model.architecture") -> type[PreTrainedModel]:
    known = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)}
    found = getattr(transformers, architecture, None) if architecture in known else None
    if found is None:
        raise ConfigurationError(
            f"{where}: transformers has no causal language model {architecture!r}"
            + _nearest(architecture, known)
        )
    return found


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
