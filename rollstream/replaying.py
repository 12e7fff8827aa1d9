"""What a replay is asked to do: which steps, under which settings, on which trajectories."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from consumers.replay.batches import Course
from consumers.replay.recorded import RecordedSteps
from rollstream.bounds import run_rule
from rollstream.config import Configuration, Difference, differences, essentials, load
from rollstream.folder import RunFolder
from rollstream.replay_filter import conditions_of, of_training
from streams.errors import ConfigurationError

CHANGEABLE = (
    "trainer.lr", "trainer.lr_final", "trainer.lr_ramp_steps", "trainer.steps", "trainer.betas",
    "trainer.weight_decay", "trainer.gradient_norm_max", "trainer.advantage", "trainer.loss",
    "trainer.ratio_max", "trainer.clip_low", "trainer.clip_high", "trainer.ratio",
    "trainer.aggregate", "trainer.reward_terms.", "trainer.survivors_min",
    "trainer.filter_equal_rewards", "dispatch.max_lag",
)  # fmt: skip
"""What changes what is learnt from given takes; everything else made them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`changes` and `where` make an experiment of it, from the step after `first` on."""

    folder: RunFolder
    before: Configuration
    now: Configuration
    changes: Sequence[Difference]
    where: Sequence[str]
    first: int
    last: int

    @property
    def is_experiment(self) -> bool:
        return bool(self.changes or self.where)

    def wish(self) -> dict[str, Any]:
        """What must be the same for a replay to go on in the folder of one that was stopped."""
        return {
            "run": str(self.folder.path),
            "from_step": self.first,
            "to_step": self.last,
            "changes": {change.key: [change.before, change.now] for change in self.changes},
            "where": list(self.where),
        }

    def words(self) -> str:
        """What is not as it was."""
        changed = [f"{c.key} {json.dumps(c.before)} → {json.dumps(c.now)}" for c in self.changes]
        return ", ".join([*changed, *(f"only where {text}" for text in self.where)])


def asked_of(
    folder: RunFolder,
    overrides: Sequence[str],
    where: Sequence[str],
    first: int,
    last: int | None,
    recorded: RecordedSteps,
) -> Asked:
    """All that is wrong with the wish is a `ConfigurationError`."""
    before, now = load(folder.configuration), load(folder.configuration, overrides)
    changes = differences(essentials(before), essentials(now))
    for change in changes:
        if not any(
            change.key == name or (name.endswith(".") and change.key.startswith(name))
            for name in CHANGEABLE
        ):
            raise ConfigurationError(
                f"{change.key}: it decided which trajectories there are, a replay cannot change it;"
                f" what can be set: {', '.join(name.rstrip('.') for name in CHANGEABLE)}"
            )
    conditions_of(where)
    done = recorded.last()
    wanted = done if last is None else last
    if not 0 <= first < wanted <= done:
        raise ConfigurationError(
            f"--from-step {first} --to-step {wanted}: the ledger has steps 1 to {done}; "
            "give 0 ≤ from < to ≤ the last"
        )
    return Asked(folder, before, now, changes, where, first, wanted)


def courses(asked: Asked) -> tuple[Course, Course]:
    """The run's own, and the one asked for."""
    conditions = conditions_of(asked.where)
    own, now = _course(asked.before, asked.folder), _course(asked.now, asked.folder)
    kept = Course(now.settings, now.rule, of_training(conditions))
    return own, (kept if conditions else now)


def _course(c: Configuration, folder: RunFolder) -> Course:
    return Course(c.trainer, run_rule(c, folder.path))
