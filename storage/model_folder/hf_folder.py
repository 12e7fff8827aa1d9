"""The folder of a Hugging Face checkpoint, without torch. Errors are `ConfigurationError`s that
name `model.path`. Nothing is downloaded: a run must not change when the model's authors change it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_json, parse_loose_json
from rollstream.storage.stores.base import is_key

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
CONFIG, GENERATION = "config.json", "generation_config.json"
POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx",
)  # fmt: skip
"""Names of the longest sequence in configurations of different families."""
TEMPLATES = "additional_chat_templates"
"""The folder, inside a model's, with further chat templates, which are chosen by name."""
SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_TEXTS = frozenset(["vocab.txt", "merges.txt", "dict.txt"])
_RESULTS = frozenset([
    "all_results.json", "eval_results.json", "predict_results.json", "train_results.json",
    "trainer_state.json", "manifest.json",
])  # fmt: skip
SMALL_BYTES_MAX = 64 << 20  # the largest tokenizers have 35 MB
BOM = b"\xef\xbb\xbf"
"""The byte order mark, which editors on Windows write; JSON's readers refuse it."""
LFS_BEGIN = b"version https://git-lfs.github.com/spec/"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_lfs_pointer(begin: bytes) -> bool:
    """As a clone without `git lfs` has in place of each large file."""
    return begin.startswith(LFS_BEGIN)


def lfs_refusal(path: Path) -> str:
    return (
        f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository, "
        "or fetch the file with `hf download`"
    )


def read_small_file(path: Path) -> bytes:
    """Returns the content without a byte order mark. Raises `ConfigurationError` for a pointer of
    Git LFS.
    """
    data = path.read_bytes()
    if is_lfs_pointer(data):
        raise ConfigurationError(lfs_refusal(path))
    return data.removeprefix(BOM)


def find_hf_folder(path: str) -> Path:
    """Returns `path` if it exists (`~` is the home folder), else the folder in the cache of the Hub
    name `path`, else `path`, which a later check reports as missing.
    """
    folder = Path(path).expanduser()
    if folder.exists() or not _HUB_NAME.fullmatch(path):
        return folder
    from huggingface_hub import try_to_load_from_cache  # slow to import, so only for a Hub name
    from huggingface_hub.errors import HFValidationError

    try:
        config_path = try_to_load_from_cache(path, CONFIG)
    except HFValidationError:  # `.`, `--`: a path that does not exist
        return folder
    return Path(config_path).parent if isinstance(config_path, str) else folder


def small_files(folder: Path) -> dict[str, Path]:
    """Returns configuration, tokenizer and further chat templates
    (`additional_chat_templates/x.jinja`), in the order of names; other files are left out.
    """
    inner = folder / TEMPLATES
    templates = sorted(inner.glob("*.jinja")) if inner.is_dir() else []
    paths = {path.name: path for path in sorted(folder.iterdir())}
    paths |= {f"{TEMPLATES}/{path.name}": path for path in templates}
    return {
        name: path
        for name, path in sorted(paths.items())
        if path.is_file() and is_small_file(path.name) and path.stat().st_size <= SMALL_BYTES_MAX
    }


def is_small_file(name: str) -> bool:
    """Returns whether it may configure a model or its tokenizer: no notes, results of a training,
    or copies that a browser renamed.
    """
    suffix = Path(name).suffix
    if suffix not in SMALL_SUFFIXES or name.endswith(".index.json") or name in _RESULTS:
        return False
    return is_key(name) and (suffix != ".txt" or name in _TEXTS)


def missing_checkpoint(path: str) -> str:
    """Returns the end of an error message: the content of `path`, and the remedy."""
    folder = find_hf_folder(path)
    if link := dead_link(folder) or dead_link(folder / CONFIG):
        return link
    if folder.is_file():
        gguf = ", of a form (GGUF) that is not read" if folder.suffix == ".gguf" else ""
        return f"{path} is a file{gguf}: give the folder of a checkpoint"
    if folder.is_dir():
        return f"the folder {path} {_instead(folder)}"
    if _HUB_NAME.fullmatch(path) and "/" in path and not path.startswith("."):
        return f"there is no such folder; nothing is downloaded: first run `hf download {path}`"
    return "there is no such folder; nothing is downloaded"


def _instead(folder: Path) -> str:
    if snapshots := sorted(folder.glob(f"snapshots/*/{CONFIG}")):
        return f"is a Hub cache's: give its snapshot {snapshots[-1].parent}"
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            f"holds an adapter ({ADAPTER_CONFIG}) without its base: name it as model.lora.path, "
            f"and its base{_base_of(folder)} as model.path; or give a folder with the merged model "
            "(merge_and_unload and save_pretrained of peft)"
        )
    if ggufs := sorted(folder.glob("*.gguf")):
        return (
            f"holds {ggufs[0].name}, of a form (GGUF) that is not read: give the checkpoint from "
            "which it was made"
        )
    inner = [path.parent for path in sorted(folder.glob(f"*/{CONFIG}"))]
    return f"has no {CONFIG}" + (f": give one of those in it, such as {inner[0]}" if inner else "")


def _base_of(adapter: Path) -> str:
    try:
        fields = parse_loose_json(read_small_file(adapter / ADAPTER_CONFIG))
    except (OSError, ValueError, ConfigurationError):
        return ""
    settings = cast(dict[str, Any], fields) if isinstance(fields, dict) else {}
    base = settings.get("base_model_name_or_path")
    return f" ({base})" if isinstance(base, str) and base else ""


def dead_link(path: Path) -> str:
    """Returns the text for a symbolic link whose target does not exist; else ""."""
    if not path.is_symlink() or path.exists():
        return ""
    return f"{path} is a link to {path.readlink()}, which does not exist: fetch the file again"


def read_hf_config(folder: Path) -> Mapping[str, Any]:
    """Raises `ConfigurationError` if it is missing or cannot be read."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigurationError(
            f"model.path: {str(folder)!r} is not a local checkpoint folder and not a Hub name in "
            f"this machine's cache: {missing_checkpoint(str(folder))}"
        )
    try:
        fields = parse_loose_json(read_small_file(path))
    except ConfigurationError as error:
        raise ConfigurationError(f"model.path: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model.path: {path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"model.path: {path} is not a model configuration")
    return cast(dict[str, Any], fields)


def longest_positions(fields: Mapping[str, object]) -> int | None:
    """Returns the longest sequence, in tokens, that the content of a `config.json` states, else
    None.
    """
    inner = fields.get("text_config")
    text = cast(Mapping[str, object], inner) if isinstance(inner, Mapping) else fields
    lengths = (text[name] for name in POSITIONS if name in text)
    return next((n for n in lengths if isinstance(n, int) and n > 0), None)


def hf_vocabulary_size(folder: Path) -> int | None:
    try:
        return vocabulary_size((folder / CONFIG).read_bytes())
    except OSError:
        return None


def vocabulary_size(config: bytes) -> int | None:
    try:
        fields = parse_json(config.removeprefix(BOM), dict[str, Any])
        size = (fields.get("text_config") or fields).get("vocab_size")
    except (ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None
