"""Finds the folder of a Hugging Face checkpoint, and reads its configuration and the names of its
weight files, without torch. Errors are `ConfigurationError`s that name the setting `model.path`.

A checkpoint is given as a folder, or as a name on the Hugging Face Hub (`Qwen/Qwen3-0.6B`) whose
files are in this machine's cache. Nothing is downloaded, because a run must not change when the
model's authors change it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rollstream.errors import ConfigurationError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
"""A checkpoint has its weights in one file, or in several, which the index lists by tensor."""
HEADER_BYTES_MAX = 100_000_000
"""Largest header of a safetensors file; the same limit as in the library safetensors."""
SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
SMALL_BYTES_MAX = 64 << 20  # the largest tokenizers have 35 MB
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_hf_folder(path: str) -> Path:
    """Returns the folder of a checkpoint: `path` if it exists, else the folder in the cache with
    the files of the Hub name `path`. If there is neither, returns `path`, and a later check reports
    that it is missing.
    """
    folder = Path(path)
    if folder.exists() or not _HUB_NAME.fullmatch(path):
        return folder
    from huggingface_hub import try_to_load_from_cache  # slow to import, so only for a Hub name
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, CONFIG)
    except HFValidationError:  # `.`, `--`: a path that does not exist
        return folder
    return Path(found).parent if isinstance(found, str) else folder


def small_files(folder: Path) -> list[Path]:
    """Returns the configuration and tokenizer files of a model's folder, in the order of names.
    They are recognised by `SMALL_SUFFIXES` and `SMALL_BYTES_MAX`; other files of a folder from the
    Hub (weights, pictures) are left out.
    """
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in SMALL_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= SMALL_BYTES_MAX
    ]


def how_to_download(path: str) -> str:
    """Returns the end of an error message about a missing `path`: that nothing is downloaded, and
    the command that downloads it, if it may be a Hub name.
    """
    if _HUB_NAME.fullmatch(path) and "/" in path and not path.startswith("."):
        return f"; nothing is downloaded: first run `hf download {path}`"
    return "; nothing is downloaded"


def read_hf_config(folder: Path) -> Mapping[str, Any]:
    """Returns the content of the folder's `config.json`. Raises `ConfigurationError` if the file is
    missing or cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigurationError(
            f"model.path: {str(folder)!r} is not a local checkpoint folder (no {CONFIG} in it) and "
            f"not a Hub name in this machine's cache{how_to_download(str(folder))}"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model.path: {path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"model.path: {path} is not a model configuration")
    return cast(dict[str, Any], fields)


def hf_vocabulary_size(folder: Path) -> int | None:
    """Returns the vocabulary size that the checkpoint's `config.json` states; None if the file
    cannot be read or states none.
    """
    try:
        fields = read_hf_config(folder)
    except ConfigurationError:
        return None
    text: Mapping[str, Any] = fields.get("text_config") or fields
    size = text.get("vocab_size")
    return size if isinstance(size, int) else None


def check_hf_weights(folder: Path) -> None:
    """Raise `ConfigurationError` if a weight file is missing; the error names the first missing
    one.
    """
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise ConfigurationError(
                f"model.path: {folder} has neither {WEIGHTS} nor {INDEX}: weights in other formats "
                "(such as pickled ones) are not read; save the model once with transformers' "
                "save_pretrained"
            )
        return
    try:
        files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"model.path: {folder / INDEX} cannot be read: {error!r}"
        ) from error
    for name in sorted(map(str, files)):
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"model.path: {folder} lacks {name}, one of the {len(files)} weight files that its "
                f"{INDEX} names: fetch it again"
            )


def hf_weight_files(folder: Path) -> dict[str, Path]:
    """Returns the file that holds each tensor, by the tensor's name. The folder must have passed
    `check_hf_weights`.
    """
    if (folder / INDEX).is_file():
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in files.items()}
    path = folder / WEIGHTS
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, HEADER_BYTES_MAX)))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model.path: {path} cannot be read: {error}") from error
    return {name: path for name in header if name != "__metadata__"}
