"""Compares a checkpoint with transformers' model, without memory for weights."""

import re
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollstream.errors import ConfigurationError
from rollstream.storage.model_folder.hf_folder import BOM, CONFIG, read_hf_config, read_small_file
from rollstream.storage.model_folder.hf_weights import StoredTensor, read_weight_files, unused_line

if TYPE_CHECKING:  # transformers imports their modules, two seconds, with the first model class
    from transformers import PreTrainedConfig, PreTrainedModel

BUILD_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, KeyError, OSError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
"""Errors of transformers' classes for a configuration that they cannot build."""

SAMPLED_BYTES, TENSOR_BYTES = 64 << 20, 1 << 20
"""Most bytes, of all tensors and of each, in which values that are not finite are looked for."""
_SIZE_WORDS = ("size of tensor", "shapes cannot be multiplied", "is invalid for input of size")
_FLOATS = {
    "F64": (np.uint64, 0x7FF0000000000000),
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}


def read_model_config(folder: Path) -> "PreTrainedConfig":
    """Reads the configuration; code that it names is never imported. Raises `ConfigurationError` if
    transformers has no causal language model of its type.
    """
    fields = read_hf_config(folder)
    check_class(folder, fields)
    try:
        with _without_bom(folder) as readable:
            config_class: Any = transformers.AutoConfig
            config = config_class.from_pretrained(
                readable, local_files_only=True, trust_remote_code=False
            )
    except BUILD_ERRORS as error:
        raise ConfigurationError(
            f"model.path: {folder / CONFIG} ({fields['model_type']}) cannot be loaded: "
            f"{_in_a_line(error)}"
        ) from error
    config._attn_implementation = None  # the folder's choice would need packages of its own
    return cast("PreTrainedConfig", config)


@contextmanager
def _without_bom(folder: Path) -> Generator[Path]:
    if not (folder / CONFIG).read_bytes().startswith(BOM):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rollstream-config-") as copy:
        (Path(copy) / CONFIG).write_bytes(read_small_file(folder / CONFIG))
        yield Path(copy)


def check_class(folder: Path, fields: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` unless transformers has a causal language model for these `fields`
    of a `config.json`.
    """
    where, kind = f"model.path: {folder / CONFIG}", fields.get("model_type")
    if not isinstance(kind, str):
        raise ConfigurationError(
            f"{where} has no model_type, so no class of transformers is known to read it: give a "
            "checkpoint that transformers' save_pretrained wrote"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if "auto_map" in fields:
            why = "its own code (auto_map) would be needed, which is never run"
        elif kind in transformers.CONFIG_MAPPING:
            why = "which is no causal language model: only decoders of text are trained"
        else:
            why = f"which transformers {transformers.__version__} does not have"
        raise ConfigurationError(f"{where} has model_type = {kind!r}, {why}")
    class_names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    declared: Any = fields.get("architectures")
    architectures = cast(list[object], declared) if isinstance(declared, list) else []
    for architecture in architectures:
        plain_name = architecture.removeprefix("FSDP") if isinstance(architecture, str) else ""
        if architecture != plain_name and plain_name in class_names:
            raise ConfigurationError(
                f"{where} names the class {architecture!r} (architectures), as training with FSDP2 "
                f"wrote it: write {plain_name!r} there"
            )
        if architecture not in class_names:
            raise ConfigurationError(
                f"{where}: transformers has no causal language model {architecture!r} "
                "(architectures): the weights are another kind of model's"
            )


def check_fit(folder: Path) -> "PreTrainedModel":
    """Returns the model on the meta device. Raises `ConfigurationError` if its class cannot be
    built, or a tensor is missing or has another shape.
    """
    config = read_model_config(folder)
    tensors = read_weight_files(folder)
    try:
        with torch.device("meta"):
            model_class: Any = transformers.AutoModelForCausalLM
            model = cast("PreTrainedModel", model_class.from_config(config, dtype=torch.float32))
    except BUILD_ERRORS as error:
        raise ConfigurationError(
            f"model.path: {folder / CONFIG} ({type(config).__name__}) cannot be loaded: "
            f"{_in_a_line(error)}"
        ) from error
    _compare(folder, model, tensors)
    return model


def _compare(folder: Path, model: "PreTrainedModel", tensors: Mapping[str, StoredTensor]) -> None:
    name, expected = type(model).__name__, _shapes(model)
    groups = _tied_names(model)
    missing, wrong, unused = _converted(folder, model, tensors)
    if wrong:
        tensor, shape, other = min(wrong)
        raise ConfigurationError(
            f"model.path: {tensor} in {folder} has the shape {list(shape)}, and its {CONFIG} makes "
            f"a {name} with {list(other)} ({len(wrong)} such tensors): the configuration is "
            "another model's"
        )
    lacking = [key for key in missing if all(other in missing for other in groups.get(key, (key,)))]
    if lacking:
        raise missing_tensors(folder, lacking, name)
    forms = {_NUMBER.sub("#", key) for key in expected}
    if layers := [key for key in unused if _NUMBER.sub("#", key) in forms]:
        raise ConfigurationError(
            f"{unused_line(folder, layers, 'tensors')}: its {CONFIG} states fewer layers than the "
            "weights have"
        )


def missing_tensors(folder: Path, names: list[str], model: str) -> ConfigurationError:
    return ConfigurationError(
        f"model.path: {folder} has no {min(names)} ({len(names)} tensors of {model} are missing), "
        "and none is invented: is it another model's?"
    )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return {name: group for group in names.values() for name in group}


_NUMBER = re.compile(r"\d+")
_Wrong = list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def _converted(
    folder: Path, model: Any, tensors: Mapping[str, StoredTensor]
) -> tuple[list[str], _Wrong, list[str]]:
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig
    except ImportError:  # of another release: its own loader names what is missing
        return [], [], []

    mapping: Any = get_model_conversion_mapping(model)
    plan: Any = LoadStateDictConfig(
        device_map={"": "meta"}, dtype=torch.float32, weight_mapping=mapping
    )
    loading: Any = core_model_loading
    empty = {
        name: torch.empty(tensor.shape, dtype=torch.float32, device="meta")
        for name, tensor in tensors.items()
    }
    with torch.device("meta"):
        info = loading.convert_and_load_state_dict_in_model(model, empty, plan)[0]
    model._adjust_missing_and_unexpected_keys(info)
    if info.conversion_errors:
        name, reason = next(iter(info.conversion_errors.items()))
        raise ConfigurationError(
            f"model.path: the tensors of {folder} cannot be converted to {name} of "
            f"{type(model).__name__}: {reason}"
        )
    wrong = [
        (name, tuple(there), tuple(expected)) for name, there, expected in info.mismatched_keys
    ]
    return sorted(info.missing_keys), wrong, sorted(info.unexpected_keys)


def check_finite(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `ConfigurationError` for a value among the first `SAMPLED_BYTES`; engines check every
    value.
    """
    bytes_left = SAMPLED_BYTES
    for name, tensor in tensors.items():
        size = min(tensor.end - tensor.start, bytes_left, TENSOR_BYTES) // 8 * 8
        if size and tensor.dtype in _FLOATS:
            with tensor.path.open("rb") as file:
                file.seek(tensor.start)
                bits = np.frombuffer(file.read(size), _FLOATS[tensor.dtype][0])
            mask = _FLOATS[tensor.dtype][1]
            if ((bits & mask) == mask).any():  # the exponent of infinities and NaN
                raise ConfigurationError(
                    f"model.path: {name} in {tensor.path} holds values that are not finite (NaN or "
                    "infinity): give an earlier checkpoint"
                )
        bytes_left -= size


def check_forward(model: "PreTrainedModel", folder: Path) -> None:
    """Raise `ConfigurationError` if the model's sizes contradict each other: two tokens are passed
    through it without values. A model whose code needs values is not checked.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            model(input_ids=tokens, use_cache=False)
    except BUILD_ERRORS as error:
        if not is_misfit(error):
            return
        raise ConfigurationError(
            f"model.path: {folder / CONFIG} states a {type(model).__name__} that cannot compute: "
            f"{_in_a_line(error)}"
        ) from error


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def is_misfit(error: BaseException) -> bool:
    """Returns whether a model without memory failed because of its sizes or arguments: kernels and
    code that look at values fail there too, and serve a healthy model.
    """
    text = str(error)
    if isinstance(error, NotImplementedError) or "meta" in text:
        return False
    return isinstance(error, TypeError) or any(words in text for words in _SIZE_WORDS)
