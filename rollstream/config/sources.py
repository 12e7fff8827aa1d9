"""Reads settings from files, the environment and `--set`, each into one layer of values.

A layer keeps the origin of every dotted key, which an error message names. It does not validate its
values: `config.validate_layers` validates the merged layers once.
"""

import json
import math
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin

from pydantic import BaseModel

from rollstream.errors import ConfigurationError

ENVIRONMENT_PREFIX = "ROLLSTREAM_"
METRICS_PORT = "ROLLSTREAM_METRICS_PORT"
RESERVED_VARIABLES = frozenset({"NONCE", "HANDED_NONCE", "PARENT", "METRICS_PORT", "RELAY_TOKEN"})
"""Variables with `ENVIRONMENT_PREFIX` that are no settings: they concern one process, not the
run.
"""

REMOVED_SETTINGS: Mapping[str, Any] = {"rollouts.vllm.kv_handover": False}
"""Settings that earlier releases had and this one refuses, each with its default. A recorded
configuration may still hold them at their default (`config.load`).
"""


@dataclass(frozen=True, slots=True)
class SettingLayers:
    """Holds nested `values`, and in `origins` the source of each leaf by dotted key."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[str, str] = field(default_factory=dict[str, str])

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set one leaf and create the tables above it; the text `null` becomes None."""
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
    """Returns the settings of a `.toml` or `.json` file. Raises `ConfigurationError` if the file is
    missing or not readable.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigurationError(f"no configuration file {path}; is the path right?") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of TOML, JSON and UTF-8
        raise ConfigurationError(
            f"{path} is no valid {path.suffix[1:] or 'TOML'}: {error}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold a table of settings")
    layers = SettingLayers()
    _put_table(layers, "", cast(dict[str, Any], values), path.name)
    return layers


def environment_layer(environment: Mapping[str, str], model: type[BaseModel]) -> SettingLayers:
    """Returns the settings in environment variables: `ROLLSTREAM_TRAINER__LR=1e-4` is `trainer.lr`.
    Every variable with the prefix must be a setting or in `RESERVED_VARIABLES`.
    """
    layers = SettingLayers()
    for name, text in sorted(environment.items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX)
        if name.startswith(ENVIRONMENT_PREFIX) and key not in RESERVED_VARIABLES:
            dotted = key.lower().replace("__", ".")
            layers.put(dotted, _parsed(dotted, text, model), f"environment variable {name}")
    return layers


def overrides_layer(overrides: Sequence[str], model: type[BaseModel]) -> SettingLayers:
    """Returns the settings of texts such as `trainer.lr=1e-4`; the last text of a key wins."""
    layers = SettingLayers()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise ConfigurationError(
                f"--set {override!r}: write it as key=value, e.g. trainer.lr=1e-4"
            )
        layers.put(key.strip(), _parsed(key.strip(), text, model), "--set")
    return layers


def merge_layers(below: SettingLayers, above: SettingLayers) -> SettingLayers:
    """Write the values of `above` over those of `below`; returns the changed `below`."""
    for key, origin in above.origins.items():
        value: Any = above.values
        for part in key.split("."):
            value = value[part]
        below.put(key, value, origin)
    return below


def setting_types(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Returns the type annotation of every setting by dotted key, including those in tables."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.update(setting_types(kind, f"{prefix}{name}."))
        else:
            found[prefix + name] = kind
    return found


def takes_text(kind: Any) -> bool:
    """Returns whether a setting with this annotation holds text (or None)."""
    if get_origin(kind) in (Union, types.UnionType):
        return set(get_args(kind)) <= {str, type(None)}
    return kind is str


def _put_table(layers: SettingLayers, prefix: str, table: Mapping[str, Any], origin: str) -> None:
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            _put_table(layers, f"{dotted}.", cast(dict[str, Any], value), origin)
        else:
            layers.put(dotted, value, origin)


def _refuse_unwritable(key: str, value: Any, where: str) -> None:
    """Raise `ConfigurationError` for a value that `config.json` cannot hold (a date, infinity,
    NaN), also inside lists and their tables.
    """
    if isinstance(value, list | dict):
        inside = cast(list[Any] | dict[str, Any], value)
        pairs = inside.items() if isinstance(inside, dict) else [(key, item) for item in inside]
        for name, item in pairs:
            _refuse_unwritable(name, item, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{key} must be finite, got {value} ({where})")
    elif not isinstance(value, str | int | float | None):  # TOML's dates and times
        raise ConfigurationError(f"{key} cannot be a date, got {value} ({where})")


def _parsed(key: str, text: str, model: type[BaseModel]) -> Any:
    """Parse the text as a TOML value; returns the text itself if the setting holds text, or if the
    text is no TOML value that `config.json` can hold.
    """
    if takes_text(setting_types(model).get(key)):
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    finite = not isinstance(value, float) or math.isfinite(value)
    is_plain = isinstance(value, bool | int | float | str | list)
    return cast(object, value) if finite and is_plain else text
