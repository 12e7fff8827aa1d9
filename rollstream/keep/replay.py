"""Replays recorded steps into a folder of its own: all of them, whose state hashes should equal the
ledger's, or as an experiment those after `first`, with other settings (`CHANGEABLE_SETTINGS`) or
selected trajectories.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.credit import scored_reference
from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.consumers.replay.recorded_steps import RecordedSteps, ReplayCourse
from rollstream.consumers.replay.training import ReplayTrainer
from rollstream.consumers.trainer.learn.base import Learner, open_learner
from rollstream.consumers.trainer.past_versions import PublishedVersions
from rollstream.errors import ConfigurationError
from rollstream.keep.replay_output import (
    ReplayProgress,
    newest_replay_checkpoint,
    open_replay_output,
    read_own_ledger,
)
from rollstream.look.query import fields
from rollstream.run.config.config import SettingChange, essential_settings, load, setting_changes
from rollstream.run.config.run_folder import RunFolder, store_url
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import run_rule, set_torch_threads
from rollstream.run.roles.train import starting_model
from rollstream.storage.archive.segments import LogRecord
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.checkpoints import newest_checkpoint
from rollstream.storage.weights.tensors import local_tensors
from rollstream.streams.bus import Bus, Message
from rollstream.streams.classified import classify_message
from rollstream.streams.records import Fence, StepDone, Trajectory
from rollstream.streams.values import Address

TRAINING_FIELDS = {"step": "number", "lag": "number"}
"""Fields of conditions that a trajectory's record lacks: the step that trained it, and its lag at
that step by its oldest span.
"""
TrainedSteps = Mapping[Address, int]
"""Address of a trajectory → the step that trained it."""


def parse_conditions(
    where: Sequence[str], topic: str = "trajectories"
) -> list[fields.FieldCondition]:
    """Parse conditions in the syntax of `rollstream tail`. Raises `ConfigurationError` for an
    invalid one.
    """
    more = TRAINING_FIELDS if topic == "trajectories" else {}
    return [fields.parse_condition(text, topic, more) for text in where]


def needs_steps(conditions: Sequence[fields.FieldCondition]) -> bool:
    return any(condition.path[0] in TRAINING_FIELDS for condition in conditions)


def training_filter(
    conditions: Sequence[fields.FieldCondition],
) -> Callable[[Trajectory, int], bool]:
    """Returns the filter `keep(trajectory, version)` of the step trained from this version."""

    def keep(record: Trajectory, version: int) -> bool:
        # The append time is not at hand: the time when the trajectory finished stands for it.
        values = fields.record_values(record) | fields.derived_values(
            record, round(record.finished_s * 1000)
        )
        values |= _training_values(record, version + 1)
        return all(condition.holds(values) for condition in conditions)

    return keep


def message_filter(
    conditions: Mapping[str, Sequence[fields.FieldCondition]], steps: TrainedSteps
) -> Callable[[Message], bool]:
    """Returns a filter of messages by the conditions of their topic."""

    def keep(message: Message) -> bool:
        _, judged = classify_message(
            message.value or b"", Fence(), topic=message.topic, fenced=False, compacted=False
        )
        at = Address(message.partition, message.offset)
        key = message.key.decode(errors="replace")
        record = LogRecord(
            message.topic, at, message.timestamp_ms, key, judged.record, reason=judged.reason
        )
        more = _training_values(judged.record, steps.get(at))
        return fields.meets(record, conditions[message.topic], more)

    return keep


def is_wanted_trajectory(
    conditions: Sequence[fields.FieldCondition],
    record: Trajectory,
    timestamp_ms: int,
    step: int | None,
) -> bool:
    """Returns whether the trajectory meets the conditions. `timestamp_ms` is its append time,
    `step` the step that trained it, or None.
    """
    values = (
        fields.record_values(record)
        | fields.derived_values(record, timestamp_ms)
        | _training_values(record, step)
    )
    return all(condition.holds(values) for condition in conditions)


def _training_values(record: object, step: int | None) -> dict[str, Any]:
    if not isinstance(record, Trajectory):
        return {}
    oldest = fields.oldest_version(record)
    lag = None if step is None or oldest is None else max(0, step - 1 - oldest)
    return {"step": step, "lag": lag}


# These decide the result of learning from given takes; the others decided which trajectories and
# takes exist.
CHANGEABLE_SETTINGS = (
    "trainer.lr", "trainer.lr_final", "trainer.lr_ramp_steps", "trainer.steps", "trainer.betas",
    "trainer.weight_decay", "trainer.gradient_norm_max", "trainer.reward_terms.",
    "trainer.survivors_min", "trainer.filter_equal_rewards", "dispatch.max_lag",
    *(f"trainer.{name}" for name in ObjectiveSettings.model_fields),
)  # fmt: skip
"""Essential settings that a replay may change; a name that ends in a dot stands for all below it.
"""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A replay of the run's steps after `first` up to `last`, with the settings `now` in place of
    `before` (`changes` are the differences) and conditions `where` on trajectories. With changes or
    conditions it is an experiment: its results may differ from the run's.
    """

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

    def identity(self) -> dict[str, Any]:
        """Returns the request as JSON values; only an equal one resumes a stopped replay."""
        return {
            "run": str(self.folder.path),
            "from_step": self.first,
            "to_step": self.last,
            "changes": {change.key: [change.before, change.now] for change in self.changes},
            "where": list(self.where),
        }

    def words(self) -> str:
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
    """Make a request from the options of a command: `overrides` are its `--set`, `where` its
    `--where`; `last` None is the last recorded step. Raises `ConfigurationError` for a setting that
    a replay cannot change, an invalid condition, or steps that the ledger lacks.
    """
    before, now = load(folder.configuration), load(folder.configuration, overrides)
    changes = setting_changes(essential_settings(before), essential_settings(now))
    for change in changes:
        if not any(
            change.key == name or (name.endswith(".") and change.key.startswith(name))
            for name in CHANGEABLE_SETTINGS
        ):
            raise ConfigurationError(
                f"{change.key}: it decided which trajectories exist, a replay cannot change it;"
                f" what can be set: {', '.join(name.rstrip('.') for name in CHANGEABLE_SETTINGS)}"
            )
    recorded_for, wanted_for = (scored_reference(c.trainer) for c in (before, now))
    if wanted_for not in ("", recorded_for):
        raise ConfigurationError(
            f"trainer.reference = {wanted_for!r} by scorers: the run's annotations are of "
            f"{recorded_for or 'no reference'!r}; compute another one here with "
            "--set trainer.reference_by=trainer"
        )
    parse_conditions(where)
    done = recorded.last()
    last_step = done if last is None else last
    if not 0 <= first < last_step <= done:
        raise ConfigurationError(
            f"--from-step {first} --to-step {last_step}: the ledger has steps 1 to {done}; "
            "give 0 ≤ from < to ≤ the last"
        )
    return ReplayRequest(folder, before, now, changes, where, first, last_step)


def replay_courses(request: ReplayRequest) -> tuple[ReplayCourse, ReplayCourse]:
    """Returns the run's own course (settings, rule and filter of steps) and the requested one."""
    conditions = parse_conditions(request.where)
    own_course, now = (
        _replay_course(request.before, request.folder),
        _replay_course(request.now, request.folder),
    )
    filtered_course = ReplayCourse(now.settings, now.rule, training_filter(conditions))
    return own_course, (filtered_course if conditions else now)


def _replay_course(c: Configuration, folder: RunFolder) -> ReplayCourse:
    return ReplayCourse(c.trainer, run_rule(c, folder.path))


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """The start of a replay: the run's checkpoint with the id `checkpoint`, of `step`, or the model
    of step 0 (None). `behind` is the progress from which this process continues.
    """

    checkpoint: str | None
    step: int
    behind: ReplayProgress
    past: PublishedVersions

    def begun(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "start": self.step}


def find_replay_start(
    store: ObjectStore,
    request: ReplayRequest,
    before: Mapping[str, Any] | None,
    out: tuple[RunFolder, Configuration],
) -> tuple[ReplayStart, Learner]:
    """Returns the start, and a learner in the state of `behind`: the newest checkpoint of a stopped
    replay in the folder `out` (`before` is its `replay.json`, None for a new folder), else the
    newest in the run's `store` up to step `first`.
    """
    disable_progress_bar()  # of transformers: it would mix with the command's output
    set_torch_threads(request.before.trainer.threads)
    model = starting_model(request.before, request.folder.path)
    past = replayed_versions(store, *out)
    learner = open_learner(model, request.before.trainer, past)
    done = newest_replay_checkpoint(*out) if before is not None else None
    if done is not None and before is not None:
        learner.load_state(done.tensors)
        return ReplayStart(before["checkpoint"], before["start"], done, past), learner
    checkpoint = newest_checkpoint(store, request.first).checkpoint
    if checkpoint is None:
        return ReplayStart(None, 0, ReplayProgress(0, {}, None), past), learner
    learner.load_state(checkpoint.tensors)
    progress = ReplayProgress(checkpoint.id.step, {}, None)
    return ReplayStart(str(checkpoint.id), checkpoint.id.step, progress, past), learner


def replayed_versions(store: ObjectStore, folder: RunFolder, c: Configuration) -> PublishedVersions:
    """Returns the versions for a replay's learner: those that the replay has published in `folder`,
    and those of the run in `store`.
    """

    def stores() -> tuple[ObjectStore, ...]:
        return open_store(store_url(c, folder.path), c.sync), store

    return PublishedVersions(stores, c.weights.dtype)


def run_replay(
    source: Bus,
    recorded: RecordedSteps,
    request: ReplayRequest,
    start: ReplayStart,
    learner: Learner,
    out: tuple[RunFolder, Configuration],
) -> Iterator[StepDone]:
    """Train the steps after `start.behind` and yield each; when the iteration ends, everything is
    written to the folder `out`.
    """
    own_course, requested_course = replay_courses(request)
    done = start.behind.step
    with open_replay_output(*out, start.behind, learner) as written:
        replay = ReplayTrainer(source, written, time.monotonic)
        first = request.first if request.is_experiment else request.last
        with closing(learner):
            steps = recorded.planned(range(done + 1, first + 1), request.last)
            yield from replay.train(learner, own_course, steps)
            state = learner.state()
        if request.is_experiment:
            # A second learner with the new settings takes over the state after step `first`.
            with closing(_changed_learner(request, start.past)) as changed:
                changed.load_state(local_tensors(state))
                steps = recorded.planned(
                    range(max(done, first) + 1, request.last + 1), request.last
                )
                yield from replay.train(changed, requested_course, steps)


def differing_steps(
    out: tuple[RunFolder, Configuration], recorded: RecordedSteps, first: int, last: int
) -> list[int]:
    """Returns the steps whose state hash in the replay's ledger differs from every recorded one."""
    ledger = read_own_ledger(*out)  # it may hold a step twice, after a resume: the last one counts
    return [
        step for step in range(first, last + 1) if not recorded.has_state(ledger.done[step][-1])
    ]


def _changed_learner(request: ReplayRequest, past: PublishedVersions) -> Learner:
    model = starting_model(request.before, request.folder.path)
    return open_learner(model, request.now.trainer, past)
