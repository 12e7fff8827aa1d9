"""Loads the configuration that a command's arguments name, and finds the folder of its run.

Commands that run something (a run, a role, the warm-up) use `load_and_settle`, which also settles
the run's folder: it writes `config.json` there, or refuses a configuration that differs from that
of the run. Commands that leave `config.json` as it is use `load_configuration`.
"""

import argparse
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from rollstream.analysis.locate import REPLAY_FILE
from rollstream.cli.signals import warn
from rollstream.config.config import (
    CODE_REVISION,
    flat_settings,
    load_layers,
    setting_value,
    validate_layers,
)
from rollstream.config.errors import printable_value
from rollstream.config.fitted_defaults import put_recorded_defaults, set_settings
from rollstream.config.policy_defaults import follow_length, layer_value
from rollstream.config.run_files import CONFIGURATION_FILE
from rollstream.config.run_folder import (
    RunFolder,
    check_changes,
    folder_of_run,
    reach,
    write_configuration,
)
from rollstream.config.run_model import has_model, has_versions, missing_model
from rollstream.config.settings import Configuration
from rollstream.config.sources import SettingLayers, environment_layer, file_layer
from rollstream.config.stored_defaults import stored_adapter, stored_defaults
from rollstream.errors import AdapterMissing, ConfigurationError, StoreError
from rollstream.printable import shell_command
from rollstream.roles.catalogue import ROLES
from rollstream.storage.lora_folder import settings_as_set
from rollstream.supervisor.process import PARENT_VARIABLE

if TYPE_CHECKING:
    from rollstream.checks.check import CheckReport
    from rollstream.checks.findings import Finding


EVALUATED = "evaluation.prompts"


def load_and_settle(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load and validate the configuration, and `settle` it in the run's folder."""
    configuration, folder = load_configuration(arguments)
    settle(configuration, folder, arguments)
    return configuration, folder


def settle(
    configuration: Configuration,
    folder: RunFolder,
    arguments: argparse.Namespace,
    is_fitted: bool = False,
) -> None:
    """Write the configuration into the run's folder as `config.json`, unless it is that file and
    neither `--set` nor `--seed` changes it, nor a default that was fitted to the data.

    Raises `ConfigurationError` if the folder belongs to a replay, or if it has a run with other
    settings and these must not change: some may always, some with `--accept-config`, some never.
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
    """Load and validate the configuration, and make all checks of its run; nothing is written. The
    report has the configuration with defaults that fit the data.
    """
    from rollstream.checks.check import check_run  # slow to import, and few commands check

    layers, folder = _load_layers(arguments)
    recorded = recorded_settings(layers, _file(arguments), folder)
    set_keys = set_settings(layers)
    if EVALUATED in recorded and layer_value(layers, EVALUATED) == setting_value(
        Configuration(), EVALUATED
    ):
        set_keys -= {EVALUATED}  # a fork records the default without a look at the data
    report = check_run(validate_layers(layers), folder.path, set_keys, recorded)
    changes = change_findings(report.configuration, folder, arguments)
    return replace(report, findings=[*changes, *report.findings]), folder


def recorded_settings(layers: SettingLayers, file: Path, folder: RunFolder) -> frozenset[str]:
    """Returns the settings that come from the run's own `config.json`, where each setting stands,
    and not from the user who names the run.
    """
    if file.absolute() != folder.configuration:
        return frozenset()
    return frozenset(key for key, origin in layers.origins.items() if origin == file.name)


def change_findings(
    configuration: Configuration, folder: RunFolder, arguments: argparse.Namespace
) -> "list[Finding]":
    """Returns the lines about settings that differ from those of the run in the folder."""
    from rollstream.checks.findings import Finding

    if not folder.configuration.is_file() or not _is_changed(folder, arguments):
        return []
    accepted = getattr(arguments, "accept_config", False)
    try:
        changes = check_changes(folder, configuration, accepted)
    except ConfigurationError as error:
        return [Finding("settings", "refused", str(error))]
    return [Finding("settings", "ok", f"accepted change: {change}") for change in changes]


def _is_changed(folder: RunFolder, arguments: argparse.Namespace) -> bool:
    """Returns whether the settings may be others than those in the folder's `config.json`."""
    overridden = arguments.overrides or arguments.seed is not None
    return bool(overridden) or _file(arguments).absolute() != folder.configuration


def _reach(configuration: Configuration, folder: Path, is_run: bool) -> None:
    """Check that log and store can be reached and, before `rollstream run`, that `model.path` names
    a model: once it is in `config.json` it cannot be corrected.
    """
    store = reach(configuration, folder)
    named = configuration.model.path is not None
    if is_run and named and not (has_model(store, configuration, folder) or has_versions(store)):
        raise missing_model(configuration)


def load_configuration(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load and validate the configuration; nothing is written. `--set`, `--seed` and `--run` of the
    arguments override settings of the file.
    """
    layers, folder = _load_layers(arguments)
    return validate_layers(layers), folder


def _load_layers(arguments: argparse.Namespace) -> tuple[SettingLayers, RunFolder]:
    """Returns the settings with their origins, and the run's folder. Settings that nobody set and
    whose default follows the data are those that the run in the folder has.
    """
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
    elif arguments.command in (*ROLES, "run"):  # another host of a run may have begun it
        recorded = stored_defaults(configuration, folder.path)
    if recorded is not None:
        for line in put_recorded_defaults(layers, recorded):
            warn(line)
        follow_length(layers)
    return layers, folder


def warn_of_unused(file: Path, layers: SettingLayers, c: Configuration) -> None:
    """Print a line about each environment variable whose setting is not used because a run's
    `config.json` has another value. The roles of a supervisor have its environment: it prints them.
    """
    if file.name != CONFIGURATION_FILE or PARENT_VARIABLE in os.environ:
        return
    given, used = SettingLayers(), flat_settings(c)
    with suppress(ConfigurationError):  # a variable that is no setting is not used either
        given = environment_layer(os.environ, Configuration)
    for key, origin in sorted(given.origins.items()):
        value, now = layer_value(given, key), used.get(key)
        if key == "folder":
            value, now = Path(str(value)).absolute(), Path(str(now)).absolute()
        if key in used and value != now and layers.origins.get(key) != "--set":
            shown = printable_value(key, used[key], json.dumps)
            warn(f"{origin} is not used: {file} has {key} = {shown}; change it with --set {key}=…")


def _layers_with_adapter(file: Path, overrides: list[str]) -> SettingLayers:
    """Returns the settings. On a host without the adapter that the run starts from, its rank, alpha
    and targets are those of the adapter in the run's store; raises `AdapterMissing` without one.
    """
    try:
        return load_layers(file, overrides)
    except AdapterMissing as missing:
        any_adapter = ("model.lora.rank=1", "model.lora.alpha=1", 'model.lora.targets=["any"]')
        c = validate_layers(load_layers(file, [*overrides, *any_adapter]))
        try:
            own = stored_adapter(c, folder_of_run(c).path)
        except StoreError as error:
            raise missing from error
        if own is None:
            raise
        values = settings_as_set(own).items()
        return load_layers(file, [*overrides, *(f"{k}={json.dumps(v)}" for k, v in values)])


def refuse_other_kind(path: Path, model: type[BaseModel]) -> None:
    """Raise `ConfigurationError` if the file configures a simulation where a run is wanted, or the
    other way round; `model` is the class of the wanted settings. Without this check the error would
    list every setting as unknown.
    """
    keys = file_layer(path).values.keys() - {CODE_REVISION}
    if keys <= model.model_fields.keys():
        return
    from rollstream.simulator.experiment import SimulationSettings

    kinds = {
        "a run": (Configuration, "run"),
        "a simulation": (SimulationSettings, "simulate"),
    }
    for kind, (other, command) in kinds.items():
        if other is not model and keys <= other.model_fields.keys():
            raise ConfigurationError(
                f"{path} is the configuration of {kind}; use it with {shell_command(command, path)}"
            )


def _file(arguments: argparse.Namespace) -> Path:
    """Returns the named file, or the `config.json` of a named run folder."""
    path = Path(arguments.configuration)
    return path / "config.json" if path.is_dir() else path
