"""What a replay is asked to do: which steps, under which settings, into which folder. Nothing of
the run is written.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consumers.replay.batches import Course
from consumers.replay.recorded import RecordedSteps
from consumers.trainer.prepare import rule_of
from rollstream.analysis.fields import condition, values_of
from rollstream.analysis.place import REPLAYED
from rollstream.config import Configuration, Difference, differences, essentials, load
from rollstream.folder import RunFolder, model_folder, settle
from streams.errors import ConfigurationError
from streams.records import Trajectory

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
    for text in where:
        condition(text, "trajectories")
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
    conditions = [condition(text, "trajectories") for text in asked.where]

    def keep(record: Trajectory) -> bool:
        values = values_of(record)
        return all(one.holds(values) for one in conditions)

    own, now = _course(asked.before), _course(asked.now)
    return own, (Course(now.settings, now.rule, keep) if conditions else now)


def _course(c: Configuration) -> Course:
    keep_version = c.rollouts.on_update == "keep_version"
    return Course(c.trainer, rule_of(c.trainer, c.dispatch.max_lag, keep_version))


def check_folder(path: Path, run: RunFolder) -> None:
    """The replay's folder must be new or empty, and none of the run's."""
    folder = RunFolder(path.absolute())
    if folder.path.is_relative_to(run.path):
        raise ConfigurationError(f"--out {folder.path} lies in the run's own folder")
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise ConfigurationError(
            f"{folder.path} is not empty; give a new folder with --out (one that a stopped replay "
            "left may be deleted: a replay starts anew)"
        )


def make_folder(asked: Asked, path: Path) -> tuple[RunFolder, Configuration]:
    """The replay's own folder with its configuration."""
    folder, c = RunFolder(path.absolute()), asked.now
    model = model_folder(asked.before, asked.folder.path).absolute()
    changed: dict[str, Any] = {
        "folder": str(folder.path), "bus": "sqlite:bus", "store": "file:store", "truncate": False,
        "model": c.model.model_copy(update={"path": str(model)}),
        "archive": c.archive.model_copy(update={"enabled": False}),
    }  # fmt: skip
    configuration = c.model_copy(update=changed)
    settle(folder, configuration)
    return folder, configuration


def note(folder: RunFolder, asked: Asked, **more: Any) -> None:
    """Say in the folder what it is."""
    line = {
        "run": str(asked.folder.path),
        "from_step": asked.first,
        "to_step": asked.last,
        "changes": {change.key: [change.before, change.now] for change in asked.changes},
        "where": list(asked.where),
        **more,
    }
    (folder.path / REPLAYED).write_text(json.dumps(line, indent=2) + "\n", encoding="utf-8")
