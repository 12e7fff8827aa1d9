"""Reads the settings of a file, of environment variables and of `--set` options, each source into
one layer: nested values, with the origin of each for error messages.

`config.load_layers` merges the layers: the environment replaces values of the file, `--set` those
of both. This file refuses malformed sources and values that `config.json` cannot hold; unknown keys
and wrong types are refused by `config.validate_layers`, after merging.
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

ENVIRONMENT_PREFIX = "ROLLSTREAM_"
ENVIRONMENT_ORIGIN = "environment variable"
METRICS_PORT = "ROLLSTREAM_METRICS_PORT"
"""Variable by which the supervisor gives each process the port of its metrics."""
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
"""Variables, named without `ENVIRONMENT_PREFIX`, that have the prefix but are not settings: they
concern one process, not the run.
"""

REMOVED_SETTINGS: Mapping[str, Any] = {"rollouts.vllm.kv_handover": False}
"""Settings that earlier releases had and this one refuses, each with its default. The `config.json`
of an old run may still hold them at their default (`config.load_layers`).
"""


@dataclass(frozen=True, slots=True)
class SettingLayers:
    """Holds the settings of one source, or of several merged ones. `values` are nested by table;
    `origins` maps each setting's dotted key (`trainer.lr`) to a text such as `--set` or the name of
    a file.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[str, str] = field(default_factory=dict[str, str])

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set the setting with this dotted key and create the tables above it; the text `null`
        becomes None. Raises `ConfigurationError` if a table of the key is already a plain value, or
        if `config.json` cannot hold `value`.
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
    """Returns the settings of a file, which is JSON if its name ends in `.json`, else TOML. Raises
    `ConfigurationError` if the file is missing, cannot be read, or is not valid.
    """
    try:
        is_json = path.suffix == ".json"  # that of a run, which may come from another user
        data = ContainedFolder(path.parent).read(path.name) if is_json else path.read_bytes()
        values = parse_loose_json(data) if is_json else tomllib.loads(data.decode("utf-8-sig"))
    except OutsideRun:
        raise
    except FileNotFoundError:
        raise ConfigurationError(f"no configuration file {path}; is the path right?") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {explain_os_error(error)}") from None
    except (ValueError, RecursionError) as error:  # of TOML, JSON and UTF-8
        raise ConfigurationError(
            f"{path} is no valid {path.suffix[1:] or 'TOML'}: {error}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold a table of settings")
    layers = SettingLayers()
    _put_table(layers, "", cast(dict[str, Any], values), path.name)
    return layers


_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_OF_A_SERVICE = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes gives to each container for a service whose name begins with
`rollstream`.
"""


def environment_layer(environment: Mapping[str, str], model: type[BaseModel]) -> SettingLayers:
    """Returns the settings in environment variables: `ROLLSTREAM_TRAINER__LR=1e-4` is `trainer.lr`.
    Every variable with the prefix counts as a setting, except `RESERVED_VARIABLES`, so validation
    refuses a misspelled one. `model` is the configuration's class: it states which settings are
    text (`takes_text`).
    """
    layers = SettingLayers()
    for name, text in sorted(environment.items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX)
        is_foreign = "__" not in key and _OF_A_SERVICE.fullmatch(key)
        if name.startswith(ENVIRONMENT_PREFIX) and not is_foreign and key not in RESERVED_VARIABLES:
            dotted = key.lower().replace("__", ".")
            origin = f"{ENVIRONMENT_ORIGIN} {name}"
            _put_parsed(layers, dotted, _parsed(dotted, text, model), origin)
    return layers


def overrides_layer(overrides: Sequence[str], model: type[BaseModel]) -> SettingLayers:
    """Returns the settings of `--set` options, texts such as `trainer.lr=1e-4`. The last text of a
    key wins. Raises `ConfigurationError` for a text without `=` or with an empty part of its key.
    """
    layers = SettingLayers()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise ConfigurationError(
                f"--set {override!r}: write it as key=value, e.g. trainer.lr=1e-4"
            )
        _put_parsed(layers, key.strip(), _parsed(key.strip(), text, model), "--set")
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
    """Returns the type annotation of every setting of `model` by dotted key. The fields of a nested
    model (a TOML table) count as settings, the nested model itself does not.
    """
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


def _put_parsed(layers: SettingLayers, key: str, value: Any, origin: str) -> None:
    """Set one setting, or with an inline table each setting that it names; others stay."""
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
    """Raise `ConfigurationError` for a value that `config.json` cannot hold (a date, infinity,
    NaN), also for one inside a list or inside a table of a list.
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


_BOOLEANS = {"True": True, "False": False}


def _parsed(key: str, text: str, model: type[BaseModel]) -> Any:
    """Parse the text as a TOML value: a finite number, a boolean, a string, a list or an inline
    table. Python's `True` and `False` are booleans, too: as a text, which templates and options of
    tasks take, both would count as true. Returns the text itself if the setting holds text, or if
    the text is none of these. A setting that is a number may be written as Python writes it, too
    (`.7`, `1.`, `1.e-5`).
    """
    kind = setting_types(model).get(key)
    if takes_text(kind):
        return text
    if text.strip() in _BOOLEANS:
        return _BOOLEANS[text.strip()]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, too many digits, too deep
        if float not in (kind, *get_args(kind)) or _DECIMAL.fullmatch(text.strip()) is None:
            return text
        value = float(text)
    finite = not isinstance(value, float) or math.isfinite(value)
    is_plain = isinstance(value, bool | int | float | str | list | dict)
    return cast(object, value) if finite and is_plain else text
