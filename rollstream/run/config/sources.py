"""Reads the settings of a file, of environment variables and of `--set`, each into one layer:
nested values with their origins. Malformed sources are refused here, unknown keys and wrong types
by `config.validate_layers`.
"""

import math
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin

from pydantic import BaseModel

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, OutsideRun
from rollstream.foreign_json import parse_loose_json
from rollstream.os_failures import explain_os_error
from rollstream.run.config.loss_table import (
    TABLE,
    take_loss_table,
    twice_set_hint,
    without_loss_table,
)

ENVIRONMENT_PREFIX = "ROLLSTREAM_"
ENVIRONMENT_ORIGIN = "environment variable"
# By it the supervisor gives each process the port of its metrics.
METRICS_PORT = "ROLLSTREAM_METRICS_PORT"
# Variables with `ENVIRONMENT_PREFIX` that are not settings: they concern one process, not the run.
RESERVED_VARIABLES = frozenset(
    {
        "STATE",
        "ALLOWED_HOSTS",
        "NONCE",
        "HANDED_NONCE",
        "PARENT",
        "METRICS_PORT",
        "RELAY_TOKEN",
        "EXPLORER_TOKEN",
    }
)

# Settings of earlier releases, each with its default, which the `config.json` of an old run may
# hold.
REMOVED_SETTINGS: Mapping[str, Any] = {"rollouts.vllm.kv_handover": False}


@dataclass(frozen=True, slots=True)
class SettingLayers:
    """The setting layers of one source, or of several merged ones: `values` nested by table,
    `origins` by dotted key (`trainer.lr`), a text such as `--set` or the name of a file.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[str, str] = field(default_factory=dict[str, str])

    def put(self, key: str, value: Any, origin: str) -> None:
        """The text `null` becomes None. Raises `ConfigurationError` if a table of the key is
        already a plain value, or if `config.json` cannot hold `value`.
        """
        _refuse_unwritable(key.rpartition(".")[2], value, f"{key} in {origin}")
        *tables, leaf = key.split(".")
        at = self.values
        for depth, name in enumerate(tables, start=1):
            inner = at.setdefault(name, {})
            if not isinstance(inner, dict):
                table = ".".join(tables[:depth])
                raise ConfigurationError(f"{table} must be a table ({key} in {origin})")
            at = cast(dict[str, Any], inner)
        at[leaf] = None if value == "null" else value
        self.origins[key] = origin


def file_layer(path: Path) -> SettingLayers:
    """Reads JSON if the name ends in `.json`, else TOML. Raises `ConfigurationError` if the file is
    missing, unreadable, or not valid.
    """
    data = b""
    try:
        # The file of a run, which may come from another user.
        is_json = path.suffix == ".json"
        data = ContainedFolder(path.parent).read(path.name) if is_json else path.read_bytes()
        values = parse_loose_json(data) if is_json else tomllib.loads(data.decode("utf-8-sig"))
    except OutsideRun:
        raise
    except FileNotFoundError:
        raise ConfigurationError(f"no configuration file {path}; is the path right?") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {explain_os_error(error)}") from None
    # Of TOML, JSON and UTF-8.
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is no valid {path.suffix[1:] or 'TOML'}: {error}{twice_set_hint(error, data)}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold a table of settings")
    layers, settings = SettingLayers(), cast(dict[str, Any], values)
    loss = take_loss_table(settings, path.name)
    _put_table(layers, "", settings, path.name)
    for key, value in loss.items():
        _put_parsed(layers, key, value, f"{path.name} [{TABLE}]")
    return layers


_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Variables that Kubernetes gives to each container for a service whose name begins with
# `rollstream`.
_OF_A_SERVICE = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def environment_layer(environment: Mapping[str, str], model: type[BaseModel]) -> SettingLayers:
    """`ROLLSTREAM_TRAINER__LR=1e-4` is `trainer.lr`. Every variable with the prefix counts, except
    `RESERVED_VARIABLES`, so validation refuses a misspelled one.
    """
    layers = SettingLayers()
    for name, text in sorted(environment.items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX)
        is_foreign = "__" not in key and _OF_A_SERVICE.fullmatch(key)
        if name.startswith(ENVIRONMENT_PREFIX) and not is_foreign and key not in RESERVED_VARIABLES:
            origin = f"{ENVIRONMENT_ORIGIN} {name}"
            dotted = without_loss_table(key.lower().replace("__", "."), origin)
            _put_parsed(layers, dotted, _parsed(dotted, text, model), origin)
    return layers


def overrides_layer(overrides: Sequence[str], model: type[BaseModel]) -> SettingLayers:
    """`trainer.lr=1e-4`; the last text of a key wins. Raises `ConfigurationError` for a text
    without `=` or with an empty part of its key.
    """
    layers = SettingLayers()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise ConfigurationError(
                f"--set {override!r}: write it as key=value, e.g. trainer.lr=1e-4"
            )
        key = without_loss_table(key.strip(), "--set")
        _put_parsed(layers, key, _parsed(key, text, model), "--set")
    return layers


def merge_layers(below: SettingLayers, above: SettingLayers) -> SettingLayers:
    """Writes the values of `above` over `below`, which it returns."""
    for key, origin in above.origins.items():
        value: Any = above.values
        for part in key.split("."):
            value = value[part]
        below.put(key, value, origin)
    return below


def setting_types(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Returns the setting types by dotted key; tables are not settings."""
    annotations: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            annotations.update(setting_types(kind, f"{prefix}{name}."))
        else:
            annotations[prefix + name] = kind
    return annotations


def takes_text(kind: Any) -> bool:
    """Whether the setting holds text (or None)."""
    if get_origin(kind) in (Union, types.UnionType):
        return set(get_args(kind)) <= {str, type(None)}
    return kind is str


def _put_parsed(layers: SettingLayers, key: str, value: Any, origin: str) -> None:
    if isinstance(value, dict):
        _put_table(layers, f"{key}.", cast(dict[str, Any], value), origin)
    else:
        layers.put(key, value, origin)


def _put_table(layers: SettingLayers, prefix: str, table: Mapping[str, Any], origin: str) -> None:
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            _put_table(layers, f"{dotted}.", cast(dict[str, Any], value), origin)
        else:
            layers.put(dotted, value, origin)


def _refuse_unwritable(key: str, value: Any, where: str) -> None:
    """Raises `ConfigurationError` for a date, infinity or NaN, at any depth, which `config.json`
    cannot hold.
    """
    if isinstance(value, list | dict):
        inside = cast(list[Any] | dict[str, Any], value)
        pairs = inside.items() if isinstance(inside, dict) else [(key, item) for item in inside]
        for name, item in pairs:
            _refuse_unwritable(name, item, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{key} must be finite, got {value} ({where})")
    # TOML's dates and times.
    elif not isinstance(value, str | int | float | None):
        raise ConfigurationError(f"{key} cannot be a date, got {value} ({where})")


_BOOLEANS = {"True": True, "False": False}


def _parsed(key: str, text: str, model: type[BaseModel]) -> Any:
    """A TOML value, or the text itself if the setting holds text, or if it is none."""
    kind = setting_types(model).get(key)
    if takes_text(kind):
        return text
    # Python's booleans, too: as a text, which options of tasks take, both would be true.
    if text.strip() in _BOOLEANS:
        return _BOOLEANS[text.strip()]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    # No TOML, too many digits, too deep; Python's `.7`, `1.` and `1.e-5` are numbers.
    except (ValueError, RecursionError):
        if float not in (kind, *get_args(kind)) or _DECIMAL.fullmatch(text.strip()) is None:
            return text
        value = float(text)
    finite = not isinstance(value, float) or math.isfinite(value)
    is_plain = isinstance(value, bool | int | float | str | list | dict)
    return cast(object, value) if finite and is_plain else text
