"""Computes log-probabilities that trajectories of other programs lack: under the stored version
that emitted them, up to the rounding of another engine; else under the starting model, which only
makes the importance ratio 1 in the first step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from rollstream.consumers.trainer.data.sample import sample_of
from rollstream.consumers.trainer.learn.forward import policy_scorer
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.learn.row_layout import token_rows
from rollstream.errors import ConfigurationError
from rollstream.keep.replay.gathering import SourceTrajectory
from rollstream.keep.replay.token_scores import VersionScorer
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import open_run_store, require_code
from rollstream.run.config.config import load
from rollstream.run.config.run_model import model_is_read
from rollstream.run.roles.train import starting_model
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.retention import listed_versions
from rollstream.streams.records import Trajectory


class BehaviourModel:
    """Fills in log-probabilities that the sampler did not record, by the starting model: the
    importance ratio is then 1 in the first step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._policy = policy_scorer(model.eval())

    def fill(self, record: Trajectory) -> Trajectory:
        """Returns the record with log-probabilities of its tokens at its temperature."""
        with torch.no_grad():
            # Alone, so that its bits do not depend on other records.
            scores = self._policy(token_rows([sample_of(record, 0.0)]))
        return replace(record, logprobs=scores.logprobs.numpy().astype(np.float32))


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
        self._folder, self._location = Path(folder).absolute(), location
        self._configuration = load(settings)
        self._store: ObjectStore = open_run_store(location)
        self._versions = listed_versions(self._store)
        self.numbers = {version.number for version in self._versions}
        self._scorer: VersionScorer | None = None

    def fill(self, record: Trajectory, number: int) -> Trajectory:
        """Returns the record, scored alone, with log-probabilities under this version, at its
        temperature. Raises `ConfigurationError` if the version is not stored whole.
        """
        scorer = self._scorer = self._scorer or self._open_scorer()
        (span,) = record.spans
        # Of several terms the highest published the believed version, unless it died before.
        for version in sorted((v for v in self._versions if v.number == number), reverse=True):
            own_span = replace(span, version=version)
            ((logprobs, _),) = scorer.score([replace(record, spans=(own_span,))])
            if version not in scorer.missing:
                return replace(record, logprobs=logprobs)
        raise ConfigurationError(f"version {number} of {self._folder} is not stored whole")

    def _open_scorer(self) -> VersionScorer:
        with model_is_read(self._location):
            model = starting_model(self._configuration, self._folder)
        if isinstance(model, PacedModel):
            raise ConfigurationError(f"run {self._folder} trains no model (paced)")
        return VersionScorer(self._store, model, self._configuration.trainer)


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
