"""Builds transformers models in fp32, without downloads: new ones from a configuration
(`build_model`), or those of a Hugging Face checkpoint (`load_model`) or of a run's store
(`load_stored_model`). For several trainer ranks a model is built without memory for its weights
(`load_empty_model`): each rank reads its own rows.

It also reads and makes the files that a weight version has beside its tensors, such as
`config.json` (`config_from_version`, `model_files`). A model that transformers does not know, or a
checkpoint that is incomplete, is refused by name (`ConfigurationError`).
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
from rollstream.storage.hf_folder import find_hf_folder, read_small_file
from rollstream.storage.hf_weights import (
    check_trainable,
    hf_weight_files,
    read_weight_files,
    untied_head,
    unused_line,
)
from rollstream.storage.model_fit import (
    BUILD_ERRORS,
    check_class,
    check_fit,
    missing_tensors,
    read_model_config,
)
from rollstream.storage.starting_model.rows import FolderRows, ModelRows, StoredRows
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.fetch import fetch_model_file
from rollstream.storage.weights.manifest import Manifest

if TYPE_CHECKING:  # transformers imports their modules, two seconds, with the first model class
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Setting = int | float | bool | str
COMPARED_ROWS = 1 << 12
"""Rows of two matrices that are in memory together while they are compared."""
_MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the classes of transformers raise for numbers that do not fit together."""


def build_model(
    architecture: str,
    config: Mapping[str, Setting],
    seed: int,
    defaults: Mapping[str, Setting] = MappingProxyType({}),
) -> "PreTrainedModel":
    """Returns a model of this transformers class with new, random fp32 weights; equal arguments
    give equal weights. `defaults` are for fields that `config` does not set and the class has.

    The process's own random state stays unchanged. Raises `ConfigurationError` for an unknown class
    or field, with the nearest known name.
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
    fitting = {
        field: value
        for field, value in defaults.items()
        if field in known and config_class.attribute_map.get(field, field) not in config
    }
    try:
        made = config_class(**(fitting | dict(config)))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigurationError(f"model.config of {config_class.__name__}: {error}") from error
    try:
        return _new_model(model_class, made, seed)
    except _MODEL_ERRORS as error:
        raise ConfigurationError(
            f"model.config makes no {architecture}: {type(error).__name__}: {error}"
        ) from error


def load_model(path: str) -> "PreTrainedModel":
    """Returns the causal language model of a Hugging Face checkpoint in fp32, for any stored dtype
    and number of files. `path` is a folder or the name of a model in the Hub's local cache. Raises
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
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise missing_tensors(folder, missing, type(model).__name__)
    _check_tied(model, folder)
    _name_unused(folder, found["unexpected_keys"])
    _set_generation(model, folder)
    return model


def _check_tied(model: "PreTrainedModel", folder: Path) -> None:
    """Raise `ConfigurationError` if a parameter that the model's configuration ties to another one
    was loaded with values of its own: transformers then unties them.
    """
    expected: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    for name, source in expected.items():
        if model.get_parameter(name) is not model.get_parameter(source):
            raise untied_head(folder, name, source)


def _name_unused(folder: Path, names: Collection[str]) -> None:
    if names:
        log.warning("%s", unused_line(folder, names, "tensors"))


def load_stored_model(folder: str, rows: StoredRows) -> "PreTrainedModel":
    """Returns the model in a run's store in fp32; `folder` holds its configuration. Each tensor is
    read and verified once, and no weights are written to a disk, unless the names in the files are
    others than the model's: then they are for the time that transformers needs to convert them.
    """
    found = load_empty_model(folder, rows)
    if found is None:
        with tempfile.TemporaryDirectory(prefix="rollstream-model-") as whole:
            return load_model(str(rows.model.write_folder(Path(whole))))
    model, _ = found
    for names in parameter_names(model):
        stored = next(name for name in names if name in rows)
        held = model.get_parameter(names[0])
        read = rows.rows(stored, 0, rows.model.manifest.tensors[stored].rows)
        filled = nn.Parameter(read, held.requires_grad)
        for name in names:  # a tied parameter stays one parameter
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, filled)
    return model.eval()


def load_empty_model(
    path: str, stored: StoredRows | None = None
) -> "tuple[PreTrainedModel, ModelRows] | None":
    """Returns the model of a Hugging Face checkpoint with parameters on the meta device (shapes
    without memory), and the reader of the rows with which to fill them. Buffers have their values.
    The weights are those in a run's store, `stored`, else those in the folder.

    Returns None if the checkpoint's names or shapes differ from the model's: only `load_model` can
    then convert it, or name the difference. Raises `ConfigurationError` as `load_model` does.
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
    rows: ModelRows
    if stored is None:
        files = hf_weight_files(folder)
        rows = FolderRows(folder, {n: path for n, path in files.items() if n in parameters})
        others = {name: path for name, path in files.items() if name not in parameters}
        kept: ModelRows = FolderRows(folder, others)
    else:
        rows = kept = stored
        files = stored.model.manifest.tensors
    for names in groups:
        found = [name for name in names if name in rows]
        if not found or rows.shape(found[0]) != tuple(model.get_parameter(names[0]).shape):
            return None
        for name in found[1:]:
            if not _is_equal(rows, found[0], name):
                raise untied_head(folder, name, found[0])
    buffers = model.state_dict().keys() - parameters
    _name_unused(folder, files.keys() - parameters - buffers)
    for name, buffer in model.named_buffers():
        if name in buffers and name in kept:
            buffer.copy_(kept.whole(name))
    return model, rows


def _is_equal(rows: ModelRows, first: str, second: str) -> bool:
    """Returns whether two tensors have the same values."""
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
    """Give the model the settings in the folder's `generation_config.json`, if there is one. Raises
    `ConfigurationError` if it cannot be read: transformers takes others then, or fails, by the way
    in which the model is loaded.
    """
    path = folder / GENERATION_CONFIG_NAME
    if not path.is_file():
        return
    try:
        fields = parse_json(read_small_file(path), dict[str, Any])
        made: Any = transformers.GenerationConfig
        model.generation_config = made.from_dict(fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"model.path: {path} cannot be read: {error}") from error


def parameter_names(model: "PreTrainedModel") -> list[list[str]]:
    """Returns, for each parameter, all its names; a tied parameter has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


class _EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty`, with which modules allocate their parameters, allocate on the meta
    device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty:
            given["device"] = "meta"
        return func(*args, **given)


@contextmanager
def _empty_parameters() -> Generator[None]:
    """While the block runs, put every parameter that a module registers on the meta device. Buffers
    (such as rotary frequencies) keep their values, because most checkpoints do not have them.
    """
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
    """Returns the folder of the checkpoint at `path`. Raises `ConfigurationError` if its
    architecture is unknown, its weights are quantised, or one of its files is missing; with
    `has_weights` False the weights are elsewhere.
    """
    folder = find_hf_folder(path)
    fields = check_trainable(folder)
    check_class(folder, fields)
    if has_weights:
        read_weight_files(folder)
    return folder


def config_from_version(store: ObjectStore, manifest: Manifest) -> "PreTrainedConfig":
    """Returns the model configuration that is stored with a version."""
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
    """Returns the files to store beside a version's weights, by name: `config.json` (with `dtype`
    as the type of the stored weights), `generation_config.json`, and those of the tokenizer.
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
    """Returns a model with random fp32 weights drawn from `seed`."""
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        return model_class(config)


def _model_class(architecture: str) -> "type[PreTrainedModel]":
    """Returns the causal language model class of this name. Raises `ConfigurationError` if there is
    none.
    """
    known = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)}
    found = getattr(transformers, architecture, None) if architecture in known else None
    if found is None:
        raise ConfigurationError(
            f"model.architecture: transformers has no causal language model {architecture!r}"
            + _nearest(architecture, known)
        )
    return found


def _nearest(name: str, known: set[str]) -> str:
    """Returns the end of an error message that asks for the most similar known name, if any."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
