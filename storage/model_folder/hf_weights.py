"""Which tensors a checkpoint has, and where. If files contradict each other (an index beside a
single file, one tensor in two files, a tied matrix twice), two roles would see two models: such a
folder is refused.
"""

import math
import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_loose_json
from rollstream.storage.model_folder.hf_folder import (
    ADAPTER_CONFIG,
    CONFIG,
    TEMPLATES,
    dead_link,
    is_lfs_pointer,
    lfs_refusal,
    read_hf_config,
    read_small_file,
    small_files,
)
from rollstream.storage.stores.base import is_key

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Weights in one file, or in several, which the index lists by tensor."""
HEADER_BYTES_MAX = 100_000_000
"""Largest header of a safetensors file; the same limit as in the library safetensors."""
EMBEDDING, HEAD = ("embed_tokens.weight", "wte.weight", "embed_in.weight"), "lm_head.weight"
"""Ends of the embedding's names, and the output matrix that may be tied to it."""
TRAINED_TYPES = ("F64", "F32", "F16", "BF16")
_MASKS = (".attn.bias", ".attention.bias", ".masked_bias")
"""Ends of the names of the causal masks of GPT-2's family, which older checkpoints hold."""
COMPARED_NUMBERS = 4 << 20
TEXTS = (".md", ".rst", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
UNREAD = {"chat_template.json"}
"""Small files of processors of images and sound, which tokenizers do not read."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor at the bytes `[start, end)` of the file at `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def check_hf_weights(folder: Path) -> None:
    """Raise `ConfigurationError` if a weight file is missing or a pointer of Git LFS, or named in
    two ways.
    """
    paths = _weight_paths(folder)
    for path in paths:
        if link := dead_link(path):
            raise ConfigurationError(f"model.path: {link}")
        if not path.is_file():
            raise ConfigurationError(
                f"model.path: {folder} lacks {path.name}, one of the {len(paths)} weight files "
                f"that its {INDEX} names: fetch it again"
            )
        with path.open("rb") as file:
            if is_lfs_pointer(file.read(64)):
                raise ConfigurationError(f"model.path: {lfs_refusal(path)}")


def read_weight_files(folder: Path) -> dict[str, StoredTensor]:
    """Raises `ConfigurationError` if a file is missing, cut off or damaged, and if index, headers
    and configuration contradict each other.
    """
    check_hf_weights(folder)
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_paths(folder):
        for name, tensor in _read_tensors(path).items():
            if name in tensors:
                raise ConfigurationError(
                    f"model.path: {folder} has the tensor {name} in {tensors[name].path.name} and "
                    f"in {path.name}: save the model once with transformers' save_pretrained"
                )
            tensors[name] = tensor
    if (folder / INDEX).is_file():
        _check_index(folder, tensors)
    for name, tensor in tensors.items():
        _check_type(name, tensor)
    _check_head(folder, tensors)
    return tensors


def _check_type(name: str, tensor: StoredTensor) -> None:
    # A small type lacks the scales that give its values; stored masks and positions are integers.
    is_weight = name.endswith((".weight", ".bias")) and not name.endswith(_MASKS)
    if tensor.dtype in TRAINED_TYPES or (not is_weight and tensor.dtype[0] in "IUB"):
        return
    raise ConfigurationError(
        f"model.path: {name} in {tensor.path} has the type {tensor.dtype}, and weights are trained "
        f"from {', '.join(TRAINED_TYPES)} only: give the original checkpoint"
    )


def hf_weight_files(folder: Path) -> dict[str, Path]:
    return {name: tensor.path for name, tensor in read_weight_files(folder).items()}


def check_trainable(folder: Path) -> Mapping[str, Any]:
    """Returns `config.json`. Raises `ConfigurationError` for quantised weights, and if transformers
    would load others than those in the files.
    """
    fields = read_hf_config(folder)
    if fields.get("quantization_config") is not None:
        raise ConfigurationError(
            f"model.path: {folder} holds quantised weights, which have no masters to train; "
            "give the original checkpoint"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigurationError(
            f"model.path: {folder} has an {ADAPTER_CONFIG}, for which transformers loads the "
            "adapter's base in place of the weights here: give the base as model.path and this "
            f"folder as model.lora.path; or, if these weights are merged, remove {ADAPTER_CONFIG}"
        )
    if fields.get("transformers_weights") is not None:
        raise ConfigurationError(
            f"model.path: {CONFIG} in {folder} names other weights (transformers_weights = "
            f"{fields['transformers_weights']!r}), which only transformers reads: save the model "
            "once with save_pretrained"
        )
    return fields


def unread_files(folder: Path, has_weights: bool = True) -> list[str]:
    """Returns names that no role reads: other weights and code, without hidden files, texts and
    pictures.
    """
    read = {CONFIG, INDEX, TEMPLATES, *small_files(folder)} - UNREAD
    if has_weights:
        read |= {path.name for path in _weight_paths(folder)}
    names: list[str] = []
    for path in sorted(folder.iterdir()):
        is_text = path.suffix.lower() in TEXTS or (path.is_file() and not path.suffix)
        if path.name not in read and not path.name.startswith(".") and not is_text:
            names.append(f"{path.name}/" if path.is_dir() else path.name)
    return names


def unused_line(folder: Path, names: Collection[str], what: str) -> str:
    first, rest = sorted(names)[:8], len(names) - 8
    return f"model.path: {folder} has {len(names)} {what} that are not used: {', '.join(first)}" + (
        f" and {rest} more" if rest > 0 else ""
    )


def read_header(file: IO[bytes]) -> bytes:
    """Returns the present bytes of a safetensors header, at most `HEADER_BYTES_MAX`."""
    size = int.from_bytes(file.read(8), "little")
    return file.read(min(size, HEADER_BYTES_MAX, os.fstat(file.fileno()).st_size))


_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx")


def _weight_paths(folder: Path) -> list[Path]:
    has_index, has_single = (folder / INDEX).is_file(), (folder / WEIGHTS).is_file()
    if not has_index and not has_single:
        _refuse_other_names(folder)
        raise ConfigurationError(f"model.path: {folder} has {_other_weights(folder)}")
    names = set(_weight_map(folder).values()) if has_index else {WEIGHTS}
    if has_single and names != {WEIGHTS}:
        raise ConfigurationError(
            f"model.path: {folder} has {WEIGHTS} and an {INDEX} of other files: transformers reads "
            "the one and vLLM the other; delete the one that is not the model"
        )
    return [folder / name for name in sorted(names)]


def _other_weights(folder: Path) -> str:
    for pattern in _OTHER_WEIGHTS:
        if path := next(iter(sorted(folder.glob(pattern))), None):
            return (
                f"{path.name} and neither {WEIGHTS} nor {INDEX}: weights in other formats (such as "
                "pickled ones) are not read; save the model once with transformers' save_pretrained"
            )
    return f"no weights, neither {WEIGHTS} nor {INDEX}: fetch the rest of the model's files"


def _refuse_other_names(folder: Path) -> None:
    for name in (WEIGHTS, INDEX):
        if link := dead_link(folder / name):
            raise ConfigurationError(f"model.path: {link}")
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others and (folder / ADAPTER_CONFIG).is_file() and len(others) == 1:
        return
    if len(others) == 1:
        raise ConfigurationError(
            f"model.path: {folder} has no {WEIGHTS}, but {others[0]}: rename it, if it holds the "
            "whole model"
        )
    if others:
        raise ConfigurationError(
            f"model.path: {folder} has {len(others)} weight files ({others[0]} …), but no {INDEX} "
            "that names their tensors: fetch it too"
        )


def _check_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    listed = _weight_map(folder)
    for file in sorted(set(listed.values())):
        listed_names = {name for name, place in listed.items() if place == file}
        lacking = [
            n for n in sorted(listed_names) if n not in tensors or tensors[n].path.name != file
        ]
        if lacking:
            raise ConfigurationError(
                f"model.path: {folder / file} has no tensor {lacking[0]} ({len(lacking)} of "
                f"{len(listed_names)} that the index names there are missing): fetch it again"
            )
    if unlisted := sorted(tensors.keys() - listed.keys()):
        raise ConfigurationError(
            f"model.path: {tensors[unlisted[0]].path} has the tensor {unlisted[0]}, which {INDEX} "
            f"does not name ({len(unlisted)} such tensors): transformers reads it and vLLM does "
            "not; save the model once with transformers' save_pretrained"
        )


def _check_head(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    fields = read_hf_config(folder)
    inner = cast("dict[str, Any]", fields.get("text_config") or {})
    # Models that tie without stating it are compared once they are built (`models.py`).
    if not fields.get("tie_word_embeddings", inner.get("tie_word_embeddings")):
        return
    heads = [n for n in tensors if n == HEAD or n.endswith(f".{HEAD}")]
    embeddings = [name for name in tensors if name.endswith(EMBEDDING)]
    if len(heads) != 1 or len(embeddings) != 1:
        return
    head, embedding = tensors[heads[0]], tensors[embeddings[0]]
    if not _is_equal(head, embedding):
        raise untied_head(folder, heads[0], embeddings[0])


def untied_head(folder: object, head: str, embedding: str) -> ConfigurationError:
    return ConfigurationError(
        f"model.path: {CONFIG} in {folder} has tie_word_embeddings = true, and the weights have a "
        f"{head} that differs from {embedding}: one reader would take the one and another both; "
        f"set tie_word_embeddings = false to keep {head}, or delete it from the weights"
    )


def _is_equal(first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape:
        return False
    if not first.numbers:
        return True
    with first.path.open("rb") as first_file, second.path.open("rb") as second_file:
        a = mmap.mmap(first_file.fileno(), 0, access=mmap.ACCESS_READ)
        b = mmap.mmap(second_file.fileno(), 0, access=mmap.ACCESS_READ)
        with a, b:
            return all(
                _compared(a, first, at, second.dtype) == _compared(b, second, at, first.dtype)
                for at in range(0, first.numbers, COMPARED_NUMBERS)
            )


def _compared(data: mmap.mmap, tensor: StoredTensor, at: int, other: str) -> bytes:
    """Returns the numbers from number `at` on as they are stored, or as float32 unless the compared
    tensor has the same type.
    """
    size = (tensor.end - tensor.start) // tensor.numbers
    end = min(at + COMPARED_NUMBERS, tensor.numbers)
    stored = data[tensor.start + at * size : tensor.start + end * size]
    if tensor.dtype == other:
        return stored
    if tensor.dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(stored, np.uint16).astype(np.uint32) << 16).tobytes()
    return np.frombuffer(stored, f"f{size}").astype(np.float32).tobytes()


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header = cast("dict[str, Any]", parse_loose_json(read_header(file)))
            begin = file.tell()
        header.pop("__metadata__", None)
        tensors: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            start, end = (begin + int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(length) for length in entry["shape"])
            if not begin <= start <= end:
                raise ValueError(f"the bytes of {name} end before they begin")
            tensors[name] = StoredTensor(path, str(entry["dtype"]), shape, start, end)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ConfigurationError(
            f"model.path: {path} cannot be read, it is no whole safetensors file ({error}): fetch "
            "it again"
        ) from None
    end = max((tensor.end for tensor in tensors.values()), default=0)
    if end > size:
        raise ConfigurationError(
            f"model.path: {path} has {size:,} of the {end:,} bytes that its header states: its "
            "download was cut off, so fetch it again"
        )
    return tensors


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        index: Any = parse_loose_json(read_small_file(folder / INDEX))
        fields = cast(dict[str, Any], index) if isinstance(index, dict) else {}
        files: Any = fields.get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ValueError("it has no weight_map, which names the file of each tensor")
        files = cast("dict[str, Any]", files)
        for file in files.values():
            if not isinstance(file, str) or not is_key(file):  # a long name cannot be looked for
                raise ValueError(f"weight_map names the file {str(file)[:80]!r}")
    except ConfigurationError as error:
        raise ConfigurationError(f"model.path: {error}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"model.path: {folder / INDEX} cannot be read: {error}") from error
    return files
