"""Loads and checks a run's configuration, and decides whether the run may continue under a changed
one (`setting_scope`). The store holds a run's configurations by hash; the ledger states that of
each term.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import xxhash
from pydantic import ValidationError

from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.run.config import sources
from rollstream.run.config.errors import error_line, error_lines
from rollstream.run.config.fitted_defaults import put_fitting_defaults, put_fitting_shapes
from rollstream.run.config.policy_defaults import (
    DECIDED_BY_PRESETS,
    put_policy_defaults,
    put_preset,
)
from rollstream.run.config.recorded_form import recorded_form
from rollstream.run.config.run_files import CONFIGURATION_FILE
from rollstream.run.config.settings import Configuration, SettingProblem, setting_problems
from rollstream.storage.settings import (
    ESSENTIAL,
    FIXED,
    INCIDENTAL,
    PROMPTED,
    TAKEN,
    Scope,
    Settings,
)
from rollstream.storage.stored_settings import (
    CONFIGURATION_KEY,
    configuration_key,
    recorded_settings,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import create_idempotent, encode_json
from rollstream.storage.stores.kind import store_kind
from rollstream.storage.stores.run_keys import RunKeys
from rollstream.streams.kind import bus_kind
from rollstream.streams.release import RELEASE

# Beside the settings in config.json.
CODE_REVISION = "code_revision"

# Only the part of these URLs that names the run's data is compared (`url_identity`).
URL_SETTINGS = ("bus", "store")


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A changed setting by dotted `key`, `before` in the run and `now`."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        then, now = json.dumps(self.before), json.dumps(self.now)
        return f"{self.key}: {then} in the run, {now} asked for"

    def holds_from(self, steps: range, group: int) -> str:
        """Returns from where on an accepted change holds: the first of `steps` comes after the
        newest checkpoint, the others are trained again; `group` is the next to be published.
        """
        then, now = json.dumps(self.before), json.dumps(self.now)
        start, scope = f"step {steps.start} on", setting_scope(self.key)
        if scope is PROMPTED:
            start = f"group {group} on (published groups keep {then})"
        elif scope is TAKEN:
            start = f"the next take on (those in the ledger keep {then})"
        elif len(steps) > 1:
            start += f" (those up to {steps.stop - 1} are trained again)"
        return f"{self.key}: {then} → {now} from {start}"


def load(
    path: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Configuration:
    """Loads the configuration of this file or folder and the layers above it. Errors raise
    `ConfigurationError`, one line each.

    Layers, later ones win: TOML → environment (`ROLLSTREAM_TRAINER__LR=1e-4`) → `overrides`
    (`trainer.lr=1e-4`). The text `null` means None in each. A preset wins over layers below its own
    (`put_preset`).
    """
    place = Path(path)
    file = place / CONFIGURATION_FILE if place.is_dir() else place
    return validate_layers(load_layers(file, overrides, environment))


def load_layers(
    path: Path | None, overrides: Sequence[str], environment: Mapping[str, str] = os.environ
) -> sources.SettingLayers:
    """Values are not checked yet. Prints on stderr which settings a preset replaced, and which stay
    against it.
    """
    layers = sources.SettingLayers() if path is None else _load_file(path)
    # A `config.json` is resolved: neither the environment nor defaults of policies and presets
    # apply to it again, so a role has exactly its supervisor's configuration.
    is_resolved = path is not None and path.name == CONFIGURATION_FILE
    above = [sources.overrides_layer(overrides, Configuration)]
    if path is not None and is_resolved:
        _refuse_removed(layers, path)
        _refuse_unresolved(layers, path)
    else:
        above.insert(0, sources.environment_layer(environment, Configuration))
    ranks = dict.fromkeys(layers.origins, 0)
    for rank, layer in enumerate(above, start=1):
        ranks |= dict.fromkeys(layer.origins, rank)
        layers = sources.merge_layers(layers, layer)
    if not is_resolved:
        put_fitting_shapes(layers)
        put_policy_defaults(layers)
    if not is_resolved or ranks.get("trainer.preset"):
        _print_once(tuple(put_preset(layers, ranks)))
    if not is_resolved:
        put_fitting_defaults(layers)
    return layers


def load_for_viewing(path: Path) -> Configuration:
    """Loads the configuration of a run that is only read: unknown keys of another release are
    skipped with a warning.
    """
    layers = _load_file(path)
    try:
        Configuration.model_validate_json(json.dumps(layers.values), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        unknown = [details["loc"] for details in errors if details["type"] == "extra_forbidden"]
        for *tables, key in unknown:
            table: Any = layers.values
            for name in tables:
                table = table[name]
            del table[key]
        _warn_of_unknown(path, tuple(".".join(map(str, where)) for where in unknown))
    return validate_layers(layers)


def _warn_of_unknown(path: Path, keys: Sequence[str]) -> None:
    if keys:
        line = (
            f"{path}: skipped settings that release {RELEASE} does not have: "
            f"{', '.join(keys)}; views that depend on them are incomplete"
        )
        _print_once((line,))


# Once per process: a command may load a file several times.
@cache
def _print_once(lines: tuple[str, ...]) -> None:
    for line in lines:
        print(f"rollstream: {line}", file=sys.stderr)


def _load_file(path: Path) -> sources.SettingLayers:
    """A `config.json`, or a copy of one, loses `code_revision` and removed settings at their
    default; a `config.json` gets its own folder as `folder`.
    """
    layers = sources.file_layer(path)
    if path.suffix == ".json":
        layers.values.pop(CODE_REVISION, None)
        if path.name == CONFIGURATION_FILE:
            layers.values["folder"] = str(path.parent)
        for key, default in sources.REMOVED_SETTINGS.items():
            if _leaf(layers, key) == (default,):
                _drop_leaf(layers, key)
    return layers


def _refuse_removed(layers: sources.SettingLayers, path: Path) -> None:
    for key, default in sources.REMOVED_SETTINGS.items():
        for value in _leaf(layers, key):
            raise ConfigurationError(
                f"{path} has {key} = {json.dumps(value)}, and release {RELEASE} has no such "
                f"setting any more; set it to {json.dumps(default)} there to resume without it"
            )


def _refuse_unresolved(layers: sources.SettingLayers, path: Path) -> None:
    """Raises `ConfigurationError` for a preset that no program resolved: a run's own file has the
    settings that its preset decided.
    """
    keys = layers.origins.keys()
    if "trainer.preset" in keys and not keys & {CODE_REVISION, "trainer", *DECIDED_BY_PRESETS}:
        raise ConfigurationError(
            f"{path}: a file of this name is read as that which a run wrote, and its "
            "trainer.preset would decide nothing; give it another name, e.g. run.json"
        )


def _leaf(layers: sources.SettingLayers, key: str) -> tuple[Any, ...]:
    value: Any = layers.values
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return ()
        value = cast(dict[str, Any], value)[part]
    return (value,)


def _drop_leaf(layers: sources.SettingLayers, key: str) -> None:
    *tables, leaf = key.split(".")
    table = layers.values
    for name in tables:
        table = table[name]
    del table[leaf]
    layers.origins.pop(key, None)


def truncates_log(configuration: Configuration) -> bool:
    """Whether old records are removed; by default if an archive keeps them."""
    truncate = configuration.truncate
    return configuration.archive.enabled if truncate is None else truncate


# Tables whose entries are not settings of the project.
USER_TABLES = ("task.options.", "model.config.")


def validate_layers(layers: sources.SettingLayers) -> Configuration:
    """Raises `ConfigurationError` with all errors."""
    try:
        # JSON mode is strict about types and still takes a list for a tuple.
        configuration = Configuration.model_validate_json(json.dumps(layers.values), strict=True)
    except ValidationError as error:
        raise ConfigurationError(error_lines(error, layers, Configuration)) from None
    problems = _huge_numbers(configuration) or setting_problems(configuration)
    if problems:
        raise ConfigurationError(
            "\n".join(
                error_line(p.key, p.must, setting_value(configuration, p.key), layers)
                for p in problems
            )
        )
    return configuration


def _huge_numbers(c: Configuration) -> list[SettingProblem]:
    return [
        SettingProblem(key, "must be less than 2^63")
        for key, value in flat_settings(c).items()
        # No record and no array holds such a number.
        if isinstance(value, int) and abs(value) >= 1 << 63 and not key.startswith(USER_TABLES)
    ]


def flat_settings(configuration: Configuration) -> dict[str, Any]:
    by_key: dict[str, Any] = {}

    def walk(prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(f"{prefix}{key}.", value)  # pyright: ignore[reportUnknownArgumentType]
            else:
                by_key[f"{prefix}{key}"] = value

    walk("", configuration.model_dump(mode="json"))
    return by_key


def setting_value(configuration: Configuration, key: str) -> Any:
    value: Any = configuration
    for part in key.split("."):
        value = getattr(value, part)
    return value


def setting_scope(key: str) -> Scope:
    """Returns that of the setting, else of the innermost table around it that declares one, else
    `ESSENTIAL`.
    """
    scope, table = ESSENTIAL, Configuration
    for name in key.split("."):
        field = table.model_fields.get(name)
        if field is None:
            # An entry of a setting that is a table itself, or of another release.
            break
        scope = next((marker for marker in field.metadata if isinstance(marker, Scope)), scope)
        inner = field.annotation
        if not (isinstance(inner, type) and issubclass(inner, Settings)):
            break
        table = inner
    return scope


def essential_settings(configuration: Configuration) -> dict[str, Any]:
    """Returns the essential settings by dotted key, those that are not `INCIDENTAL`, which a run
    records and compares; of URLs the part that names the data.
    """
    essential = {
        key: value
        for key, value in flat_settings(configuration).items()
        if setting_scope(key) is not INCIDENTAL
    }
    return _without_hosts(essential)


def url_identity(url: str) -> str:
    """The part of a URL that names the data: scheme and prefix, or bucket and prefix; a path whole.
    The rest may change during a run (invariant 15).
    """
    kind = bus_kind(url) or store_kind(url)
    return url if kind is None else kind.identity(url)


def _without_hosts(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Earlier releases recorded whole URLs.
    return {k: url_identity(v) if k in URL_SETTINGS and v else v for k, v in settings.items()}


def fingerprint(configuration: Configuration) -> str:
    """Returns xxh3-128 of the settings that a run records, by which the ledger names a
    configuration.
    """
    text = json.dumps(_settings_to_record(configuration), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()


def _settings_to_record(configuration: Configuration) -> dict[str, Any]:
    return recorded_form(essential_settings(configuration), _default_settings())


@cache
def _default_settings() -> Mapping[str, Any]:
    return essential_settings(Configuration())


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """Returns the setting changes between two sets of essential settings, sorted by key. A missing
    setting (`recorded_form`) counts as its default.
    """
    defaults = _default_settings()
    remaining = {
        k: v
        for k, v in before.items()
        if k not in sources.REMOVED_SETTINGS or v != sources.REMOVED_SETTINGS[k]
    }
    before = _without_hosts(remaining)
    pairs = [
        (key, before.get(key, defaults.get(key)), now.get(key, defaults.get(key)))
        for key in {*before, *now}
    ]
    return [
        SettingChange(*pair) for pair in sorted(pairs, key=lambda p: p[0]) if pair[1] != pair[2]
    ]


def refuse_changes(
    changes: Sequence[SettingChange],
    where: str,
    accepted: bool,
    advice: str,
    configuration: Configuration,
) -> None:
    """Raises `ConfigurationError` with all refused changes: of fixed settings if `accepted`, else
    all. `where` names the place of the other configuration.
    """
    # The base of an adapter is rounded to this type, so another type would be another base.
    of_base = {"weights.dtype"} if configuration.model.lora.rank else set[str]()
    fixed = [
        change.key
        for change in changes
        if setting_scope(change.key) is FIXED or change.key in of_base
    ]
    refused = [change for change in changes if not accepted or change.key in fixed]
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        if fixed:
            advice = (
                f"{' and '.join(fixed)} cannot change in a run: choose another folder with "
                "--run DIR"
            )
        raise ConfigurationError(f"{where} of another configuration:\n{lines}\n{advice}")


ADVICE_ON_CHANGE = (
    "use its recorded configuration, or change it for what comes next with --accept-config"
)


RUN_KEYS = (RunKeys(CONFIGURATION_KEY, "later", "any"),)


def store_configuration(store: ObjectStore, configuration: Configuration) -> None:
    """Stores those that a run records, under their hash. Idempotent."""
    settings = _settings_to_record(configuration)
    create_idempotent(store, configuration_key(fingerprint(configuration)), encode_json(settings))


def accept_change(
    store: ObjectStore, configuration: Configuration, accepted: bool, before: str
) -> bool:
    """Returns whether the essential settings changed since the configuration of hash `before`.
    Raises `ConfigurationError` if a difference is not `accepted` or of a `FIXED` setting.
    """
    try:
        changes = changes_since_hash(store, before, configuration)
    except ObjectMissing:
        if not accepted:
            raise ConfigurationError(
                f"the run was trained under another configuration ({before}), which is not kept: "
                f"no object {configuration_key(before)}; {ADVICE_ON_CHANGE}"
            ) from None
        return True
    where = f"the ledger ends under {before}, a run"
    refuse_changes(changes, where, accepted, ADVICE_ON_CHANGE, configuration)
    return bool(changes)


def changes_since_hash(
    store: ObjectStore, before: str, configuration: Configuration
) -> list[SettingChange]:
    """Returns the changes of essential settings, since the configuration of hash `before`. Raises
    `ObjectMissing` if that is not stored.
    """
    recorded = recorded_settings(store, before)
    now: dict[str, Any] = json.loads(json.dumps(essential_settings(configuration)))
    return setting_changes(recorded, now)
