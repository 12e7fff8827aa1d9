"""From the arguments of a command to the configuration and the folder of its run."""

import argparse
from pathlib import Path

from rollstream.config import Configuration, load
from rollstream.folder import RunFolder, folder_of, settle


def configured(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load, check and settle; a started run refuses another configuration."""
    configuration, folder = loaded(arguments)
    if Path(arguments.configuration).absolute() != folder.configuration or arguments.overrides:
        settle(folder, configuration)
    return configuration, folder


def loaded(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load and check, and leave nothing in the run's folder."""
    overrides: list[str] = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    if arguments.run is not None:
        overrides.append(f"folder={arguments.run}")
    configuration = load(Path(arguments.configuration), overrides)
    return configuration, folder_of(configuration)
