"""Loads the configuration that a command names: `load_and_settle` for commands that run something,
else `load_configuration`.
"""

import argparse
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.errors import AdapterMissing, ConfigurationError, StoreError
from rollstream.look.query.locate import REPLAY_FILE
from rollstream.run.config.config import flat_settings, load_layers, setting_value, validate_layers
from rollstream.run.config.errors import printable_value
from rollstream.run.config.file_kind import refuse_other_kind
from rollstream.run.config.fitted_defaults import put_recorded_defaults, set_settings
from rollstream.run.config.policy_defaults import follow_length, layer_value
from rollstream.run.config.run_files import CONFIGURATION_FILE
from rollstream.run.config.run_folder import (
    RunFolder,
    check_changes,
    folder_of_run,
    reach,
    write_configuration,
)
from rollstream.run.config.run_model import has_model, has_versions, missing_model
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers, environment_layer, file_layer
from rollstream.run.config.stored_defaults import stored_adapter, stored_defaults
from rollstream.run.role_catalogue import ROLES
from rollstream.run.signals import warn
from rollstream.run.supervisor.process import PARENT_VARIABLE
from rollstream.storage.model_folder.lora_folder import settings_as_set

if TYPE_CHECKING:
    from rollstream.run.checks.check import CheckReport
    from rollstream.run.checks.findings import Finding


EVALUATED = "evaluation.prompts"


def load_and_settle(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    configuration, folder = load_configuration(arguments)
    settle(configuration, folder, arguments)
    return configuration, folder


def settle(
    configuration: Configuration,
    folder: RunFolder,
    arguments: argparse.Namespace,
    is_fitted: bool = False,
) -> None:
    """Writes `config.json` in the run's folder, unless it is the named file and nothing changes it.
    Raises `ConfigurationError` if the folder belongs to a replay, or to a run with other settings
    that may not change so.
    """
    if (folder.path / REPLAY_FILE).exists():
        raise ConfigurationError(f"{folder.path} holds a replay, which no role can resume")
    if is_fitted or _is_changed(folder, arguments):
        accepted = getattr(arguments, "accept_config", False)
        is_run = arguments.command == "run"
        write_configuration(
            folder, configuration, accepted, lambda: _reach(configuration, folder.path, is_run)
        )


def load_checked(arguments: argparse.Namespace) -> "tuple[CheckReport, RunFolder]":
    """Makes all checks of the run; nothing is written. The report has the configuration with
    defaults that fit the data.
    """
    # Slow to import, and few commands check.
    from rollstream.run.checks.check import check_run

    layers, folder = _load_layers(arguments)
    recorded = recorded_settings(layers, _file(arguments), folder)
    set_keys = set_settings(layers)
    if EVALUATED in recorded and layer_value(layers, EVALUATED) == setting_value(
        Configuration(), EVALUATED
    ):
        # A fork records the default without a look at the data.
        set_keys -= {EVALUATED}
    report = check_run(validate_layers(layers), folder.path, set_keys, recorded)
    changes = change_findings(report.configuration, folder, arguments)
    return replace(report, findings=[*changes, *report.findings]), folder


def recorded_settings(layers: SettingLayers, file: Path, folder: RunFolder) -> frozenset[str]:
    """Returns those that come from the run's own `config.json`, where each setting stands, and not
    from the user.
    """
    if file.absolute() != folder.configuration:
        return frozenset()
    return frozenset(key for key, origin in layers.origins.items() if origin == file.name)


def change_findings(
    configuration: Configuration, folder: RunFolder, arguments: argparse.Namespace
) -> "list[Finding]":
    """Returns settings that differ from those of the run in the folder."""
    from rollstream.run.checks.findings import Finding

    if not folder.configuration.is_file() or not _is_changed(folder, arguments):
        return []
    accepted = getattr(arguments, "accept_config", False)
    try:
        changes = check_changes(folder, configuration, accepted)
    except ConfigurationError as error:
        return [Finding("settings", "refused", str(error))]
    return [Finding("settings", "ok", f"accepted change: {change}") for change in changes]


def _is_changed(folder: RunFolder, arguments: argparse.Namespace) -> bool:
    overridden = arguments.overrides or arguments.seed is not None
    return bool(overridden) or _file(arguments).absolute() != folder.configuration


def _reach(configuration: Configuration, folder: Path, is_run: bool) -> None:
    store = reach(configuration, folder)
    has_path = configuration.model.path is not None
    # Once `model.path` is in `config.json` it cannot be corrected.
    if is_run and has_path and not (has_model(store, configuration, folder) or has_versions(store)):
        raise missing_model(configuration)


def load_configuration(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Loads the configuration with the `--set`, `--seed` and `--run` of the arguments; nothing is
    written.
    """
    layers, folder = _load_layers(arguments)
    return validate_layers(layers), folder


def _load_layers(arguments: argparse.Namespace) -> tuple[SettingLayers, RunFolder]:
    overrides: list[str] = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    if arguments.run is not None:
        overrides.append(f"folder={arguments.run}")
    refuse_other_kind(_file(arguments), Configuration)
    layers = _layers_with_adapter(_file(arguments), overrides)
    configuration = validate_layers(layers)
    warn_of_unused(_file(arguments), layers, configuration)
    folder = folder_of_run(configuration)
    recorded: SettingLayers | None = None
    if folder.configuration.is_file():
        if _file(arguments).absolute() != folder.configuration:
            recorded = file_layer(folder.configuration)
    # Another host of a run may have begun it.
    elif arguments.command in (*ROLES, "run"):
        recorded = stored_defaults(configuration, folder.path)
    if recorded is not None:
        # Defaults that follow the data stay as the run has them.
        for line in put_recorded_defaults(layers, recorded):
            warn(line)
        follow_length(layers)
    return layers, folder


def warn_of_unused(file: Path, layers: SettingLayers, c: Configuration) -> None:
    """Warns of environment variables whose setting is not used because a run's `config.json` has
    another value.
    """
    # Roles have the environment of their supervisor, which prints these lines.
    if file.name != CONFIGURATION_FILE or PARENT_VARIABLE in os.environ:
        return
    environment, used = SettingLayers(), flat_settings(c)
    # A variable that is no setting is not used either.
    with suppress(ConfigurationError):
        environment = environment_layer(os.environ, Configuration)
    for key, origin in sorted(environment.origins.items()):
        value, now = layer_value(environment, key), used.get(key)
        if key == "folder":
            value, now = Path(str(value)).absolute(), Path(str(now)).absolute()
        if key in used and value != now and layers.origins.get(key) != "--set":
            shown = printable_value(key, used[key], json.dumps)
            warn(f"{origin} is not used: {file} has {key} = {shown}; change it with --set {key}=…")


def _layers_with_adapter(file: Path, overrides: list[str]) -> SettingLayers:
    try:
        return load_layers(file, overrides)
    except AdapterMissing as missing:
        # On a host without the adapter its rank, alpha and targets are those in the run's store.
        any_adapter = ("model.lora.rank=1", "model.lora.alpha=1", 'model.lora.targets=["any"]')
        c = validate_layers(load_layers(file, [*overrides, *any_adapter]))
        try:
            adapter = stored_adapter(c, folder_of_run(c).path)
        except StoreError as error:
            raise missing from error
        if adapter is None:
            raise
        values = settings_as_set(adapter).items()
        return load_layers(file, [*overrides, *(f"{k}={json.dumps(v)}" for k, v in values)])


def _file(arguments: argparse.Namespace) -> Path:
    path = Path(arguments.configuration)
    return path / "config.json" if path.is_dir() else path
