"""Reads the file of a simulation (`load_simulation`)."""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from rollstream.errors import ConfigurationError
from rollstream.run.config.errors import error_lines
from rollstream.run.config.file_kind import refuse_other_kind
from rollstream.run.config.sources import file_layer, merge_layers, overrides_layer
from rollstream.simulator.experiment import SimulationSettings


def load_simulation(path: Path, overrides: Sequence[str]) -> SimulationSettings:
    """Raises `ConfigurationError` with one line per error, also for the configuration of a run."""
    refuse_other_kind(path, SimulationSettings)
    layers = merge_layers(file_layer(path), overrides_layer(overrides, SimulationSettings))
    try:
        return SimulationSettings.model_validate_json(json.dumps(layers.values), strict=True)
    except ValidationError as error:
        raise ConfigurationError(error_lines(error, layers, SimulationSettings)) from None
