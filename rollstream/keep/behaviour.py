"""Computes log-probabilities that trajectories of other programs lack: under the stored version
that emitted them, up to the rounding of another engine; else under the starting model, which only
makes the importance ratio 1 in the first step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.objective_settings import BEHAVIOUR
from rollstream.consumers.objectives.policies.other_policies import FrozenPolicy
from rollstream.consumers.replay.offline_log import SourceTrajectory
from rollstream.consumers.replay.training import BehaviourModel
from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.consumers.trainer.learn.forward import scoring_form
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.past_versions import PublishedVersions
from rollstream.errors import ConfigurationError
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import open_run_store, require_code
from rollstream.run.config.config import load
from rollstream.run.config.run_model import model_is_read
from rollstream.run.roles.train import starting_model
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.retention import listed_versions
from rollstream.streams.records import Trajectory


class RunBehaviour:
    """Computes log-probabilities under the stored versions of the run in `folder`. Raises
    `ConfigurationError` if there is no run, or none that trains a model.
    """

    def __init__(self, folder: str) -> None:
        settings = Path(folder) / "config.json"
        if not settings.is_file():
            raise ConfigurationError(f"run {folder!r} is no run's folder: it has no config.json")
        location = locate_run(folder)
        require_code(location, "trainer")
        self._folder, self._configuration = Path(folder).absolute(), load(settings)
        c = self._configuration
        self._location = location
        self._store: ObjectStore = open_run_store(location)
        self.numbers = {version.number for version in listed_versions(self._store)}
        self._past = PublishedVersions(lambda: (self._store,), c.weights.dtype)
        self._read: tuple[int, Mapping[str, Tensor]] = (-1, {})
        """The version of the last record, and its weights: records of one version read it once."""
        self._policy: FrozenPolicy | None = None

    def fill(self, record: Trajectory, number: int) -> Trajectory:
        """Returns the record, scored alone, with log-probabilities under this version, at its
        temperature.
        """
        c = self._configuration
        if self._read[0] != number:
            self._read = number, self._past.read(number)
        if self._policy is None:
            with model_is_read(self._location):
                model = starting_model(c, self._folder)
            if isinstance(model, PacedModel):
                raise ConfigurationError(f"run {self._folder} trains no model (paced)")
            self._policy = FrozenPolicy(model, BEHAVIOUR, scoring_form(c.trainer), self._past)
        (span,) = record.spans
        scored = self._policy.score_each([sample_of(record, 0.0)], {span.version: self._read[1]})
        return replace(record, logprobs=scored.to("cpu", torch.float32).numpy())


@dataclass(slots=True)
class Behaviours:
    """Fills in log-probabilities; `start` loads the starting model."""

    start: Callable[[], PreTrainedModel]
    _runs: dict[str, RunBehaviour] = field(default_factory=dict[str, RunBehaviour])
    _started: BehaviourModel | None = None

    def check(self, label: str, trajectory: SourceTrajectory) -> None:
        """Raise `ConfigurationError`, which names the source `label`, if the trajectory's version
        is not stored.
        """
        if trajectory.behaviour is None:
            return
        folder, number = trajectory.behaviour
        stored = self._run(folder).numbers
        if number not in stored:
            extent = f"{min(stored)} to {max(stored)}" if stored else "none"
            raise ConfigurationError(
                f"{label}: trajectory {trajectory.record.trajectory} is of version {number} of "
                f"{folder}, which is not stored (stored: {extent}); give its `logprobs`, or leave "
                "out `run` and `version` to use those of the initial model"
            )

    def fill(self, trajectory: SourceTrajectory) -> Trajectory:
        if trajectory.behaviour is not None:
            folder, number = trajectory.behaviour
            return self._run(folder).fill(trajectory.record, number)
        if self._started is None:
            self._started = BehaviourModel(self.start())
        return self._started.fill(trajectory.record)

    def _run(self, folder: str) -> RunBehaviour:
        if folder not in self._runs:
            self._runs[folder] = RunBehaviour(folder)
        return self._runs[folder]
