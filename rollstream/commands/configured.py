"""From the arguments of a command to the configuration and the folder of its run."""

import argparse
from pathlib import Path

from rollstream.analysis.place import REPLAYED
from rollstream.config import Configuration, load
from rollstream.folder import RunFolder, folder_of, reach, settle
from streams.errors import ConfigurationError


def configured(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load, check and settle; a started run refuses another configuration, a replay all of them."""
    configuration, folder = loaded(arguments)
    if (folder.path / REPLAYED).exists():
        raise ConfigurationError(f"{folder.path} holds a replay, which no role goes on with")
    if _file(arguments).absolute() != folder.configuration or arguments.overrides:
        accepted = getattr(arguments, "accept_config", False)
        settle(folder, configuration, accepted, lambda: reach(configuration, folder.path))
    return configuration, folder


def loaded(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load and check, and leave nothing in the run's folder."""
    overrides: list[str] = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    if arguments.run is not None:
        overrides.append(f"folder={arguments.run}")
    configuration = load(_file(arguments), overrides)
    return configuration, folder_of(configuration)


def _file(arguments: argparse.Namespace) -> Path:
    """What was named, or of a run's folder its `config.json`."""
    path = Path(arguments.configuration)
    return path / "config.json" if path.is_dir() else path
