"""What a replay is asked to do: which steps, under which settings, on which trajectories."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.consumers.replay.batches import ReplayCourse
from rollstream.consumers.replay.recorded_steps import RecordedSteps
from rollstream.roles.bounds import run_rule
from rollstream.config.settings import Configuration
from rollstream.config.config import SettingChange, setting_changes, essential_settings, load
from rollstream.config.run_folder import RunFolder
from rollstream.runs.replay_filter import parse_conditions, training_filter
from rollstream.errors import ConfigurationError

CHANGEABLE_SETTINGS = (
    "trainer.lr", "trainer.lr_final", "trainer.lr_ramp_steps", "trainer.steps", "trainer.betas",
    "trainer.weight_decay", "trainer.gradient_norm_max", "trainer.advantage", "trainer.loss",
    "trainer.ratio_max", "trainer.clip_low", "trainer.clip_high", "trainer.ratio",
    "trainer.aggregate", "trainer.reward_terms.", "trainer.survivors_min",
    "trainer.filter_equal_rewards", "dispatch.max_lag",
)  # fmt: skip
"""What changes what is learnt from given takes; everything else made them."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """`changes` and `where` make an experiment of it, from the step after `first` on."""

    folder: RunFolder
    before: Configuration
    now: Configuration
    changes: Sequence[SettingChange]
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


def replay_request(
    folder: RunFolder,
    overrides: Sequence[str],
    where: Sequence[str],
    first: int,
    last: int | None,
    recorded: RecordedSteps,
) -> ReplayRequest:
    """All that is wrong with the wish is a `ConfigurationError`."""
    before, now = load(folder.configuration), load(folder.configuration, overrides)
    changes = setting_changes(essential_settings(before), essential_settings(now))
    for change in changes:
        if not any(
            change.key == name or (name.endswith(".") and change.key.startswith(name))
            for name in CHANGEABLE_SETTINGS
        ):
            raise ConfigurationError(
                f"{change.key}: it decided which trajectories there are, a replay cannot change it;"
                f" what can be set: {', '.join(name.rstrip('.') for name in CHANGEABLE_SETTINGS)}"
            )
    parse_conditions(where)
    done = recorded.last()
    wanted = done if last is None else last
    if not 0 <= first < wanted <= done:
        raise ConfigurationError(
            f"--from-step {first} --to-step {wanted}: the ledger has steps 1 to {done}; "
            "give 0 ≤ from < to ≤ the last"
        )
    return ReplayRequest(folder, before, now, changes, where, first, wanted)


def replay_courses(asked: ReplayRequest) -> tuple[ReplayCourse, ReplayCourse]:
    """The run's own, and the one asked for."""
    conditions = parse_conditions(asked.where)
    own, now = _replay_course(asked.before, asked.folder), _replay_course(asked.now, asked.folder)
    kept = ReplayCourse(now.settings, now.rule, training_filter(conditions))
    return own, (kept if conditions else now)


def _replay_course(c: Configuration, folder: RunFolder) -> ReplayCourse:
    return ReplayCourse(c.trainer, run_rule(c, folder.path))
