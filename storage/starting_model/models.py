"""Builds transformers models in fp32, without downloads: new ones, those of a Hugging Face
checkpoint or of a run's store, or without memory for the weights. An unknown model or incomplete
checkpoint raises `ConfigurationError`.
"""

import copy
import difflib
import inspect
import logging
import tempfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import GENERATION_CONFIG_NAME

from rollstream.errors import ConfigurationError, CorruptObject
from rollstream.foreign_json import parse_json, parse_loose_json
from rollstream.storage.model_folder.hf_folder import find_hf_folder, read_small_file
from rollstream.storage.model_folder.hf_weights import (
    check_trainable,
    read_weight_files,
    untied_head,
    unused_line,
)
from rollstream.storage.model_folder.model_fit import (
    BUILD_ERRORS,
    check_class,
    check_fit,
    missing_tensors,
    read_model_config,
)
from rollstream.storage.starting_model.rows import ModelRows, folder_rows
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.fetch import fetch_model_file
from rollstream.storage.weights.manifest import Manifest

if TYPE_CHECKING:  # transformers imports their modules, two seconds, with the first model class
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Setting = int | float | bool | str
COMPARED_ROWS = 1 << 12
"""Rows of two matrices in memory together while they are compared."""
_MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of transformers' classes for numbers that do not fit together."""


def build_model(
    architecture: str,
    config: Mapping[str, Setting],
    seed: int,
    defaults: Mapping[str, Setting] = MappingProxyType({}),
) -> "PreTrainedModel":
    """Returns a model of this transformers class with random fp32 weights; equal arguments give
    equal weights, and the process's random state stays unchanged. `defaults` are for fields that
    `config` does not set and the class has. Raises `ConfigurationError` for an unknown class or
    field, with the nearest known name.
    """
    model_class = _model_class(architecture)
    config_class: Any = model_class.config_class  # Any: every class has its own fields
    field_names = set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs"}
    field_names |= set(config_class.attribute_map) | {"rope_theta"}
    for field in config:
        if field not in field_names:
            raise ConfigurationError(
                f"model.config: {config_class.__name__} has no field {field!r}"
                + _nearest(field, field_names)
            )
    fitting = {
        field: value
        for field, value in defaults.items()
        if field in field_names and config_class.attribute_map.get(field, field) not in config
    }
    try:
        model_config = config_class(**(fitting | dict(config)))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigurationError(f"model.config of {config_class.__name__}: {error}") from error
    try:
        return _new_model(model_class, model_config, seed)
    except _MODEL_ERRORS as error:
        raise ConfigurationError(
            f"model.config makes no {architecture}: {type(error).__name__}: {error}"
        ) from error


def load_model(path: str) -> "PreTrainedModel":
    """Returns the causal language model of a Hugging Face checkpoint in fp32, for any stored dtype
    and number of files. `path` is a folder or a name in the Hub's local cache. Raises
    `ConfigurationError` if anything is missing or wrong.
    """
    folder = _trainable_folder(path)
    config = read_model_config(folder)
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportUnknownMemberType]
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (*BUILD_ERRORS, SafetensorError) as error:
        check_fit(folder)  # names what transformers advises to ignore
        raise ConfigurationError(f"model.path: {folder} cannot be loaded: {error}") from error
    model, loading_info = loaded
    if missing := sorted(loading_info["missing_keys"]):
        raise missing_tensors(folder, missing, type(model).__name__)
    _check_tied(model, folder)
    _name_unused(folder, loading_info["unexpected_keys"])
    _set_generation(model, folder)
    return model


def _check_tied(model: "PreTrainedModel", folder: Path) -> None:
    expected: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    for name, source in expected.items():
        if model.get_parameter(name) is not model.get_parameter(source):
            # transformers unties a tied parameter that was loaded with values of its own.
            raise untied_head(folder, name, source)


def _name_unused(folder: Path, names: Collection[str]) -> None:
    if names:
        log.warning("%s", unused_line(folder, names, "tensors"))


def load_stored_model(folder: str, rows: ModelRows) -> "PreTrainedModel":
    """Returns the model in a run's store in fp32; `folder` holds its configuration. Each tensor is
    read and verified once.
    """
    empty = load_empty_model(folder, rows)
    if empty is None:
        # The files' names are not the model's: transformers needs a folder to convert them;
        # otherwise no weights are written to a disk.
        with tempfile.TemporaryDirectory(prefix="rollstream-model-") as directory:
            return load_model(str(rows.model.write_folder(Path(directory))))
    model, _ = empty
    for names in parameter_names(model):
        stored = next(name for name in names if name in rows)
        parameter = model.get_parameter(names[0])
        read = rows.rows(stored, 0, rows.model.manifest.tensors[stored].rows)
        filled = nn.Parameter(read, parameter.requires_grad)
        for name in names:  # a tied parameter stays one parameter
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, filled)
    return model.eval()


def load_empty_model(
    path: str, stored: ModelRows | None = None
) -> "tuple[PreTrainedModel, ModelRows] | None":
    """Returns the model of a Hugging Face checkpoint with parameters on the meta device (shapes
    without memory), and the reader of the rows with which to fill them. Buffers have their values.
    The weights are those in a run's store, `stored`, else those in the folder. Raises
    `ConfigurationError` as `load_model`. Returns None if the checkpoint's names or shapes differ
    from the model's.
    """
    folder = _trainable_folder(path, has_weights=stored is None)
    try:
        model = _empty_model(folder)
    except ConfigurationError:
        raise
    except BUILD_ERRORS as error:
        raise ConfigurationError(f"model.path: {folder} cannot be loaded: {error}") from error
    groups = parameter_names(model)
    parameters = {name for names in groups for name in names}
    rows = folder_rows(folder) if stored is None else stored
    for names in groups:
        stored_names = [name for name in names if name in rows]
        if not stored_names or rows.shape(stored_names[0]) != tuple(
            model.get_parameter(names[0]).shape
        ):
            # Only `load_model` can convert it, or name the difference.
            return None
        for name in stored_names[1:]:
            if not _is_equal(rows, stored_names[0], name):
                raise untied_head(folder, name, stored_names[0])
    buffers = model.state_dict().keys() - parameters
    _name_unused(folder, rows.model.manifest.tensors.keys() - parameters - buffers)
    for name, buffer in model.named_buffers():
        if name in buffers and name in rows:
            buffer.copy_(rows.whole(name))
    return model, rows


def _is_equal(rows: ModelRows, first: str, second: str) -> bool:
    shape = rows.shape(first)
    if rows.shape(second) != shape:
        return False
    count = shape[0] if shape else 1
    return all(
        torch.equal(rows.rows(first, at, end), rows.rows(second, at, end))
        for at in range(0, count, COMPARED_ROWS)
        for end in (min(at + COMPARED_ROWS, count),)
    )


def _empty_model(folder: Path) -> "PreTrainedModel":
    config = read_model_config(folder)
    config.dtype = torch.float32
    with _empty_parameters():
        model = cast(
            "PreTrainedModel",
            transformers.AutoModelForCausalLM.from_config(config),  # pyright: ignore[reportUnknownMemberType]
        )
    _set_generation(model, folder)
    return model


def _set_generation(model: "PreTrainedModel", folder: Path) -> None:
    path = folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return
    try:
        fields = parse_json(read_small_file(path), dict[str, Any])
        config_class: Any = transformers.GenerationConfig
        model.generation_config = config_class.from_dict(fields)
    except (ValueError, TypeError, AttributeError) as error:
        # transformers would take others, or fail, by the way in which the model is loaded.
        raise ConfigurationError(f"model.path: {path} cannot be read: {error}") from error


def parameter_names(model: "PreTrainedModel") -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


# Modules allocate their parameters with `torch.empty`.
class _EmptyOnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


@contextmanager
def _empty_parameters() -> Generator[None]:
    """While the block runs, put every parameter that a module registers on the meta device."""
    # Buffers (such as rotary frequencies) keep their values: most checkpoints do not have them.
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty
    try:
        with _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register


def _trainable_folder(path: str, has_weights: bool = True) -> Path:
    """Raises `ConfigurationError` if the architecture is unknown, the weights are quantised, or a
    file is missing; with `has_weights` False the weights are elsewhere.
    """
    folder = find_hf_folder(path)
    fields = check_trainable(folder)
    check_class(folder, fields)
    if has_weights:
        read_weight_files(folder)
    return folder


def config_from_version(store: ObjectStore, manifest: Manifest) -> "PreTrainedConfig":
    data = fetch_model_file(store, manifest, "config.json")
    try:
        fields = parse_loose_json(data)
        return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise CorruptObject(
            f"config.json of version {manifest.version} is no model's configuration: {error!r}"
        ) from error


def model_files(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", dtype: torch.dtype
) -> dict[str, bytes]:
    """Returns the files to store beside a version's weights, by name: `config.json` (with `dtype`,
    the type of the stored weights), `generation_config.json`, and those of the tokenizer.
    """
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
    model_class: "type[PreTrainedModel]", config: "PreTrainedConfig", seed: int
) -> "PreTrainedModel":
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        return model_class(config)


def _model_class(architecture: str) -> "type[PreTrainedModel]":
    class_names = {
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)
    }
    model_class = getattr(transformers, architecture, None) if architecture in class_names else None
    if model_class is None:
        raise ConfigurationError(
            f"model.architecture: transformers has no causal language model {architecture!r}"
            + _nearest(architecture, class_names)
        )
    return model_class


def _nearest(name: str, names: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
