"""The profile of a run's engine and model: its location, and how it is measured.

A profile belongs to a machine, an engine and a shape of model, not to weights: an untrained model
gives the same profile.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.config.run_folder import model_folder
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError
from rollstream.producers.engines.base import EngineOptions
from rollstream.producers.engines.profile import (
    EngineProfile,
    model_key,
    profile_path,
    read_profile,
)
from rollstream.streams.values import Version

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from rollstream.producers.engines.profile import StepTiming


def run_profile(
    configuration: Configuration, folder: Path, model: "PreTrainedConfig"
) -> EngineProfile | None:
    """The configured profile, else the run's own; None if there is none.

    Raises `ConfigurationError` if the configured one is of another engine or model.
    """
    engine, key = configuration.rollouts.engine, model_key(model)
    named = configuration.rollouts.profile
    path = profile_path(folder, engine, key) if named is None else Path(named)
    if named is None and not path.exists():
        return None
    profile = read_profile(path)
    if (profile.engine, profile.model) != (engine, key):
        raise ConfigurationError(
            f"{path} is a profile of engine {profile.engine} and model {profile.model}, the run "
            f"has {engine} and {key}; make its own with `rollstream profile CONFIG`"
        )
    return profile


def measure_profile(
    configuration: Configuration, folder: Path, tell: Callable[["StepTiming"], None]
) -> EngineProfile:
    """Measure the run's engine on its model; `tell` is called with each measured step time."""
    from rollstream.producers.engines.factory import open_engine
    from rollstream.producers.engines.profile import (
        CONTEXT_MIN,
        TimedEngine,
        fit_profile,
        measure_points,
    )
    from rollstream.roles.context import set_torch_threads

    c = configuration
    if c.rollouts.engine == "paced":
        raise ConfigurationError(
            "rollouts.engine: 'paced' has nothing to measure, its step times are computed "
            "(paced.roofline); profile a configuration with a real engine"
        )
    if c.rollouts.context_max < CONTEXT_MIN:
        raise ConfigurationError(
            f"rollouts.context_max must be ≥ {CONTEXT_MIN} to be profiled, "
            f"got {c.rollouts.context_max}"
        )
    set_torch_threads(c.rollouts.threads)
    model = _load_or_build_model(c, folder)
    slots, context = c.rollouts.slots, c.rollouts.context_max
    weights = model.state_dict()
    engine = open_engine(
        c.rollouts.engine,
        model.config,
        weights,
        Version(0, 0),
        EngineOptions(slots=slots, context_max=context),
    )
    timing = TimedEngine(engine, slots, context, int(model.config.vocab_size))
    points: list[StepTiming] = []
    for point in measure_points(timing):
        points.append(point)
        tell(point)
    profile = fit_profile(c.rollouts.engine, model_key(model.config), slots, context, points)
    return replace(profile, device="cpu")


def _load_or_build_model(configuration: Configuration, folder: Path) -> "PreTrainedModel":
    """The run's own model, or an untrained one of its shape before the warm-up."""
    from rollstream.producers.tasks.registry import load_task
    from rollstream.roles.context import prompt_tokens_max
    from rollstream.storage.models import load_model
    from rollstream.warmup.warmup import untrained_model

    path = model_folder(configuration, folder)
    if path.exists():
        return load_model(str(path))
    task = load_task(configuration.task, prompt_tokens_max(configuration))
    return untrained_model(configuration.model, task, configuration.seed)
