"""Reads a recorded run and the profile of its engine for `rollstream tune`. Nothing is written."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_loose_json
from rollstream.look.query.locate import RunLocation, locate_run
from rollstream.look.query.looking import open_run_view
from rollstream.plan.tuning.measured import MeasuredTopics, RunMeasurements, measure
from rollstream.producers.engines.profile import read_profile
from rollstream.producers.engines.roofline import Roofline
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.run_model import local_model_folder
from rollstream.run.config.settings import Configuration
from rollstream.storage.model_folder.hf_folder import CONFIG

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedConfig

# The index has the others.
TOPICS = ("prompts", "weights", "status")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """An archive alone has no folder and no configuration."""

    measured: RunMeasurements
    folder: Path | None
    configuration: Configuration | None


def read_run(argument: str) -> RecordedRun:
    """`argument` is a path or URL of a run or archive. Missing topics leave their measurements
    unknown. Raises `ConfigurationError` if neither is there.
    """
    from rollstream.look.index.index_reader import IndexReader  # imports DuckDB
    from rollstream.look.index.run_index import RunIndex

    location = locate_run(argument)
    configuration = _configuration(location)
    topics = MeasuredTopics()
    with open_run_view(location) as view, RunIndex() as index:
        IndexReader(view, index, with_tokens=True).refresh()
        for topic in TOPICS:
            if view.has(topic):
                for message in view.topic(topic, skip_damaged=True).records():
                    if message.record is not None:
                        topics.apply(message.record)
        threads = 1 if configuration is None else configuration.trainer_threads
        return RecordedRun(measure(index, topics, threads), location.folder, configuration)


def _configuration(location: RunLocation) -> Configuration | None:
    if location.folder is None or not (location.folder / "config.json").is_file():
        return None
    return load_for_viewing(location.folder / "config.json")


def read_engine(c: Configuration, folders: list[Path]) -> Roofline | None:
    """The profile in `rollouts.profile`, else of the first of these run folders that has one for
    this engine and model. Raises `ConfigurationError` for a profile of another engine or model.
    """
    if not c.has_model:
        return None  # its roofline is in the configuration
    from rollstream.run.roles.rollout import run_profile

    for folder in folders:
        model = _read_model(local_model_folder(c, folder), folder if c.model.path is None else None)
        stored_profile = None if model is None else run_profile(c, folder, model)
        if stored_profile is not None:
            return stored_profile.roofline
    if c.rollouts.profile is None:
        return None
    profile = read_profile(c.rollouts.profile)  # no model to compare it with
    if profile.engine != c.rollouts.engine:
        raise ConfigurationError(
            f"rollouts.profile: {c.rollouts.profile} is of engine {profile.engine}, the "
            f"configuration has {c.rollouts.engine}; make its own with `rollstream profile CONFIG`"
        )
    return profile.roofline


def _read_model(model: Path, run: Path | None) -> "PreTrainedConfig | None":
    # `run` is the run's folder around the model, None for the user's own.
    files = ContainedFolder(model if run is None else run)
    if not files.has_file(model / CONFIG):
        return None
    from rollstream.storage.model_folder.model_fit import read_model_config

    try:
        parse_loose_json(files.read(model / CONFIG))  # of any depth, before the library reads it
        return read_model_config(model)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{model / CONFIG} is no model's: {error}") from None


def folders_of(configured: RunFolder, run: RecordedRun | None) -> list[Path]:
    """Returns folders of profiles: the configuration's run, then RUN."""
    folders = [configured.path]
    return folders if run is None or run.folder is None else [*folders, run.folder]
