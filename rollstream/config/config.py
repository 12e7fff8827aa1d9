"""Loads and checks the configuration of a run, one frozen value with every role's settings, and
decides whether a trainer may continue a run with a changed one.

Layers, later ones win: TOML (or a run's `config.json`) → environment
(`ROLLSTREAM_TRAINER__LR=1e-4`) → `--set trainer.lr=1e-4`. The text `null` means None in each of
them. Unknown keys, wrong types and combinations that cannot work raise `ConfigurationError`, one
line per error. A `config.json` is resolved already: the environment is not applied to it again, so
a role that the supervisor starts has exactly the supervisor's configuration.

The run's object store holds its configurations by hash, so a change is shown field by field on any
machine. The ledger states the configuration of each term (`Configured`), and whether a change was
accepted.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import xxhash
from pydantic import ValidationError

from rollstream.config.errors import error_line, error_lines
from rollstream.config.settings import Configuration, setting_problems
from rollstream.config.sources import (
    REMOVED_SETTINGS,
    SettingLayers,
    environment_layer,
    file_layer,
    merge_layers,
    overrides_layer,
)
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.storage.settings import ESSENTIAL, FIXED, INCIDENTAL, Scope, Settings
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import create_idempotent, decode_json, encode_json
from rollstream.streams.release import RELEASE

CODE_REVISION = "code_revision"  # beside the settings in config.json

URL_SETTINGS = ("bus", "store")
"""URLs; of each only the part that names the run's data is compared (`url_identity`)."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting whose value changed."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        then, now = json.dumps(self.before), json.dumps(self.now)
        return f"{self.key}: {then} in the run, {now} asked for"


def load(
    path: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Configuration:
    """The checked configuration of this file and of the layers above it; `overrides` are
    `key=value`.
    """
    return validate_layers(load_layers(Path(path), overrides, environment))


def load_layers(
    path: Path | None, overrides: Sequence[str], environment: Mapping[str, str] = os.environ
) -> SettingLayers:
    """What the file, if one is given, and the layers above it set, not yet checked."""
    layers = SettingLayers() if path is None else _load_file(path)
    if path is not None and path.suffix == ".json":
        _refuse_removed(layers, path)
    else:
        layers = merge_layers(layers, environment_layer(environment, Configuration))
    return merge_layers(layers, overrides_layer(overrides, Configuration))


def load_for_viewing(path: Path) -> Configuration:
    """The configuration of a run's `config.json`, for commands that only read the run: unknown keys
    of another release are skipped with a warning, where `load` refuses them.
    """
    layers = _load_file(path)
    try:
        Configuration.model_validate_json(json.dumps(layers.values), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        unknown = [one["loc"] for one in found if one["type"] == "extra_forbidden"]
        for *tables, key in unknown:
            table: Any = layers.values
            for name in tables:
                table = table[name]
            del table[key]
        _warn_of_unknown(path, tuple(".".join(map(str, where)) for where in unknown))
    return validate_layers(layers)


@cache
def _warn_of_unknown(path: Path, keys: Sequence[str]) -> None:
    """Warn once per process: a command may load a file several times."""
    if keys:
        print(
            f"rollstream: {path}: skipped settings that release {RELEASE} does not have: "
            f"{', '.join(keys)}; views that depend on them are incomplete",
            file=sys.stderr,
        )


def _load_file(path: Path) -> SettingLayers:
    """A file's layer; of a `config.json` only the settings, and with its own folder."""
    layers = file_layer(path)
    if path.suffix == ".json":
        layers.values.pop(CODE_REVISION, None)
        layers.values["folder"] = str(path.parent)
        for key, default in REMOVED_SETTINGS.items():
            if _leaf(layers, key) == (default,):
                _drop_leaf(layers, key)
    return layers


def _refuse_removed(layers: SettingLayers, path: Path) -> None:
    """Raise `ConfigurationError` for a removed setting whose value in the run is not its default:
    without it the run would not be the same.
    """
    for key, default in REMOVED_SETTINGS.items():
        for value in _leaf(layers, key):
            raise ConfigurationError(
                f"{path} has {key} = {json.dumps(value)}, and release {RELEASE} has no such "
                f"setting any more; set it to {json.dumps(default)} there to resume without it"
            )


def _leaf(layers: SettingLayers, key: str) -> tuple[Any, ...]:
    """The value of a dotted key, alone in a tuple; nothing where the layers do not have it."""
    value: Any = layers.values
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return ()
        value = cast(dict[str, Any], value)[part]
    return (value,)


def _drop_leaf(layers: SettingLayers, key: str) -> None:
    *tables, leaf = key.split(".")
    table = layers.values
    for name in tables:
        table = table[name]
    del table[leaf]
    layers.origins.pop(key, None)


def truncates_log(configuration: Configuration) -> bool:
    """Whether the run's log is truncated."""
    wanted = configuration.truncate
    return configuration.archive.enabled if wanted is None else wanted


def validate_layers(layers: SettingLayers) -> Configuration:
    """The configuration that the layers describe. Raises `ConfigurationError` with all errors."""
    try:
        # JSON mode is strict about types and still takes a list for a tuple.
        configuration = Configuration.model_validate_json(json.dumps(layers.values), strict=True)
    except ValidationError as error:
        raise ConfigurationError(error_lines(error, layers, Configuration)) from None
    problems = setting_problems(configuration)
    if problems:
        raise ConfigurationError(
            "\n".join(
                error_line(p.key, p.must, setting_value(configuration, p.key), layers)
                for p in problems
            )
        )
    return configuration


def flat_settings(configuration: Configuration) -> dict[str, Any]:
    """Every setting by its dotted key."""
    found: dict[str, Any] = {}

    def walk(prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(f"{prefix}{key}.", value)  # pyright: ignore[reportUnknownArgumentType]
            else:
                found[f"{prefix}{key}"] = value

    walk("", configuration.model_dump(mode="json"))
    return found


def setting_value(configuration: Configuration, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = configuration
    for part in key.split("."):
        value = getattr(value, part)
    return value


def setting_scope(key: str) -> Scope:
    """The scope of a dotted key: its own, else that of the innermost table that declares one."""
    scope, table = ESSENTIAL, Configuration
    for name in key.split("."):
        field = table.model_fields.get(name)
        if field is None:
            break  # an entry of a setting that is a table itself, or of another release
        scope = next((one for one in field.metadata if isinstance(one, Scope)), scope)
        inner = field.annotation
        if not (isinstance(inner, type) and issubclass(inner, Settings)):
            break
        table = inner
    return scope


def essential_settings(configuration: Configuration) -> dict[str, Any]:
    """The settings that must not change during a run."""
    kept = {
        key: value
        for key, value in flat_settings(configuration).items()
        if setting_scope(key) is not INCIDENTAL
    }
    return _without_hosts(kept)


def url_identity(url: str) -> str:
    """The part of a URL that names the data: scheme and prefix, or bucket and prefix. Hosts,
    endpoints and options may change during a run (invariant 15). A path names the data as a whole.
    """
    parts = urlsplit(url)
    path = parts.path.strip("/")
    if parts.scheme == "kafka":
        return f"kafka:///{path}"
    if parts.scheme == "s3":
        return f"s3://{parts.netloc}/{path}"
    return url


def _without_hosts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with hosts and options removed from their URLs; earlier releases recorded whole
    URLs.
    """
    return {k: url_identity(v) if k in URL_SETTINGS and v else v for k, v in settings.items()}


def fingerprint(configuration: Configuration) -> str:
    """xxh3-128 of the essentials: the configuration hash of the ledger."""
    text = json.dumps(essential_settings(configuration), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """The changes between two sets of essential settings, by key. A setting missing in `before`,
    because an earlier release wrote it, had its default; a removed setting that had its default is
    no change.
    """
    defaults = essential_settings(Configuration())
    kept = {
        k: v for k, v in before.items() if k not in REMOVED_SETTINGS or v != REMOVED_SETTINGS[k]
    }
    before = _without_hosts(kept)
    pairs = [(key, before.get(key, defaults.get(key)), now.get(key)) for key in {*before, *now}]
    return [
        SettingChange(*pair) for pair in sorted(pairs, key=lambda p: p[0]) if pair[1] != pair[2]
    ]


def refuse_changes(found: Sequence[SettingChange], where: str, accepted: bool, advice: str) -> None:
    """Raise `ConfigurationError` with all changes that are refused: any change, or, if they are
    `accepted`, only those of fixed settings.
    """
    refused = [one for one in found if not accepted or setting_scope(one.key) is FIXED]
    if refused:
        lines = "\n".join(f"  {one}" for one in refused)
        if accepted:
            advice = "this cannot change in a run: choose another folder with --run DIR"
        raise ConfigurationError(f"{where} of another configuration:\n{lines}\n{advice}")


ADVICE_ON_CHANGE = (
    "use its recorded configuration, or change it from the next step on with --accept-config"
)


def configuration_key(configuration_hash: str) -> str:
    return f"configurations/{configuration_hash}.json"


def store_configuration(store: ObjectStore, configuration: Configuration) -> None:
    """Store the essential settings under their hash; idempotent."""
    wanted = essential_settings(configuration)
    create_idempotent(store, configuration_key(fingerprint(configuration)), encode_json(wanted))


def accept_change(
    store: ObjectStore, configuration: Configuration, accepted: bool, before: str
) -> bool:
    """Returns whether an accepted change is in effect; False if no essential setting changed since
    `before`. Raises `ConfigurationError` with the differences if they were not accepted.
    """
    try:
        found = changes_since_hash(store, before, configuration)
    except ObjectMissing:
        if not accepted:
            raise ConfigurationError(
                f"the run was trained under another configuration ({before}), which is not kept: "
                f"no object {configuration_key(before)}; {ADVICE_ON_CHANGE}"
            ) from None
        return True
    refuse_changes(found, f"the ledger ends under {before}, a run", accepted, ADVICE_ON_CHANGE)
    return bool(found)


def recorded_settings(store: ObjectStore, configuration_hash: str) -> dict[str, Any]:
    """The essential settings of this hash, by their dotted keys. Raises `ObjectMissing` if they are
    not stored.
    """
    key = configuration_key(configuration_hash)
    return decode_json(store.get(key), dict[str, Any], key)


def changes_since_hash(
    store: ObjectStore, before: str, configuration: Configuration
) -> list[SettingChange]:
    """Changes of essential settings since the configuration of this hash. Raises `ObjectMissing` if
    it is not stored.
    """
    had = recorded_settings(store, before)
    now: dict[str, Any] = json.loads(json.dumps(essential_settings(configuration)))
    return setting_changes(had, now)
