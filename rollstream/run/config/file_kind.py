"""Whether a file configures a run or a simulation (`refuse_other_kind`)."""

from pathlib import Path

from pydantic import BaseModel

from rollstream.errors import ConfigurationError
from rollstream.printable import shell_command
from rollstream.run.config.config import CODE_REVISION
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import file_layer


def refuse_other_kind(path: Path, model: type[BaseModel]) -> None:
    """Raises `ConfigurationError` if the file configures a simulation in place of a run, or the
    reverse; `model` is the expected class of settings.
    """
    # Without this check the error would list every setting as unknown.
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
