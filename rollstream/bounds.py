"""What a run's trajectories may be at most, as its configuration and its starting model say: the
bounds of the one rule that trainer, rollouts, replay and audit call (`streams/admissible.py`).
"""

from pathlib import Path

from consumers.trainer.prepare import Rule, rule_of
from rollstream.config import Configuration
from rollstream.folder import model_folder
from storage.checkpoint_folder import vocabulary_in
from streams.admissible import TrainingBounds


def run_rule(c: Configuration, folder: Path) -> Rule:
    """The rule by which this run's trainer decides what of a group it trains."""
    bounds = bounds_of(c, vocabulary_in(model_folder(c, folder)))
    return rule_of(c.trainer, c.dispatch.max_lag, bounds.keep_version, bounds)


def bounds_of(c: Configuration, vocabulary: int | None) -> TrainingBounds:
    """Of a run whose model knows so many tokens; None: nobody knows, so any token passes."""
    keep_version = c.rollouts.on_update == "keep_version"
    known = TrainingBounds().vocabulary if vocabulary is None else vocabulary
    return TrainingBounds(known, c.rollouts.context_max, keep_version)
