"""Loads the configuration that a command's arguments name, and finds the folder of its run.

Commands that run something (a run, a role, the warm-up) use `load_and_settle`, which also settles
the run's folder: it writes `config.json` there, or refuses a configuration that differs from that
of the run. Commands that leave `config.json` as it is use `load_configuration`.
"""

import argparse
from pathlib import Path

from pydantic import BaseModel

from rollstream.analysis.locate import REPLAY_FILE
from rollstream.config.config import CODE_REVISION, load
from rollstream.config.run_folder import RunFolder, folder_of_run, reach, write_configuration
from rollstream.config.run_model import has_model, has_versions, missing_model
from rollstream.config.settings import Configuration
from rollstream.config.sources import file_layer
from rollstream.errors import ConfigurationError


def load_and_settle(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load and validate the configuration, and write it into the run's folder as `config.json`,
    unless it is that file and neither `--set` nor `--seed` changes it.

    Raises `ConfigurationError` if the folder belongs to a replay, or if it has a run with other
    settings and these must not change: some may always, some with `--accept-config`, some never.
    """
    configuration, folder = load_configuration(arguments)
    if (folder.path / REPLAY_FILE).exists():
        raise ConfigurationError(f"{folder.path} holds a replay, which no role can resume")
    changed = arguments.overrides or arguments.seed is not None
    if _file(arguments).absolute() != folder.configuration or changed:
        accepted = getattr(arguments, "accept_config", False)
        is_run = arguments.command == "run"
        write_configuration(
            folder, configuration, accepted, lambda: _reach(configuration, folder.path, is_run)
        )
    return configuration, folder


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
    overrides: list[str] = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    if arguments.run is not None:
        overrides.append(f"folder={arguments.run}")
    refuse_other_kind(_file(arguments), Configuration)
    configuration = load(_file(arguments), overrides)
    return configuration, folder_of_run(configuration)


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
                f"{path} is the configuration of {kind}; use it with rollstream {command} {path}"
            )


def _file(arguments: argparse.Namespace) -> Path:
    """Returns the named file, or the `config.json` of a named run folder."""
    path = Path(arguments.configuration)
    return path / "config.json" if path.is_dir() else path
