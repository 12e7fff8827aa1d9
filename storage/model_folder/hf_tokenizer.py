"""Reads the tokenizer in a model's folder as transformers' `AutoTokenizer` does, so that all
processes and users of exports see the same tokens.
"""

import ast
import functools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_json, parse_loose_json
from rollstream.storage.model_folder.hf_folder import (
    CONFIG,
    TEMPLATES,
    read_small_file,
    small_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_MAP, ADDED, TEMPLATE = "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"
ONLY_TOKENIZERS = (
    TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP, ADDED, TEMPLATE, "chat_template.json",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json",
)  # fmt: skip
_ONLY_TOKENIZERS_ENDS = (".model", ".tiktoken")
GENERIC = "TokenizersBackend"
"""transformers' class that takes everything from `tokenizer.json`."""
_GENERIC = {GENERIC, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend"}
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_MISTRAL = "MistralCommonBackend"
_QWEN = "Qwen2Tokenizer"
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}


def is_tokenizer_file(name: str) -> bool:
    is_template = name.startswith(f"{TEMPLATES}/")
    return is_template or name in ONLY_TOKENIZERS or name.endswith(_ONLY_TOKENIZERS_ENDS)


def has_chat_template(folder: Path) -> bool:
    inner = folder / TEMPLATES
    if (folder / TEMPLATE).is_file() or (inner.is_dir() and any(inner.glob("*.jinja"))):
        return True
    try:
        return bool(read_fields(folder / TOKENIZER_CONFIG).get("chat_template"))
    except (OSError, ConfigurationError):
        return False


def chat_template_of(folder: Path) -> object:
    """Returns the template as it is written in the tokenizer's folder; None if its files cannot be
    read.
    """
    try:
        if (folder / TEMPLATE).is_file():
            return (folder / TEMPLATE).read_text("utf-8").strip()
        template: object = read_fields(folder / TOKENIZER_CONFIG).get("chat_template")
    except (OSError, ValueError, ConfigurationError):
        return None
    return template.strip() if isinstance(template, str) else template or None


def read_fields(path: Path) -> dict[str, Any]:
    """Returns an empty object without the file. Raises `ConfigurationError` for other content."""
    try:
        fields = parse_loose_json(read_small_file(path.expanduser()))
    except FileNotFoundError:
        return {}
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{path} must hold a JSON object, got {str(fields)[:40]}")
    return cast(dict[str, Any], fields)


def check_tokenizer_files(folder: Path) -> None:
    """Raise `ConfigurationError`, which names a file that no library can read."""
    for name in (TOKENIZER_CONFIG, SPECIAL_MAP):
        for key, field in read_fields(folder / name).items():
            token: Any = field
            text: object = (
                cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
            )
            is_role = key in _ROLES and token is not None
            if is_role and not isinstance(text, str):
                raise ConfigurationError(
                    f"{key} must be the text of a token, got {token!r} ({folder / name})"
                )
    for name, path in small_files(folder).items():
        if path.suffix == ".jinja":
            try:
                read_small_file(path).decode()
            except UnicodeDecodeError as error:
                raise ConfigurationError(
                    f"{folder / name} is not UTF-8 text (byte {error.start}): save the template "
                    "as UTF-8"
                ) from None


def end_token(folder: Path) -> str | None:
    """Returns the token that ends a text, as the folder's files name it."""
    fields = read_fields(folder / TOKENIZER_CONFIG)
    token: object = fields.get("eos_token")
    if "added_tokens_decoder" not in fields:  # files of older releases complete each other
        token = read_fields(folder / SPECIAL_MAP).get("eos_token", token)
    if isinstance(token, dict):  # a token with its flags
        token = cast(dict[str, Any], token).get("content")
    return token if isinstance(token, str) else None


def numbered_tokens(config: bytes | None, added: bytes | None) -> dict[int, str]:
    """Returns tokens numbered by `tokenizer_config.json` and `added_tokens.json`, which
    `tokenizer.json` may lack; none for other content.
    """
    tokens: dict[int, str] = {}
    try:
        for text, number in parse_json(added or b"{}", dict[str, int]).items():
            tokens[number] = text
        for number, token in parse_json(config or b"{}", _ConfigFile).added_tokens_decoder.items():
            tokens[int(number)] = token["content"]
    except (ValueError, KeyError, TypeError):
        return {}
    return tokens


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Raises `ConfigurationError` if transformers refuses the folder, needs code that the folder
    brings, or reads it by a class without the library `tokenizers`.
    """
    import transformers

    check_tokenizer_files(folder.expanduser())
    backend: Any = transformers.PreTrainedTokenizerFast
    chosen: Any = backend
    with _readable(folder.expanduser().absolute()) as readable:
        name = tokenizer_class(readable)
        if name != GENERIC:
            named_class: Any = None if name is None else getattr(transformers, name, backend)
            is_usable = isinstance(named_class, type) and issubclass(named_class, backend)
            # `AutoTokenizer` imports torch.
            chosen = cast(Any, named_class if is_usable else transformers.AutoTokenizer)
        try:
            loaded: Any = chosen.from_pretrained(
                str(readable), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the libraries raise bare Exception, too
            raise ConfigurationError(
                f"transformers cannot read the tokenizer in {folder}: {error}"
            ) from error
    if not isinstance(loaded, backend):
        raise ConfigurationError(
            f"transformers reads the tokenizer in {folder} by {type(loaded).__name__}, which does "
            "not use the library tokenizers: set task.tokenizer to a folder with a tokenizer.json"
        )
    return loaded


def tokenizer_class(folder: Path, model: Path | None = None) -> str | None:
    """Returns None if only `AutoTokenizer` itself can decide; `model` is the folder of the
    `config.json`.
    """
    fields = read_fields(folder / TOKENIZER_CONFIG)
    declared = fields.get("tokenizer_class")
    is_odd = "auto_map" in fields or (folder / "tekken.json").exists()
    tables = _class_tables()
    if is_odd or tables is None or not isinstance(declared, str):
        return None
    declared = declared.removesuffix("Fast")
    if declared.endswith("LlamaTokenizer"):
        return None
    config = read_fields((model or folder) / CONFIG)
    registered_names, corrected = tables
    registered = registered_names.get(str(config.get("model_type")))
    if registered is None or registered == declared:
        return GENERIC if declared in _GENERIC else declared
    if registered == _MISTRAL:
        return None
    if registered in _GENERIC:
        return GENERIC
    is_corrected = bool({config.get("model_type"), config.get("model_name")} & corrected)
    name = registered if is_corrected else declared
    return GENERIC if name in _GENERIC else name


@functools.cache
def _class_tables() -> tuple[Mapping[str, str], frozenset[object]] | None:
    """transformers' class for each model type, and the types whose folders name a wrong one."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return None
    # Its import would import torch, which takes seconds in each process.
    source = Path(package.origin).parent / "models/auto/tokenization_auto.py"
    try:
        assignments: dict[str, Any] = {}
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                assignments[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                assignments[node.target.id] = node.value
        registered: dict[str, str] = {}
        pair: Any
        for pair in assignments["TOKENIZER_MAPPING_NAMES"].args[0].elts:
            key, value = pair.elts
            # `"QwenTokenizer" if is_tokenizers_available() else None`
            constant: Any = value.body if isinstance(value, ast.IfExp) else value
            name: object = constant.value
            if isinstance(name, str):
                registered[key.value] = name.removesuffix("Fast")
        corrected: Any = ast.literal_eval(assignments["MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"])
    except (AttributeError, KeyError, IndexError, OSError, SyntaxError, TypeError, ValueError):
        return None
    for model_type in corrected:
        registered.setdefault(model_type, GENERIC)
    return registered, frozenset(corrected)


class _ConfigFile(msgspec.Struct, frozen=True):
    added_tokens_decoder: dict[str, dict[str, Any]] = {}


class _Model(msgspec.Struct, frozen=True):
    type: object = None
    dropout: object = None
    unk_token: object = None
    fuse_unk: object = None
    byte_fallback: object = None
    ignore_merges: object = None
    continuing_subword_prefix: object = None
    end_of_word_suffix: object = None


# Without the vocabulary, which has megabytes.
class _TokenizerFile(msgspec.Struct, frozen=True):
    added_tokens: list[dict[str, Any]] | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    model: _Model = _Model()


def is_exact(folder: Path) -> bool:
    """Returns whether `tokenizer.json` alone gives transformers' tokens: its class replaces
    nothing, and the other files name no token or flag that is not in it.
    """
    # transformers combines it with tokens of the other files, and with a class that may replace
    # parts of it.
    fields = read_fields(folder / TOKENIZER_CONFIG)
    try:
        file = parse_json(read_small_file(folder / TOKENIZER), _TokenizerFile)
        added: dict[str, dict[str, Any]] = {t["content"]: t for t in file.added_tokens or ()}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    name = tokenizer_class(folder)
    is_own = name == GENERIC or (name == _QWEN and _is_qwen(file, fields))
    if not is_own or fields.get("split_special_tokens") or "fast_tokenizer_files" in fields:
        return False
    decoder: Mapping[str, Any] = fields.get("added_tokens_decoder") or {}
    for number, token in decoder.items():
        added_token = added.get(token.get("content"), {})
        flags = {flag: token.get(flag, default) for flag, default in _FLAGS.items()}
        flags |= {"id": int(number), "special": token.get("special", False)}
        if any(added_token.get(key) != flag for key, flag in flags.items()):
            return False
    special_texts = _named_tokens(fields)
    if "added_tokens_decoder" not in fields:
        special_texts += _named_tokens(read_fields(folder / SPECIAL_MAP))
        numbers = read_fields(folder / ADDED)
        if any(added.get(text, {}).get("id") != number for text, number in numbers.items()):
            return False
    return all(added.get(text, {}).get("special") is True for text in special_texts)


def _named_tokens(fields: Mapping[str, Any]) -> list[str]:
    tokens: list[Any] = [
        token
        for key, token in fields.items()
        if key.endswith("_token") and not isinstance(token, bool)
    ]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more: Any = fields.get(key) or []
        tokens += cast("dict[str, Any]", more).values() if isinstance(more, dict) else more
    texts = [
        cast(Any, token).get("content") if isinstance(token, dict) else token for token in tokens
    ]
    return [text for text in texts if isinstance(text, str)]


def _is_qwen(file: _TokenizerFile, fields: Mapping[str, Any]) -> bool:
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    steps: dict[str, Any] = file.pre_tokenizer or {}
    parts: list[dict[str, Any]] = [*(steps.get("pretokenizers") or ()), {}, {}]
    splitter, levels = parts[:2]
    decoder: dict[str, Any] = file.decoder or {}
    switches = msgspec.structs.asdict(file.model)
    return (
        switches.pop("type") == "BPE"
        and not any(switches.values())
        and file.normalizer == {"type": "NFC"}
        and decoder.get("type") == "ByteLevel"
        and steps.get("type") == "Sequence"
        and len(steps["pretokenizers"]) == 2
        and splitter == split
        and levels.get("type") == "ByteLevel"
        and not levels.get("add_prefix_space")
        and levels.get("use_regex") is False
        and not fields.get("add_prefix_space")
        # The class's own default for roles that the files leave out.
        and any(token.get("content") == "<|endoftext|>" for token in file.added_tokens or ())
    )


@contextmanager
def _readable(folder: Path) -> Generator[Path]:
    paths = small_files(folder)
    files = {name: read_small_file(path) for name, path in paths.items()}
    if all(len(data) == paths[name].stat().st_size for name, data in files.items()):
        yield folder
        return
    # transformers refuses a byte order mark.
    with TemporaryDirectory(prefix="rollstream-tokenizer-") as copy:
        for name, data in files.items():
            (Path(copy) / name).parent.mkdir(exist_ok=True)
            (Path(copy) / name).write_bytes(data)
        yield Path(copy)
