"""Reads what `rollstream tune` needs of a recorded run: its log and archive (`read_run`) and the
profile of its engine (`read_engine`). Nothing is written.
"""

from dataclasses import dataclass
from pathlib import Path

from rollstream.analysis.locate import RunLocation, locate_run, open_run_view
from rollstream.config.config import load_for_viewing
from rollstream.config.run_folder import RunFolder
from rollstream.config.run_model import local_model_folder
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError
from rollstream.producers.engines.profile import read_profile
from rollstream.producers.engines.roofline import Roofline
from rollstream.tuning.measured import RunLogFold, RunMeasurements

TOPICS = ("prompts", "trajectories", "ledger", "weights", "applied", "status")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run: what its log shows, and its folder and configuration, which an archive alone
    does not have.
    """

    measured: RunMeasurements
    folder: Path | None
    configuration: Configuration | None


def read_run(named: str) -> RecordedRun:
    """Reads the run or archive that `named` names (a path or URL). Topics that are missing, as most
    are in an archive, leave their measurements unknown. Raises `ConfigurationError` if neither a
    run nor an archive is there.
    """
    location = locate_run(named)
    configuration = _configuration(location)
    fold = RunLogFold(1 if configuration is None else configuration.trainer.busy_threads)
    with open_run_view(location) as view:
        for topic in TOPICS:
            if view.has(topic):
                for message in view.topic(topic, skip_damaged=True).records():
                    if message.record is not None:
                        fold.apply(message.record)
    return RecordedRun(fold.measured(), location.folder, configuration)


def _configuration(location: RunLocation) -> Configuration | None:
    if location.folder is None or not (location.folder / "config.json").is_file():
        return None
    return load_for_viewing(location.folder / "config.json")


def read_engine(c: Configuration, folders: list[Path]) -> Roofline | None:
    """Returns the roofline of the profile that `rollouts.profile` names, else of the first of these
    folders of runs that has one for this engine and model; None if there is none. Raises
    `ConfigurationError` for a profile of another engine or model.
    """
    if c.rollouts.engine == "paced":
        return None  # its roofline is in the configuration
    from rollstream.roles.rollout import run_profile
    from rollstream.storage.models import read_model_config

    for folder in folders:
        model = local_model_folder(c, folder)
        if (model / "config.json").is_file():
            found = run_profile(c, folder, read_model_config(model))
            if found is not None:
                return found.roofline
    if c.rollouts.profile is None:
        return None
    profile = read_profile(c.rollouts.profile)  # no model to compare it with
    if profile.engine != c.rollouts.engine:
        raise ConfigurationError(
            f"rollouts.profile: {c.rollouts.profile} is of engine {profile.engine}, the "
            f"configuration has {c.rollouts.engine}; make its own with `rollstream profile CONFIG`"
        )
    return profile.roofline


def folders_of(configured: RunFolder, run: RecordedRun | None) -> list[Path]:
    """Returns the folders in which a profile may be: the configuration's run, then RUN."""
    found = [configured.path]
    return found if run is None or run.folder is None else [*found, run.folder]
