"""The bounds of a run's trajectories, from its configuration and its starting model. Trainer,
rollouts, replay and audit apply them with the same function.
"""

from pathlib import Path

from rollstream.consumers.trainer.data.prepare import TrainingRule, training_rule
from rollstream.config.settings import Configuration
from rollstream.config.run_folder import model_folder
from rollstream.storage.hf_folder import hf_vocabulary_size
from rollstream.streams.admissible import TrainingBounds


def run_rule(c: Configuration, folder: Path) -> TrainingRule:
    """The rule by which this run's trainer decides which samples of a group it trains."""
    bounds = training_bounds(c, hf_vocabulary_size(model_folder(c, folder)))
    return training_rule(c.trainer, c.dispatch.max_lag, bounds.keep_version, bounds)


def training_bounds(c: Configuration, vocabulary: int | None) -> TrainingBounds:
    """The bounds for a model with this vocabulary size; with None any token id passes."""
    keep_version = c.rollouts.on_update == "keep_version"
    known = TrainingBounds().vocabulary if vocabulary is None else vocabulary
    return TrainingBounds(known, c.rollouts.context_max, keep_version)
