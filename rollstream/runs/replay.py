"""A replay: its request (which steps, under which settings, on which trajectories), the filter of
its records, and its run from a checkpoint to the last step.

It trains the run's recorded steps up to the first step of the request, then the requested ones
under the requested settings. The filter's conditions have the syntax of `rollstream tail`;
trajectories also have the `step` that trained them and their `lag` at that step, in steps, by the
oldest span.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from transformers.utils.logging import disable_progress_bar

from rollstream.analysis.fields import (
    FieldCondition,
    derived_values,
    meets,
    oldest_version,
    parse_condition,
    record_values,
)
from rollstream.config.config import SettingChange, essential_settings, load, setting_changes
from rollstream.config.run_folder import RunFolder
from rollstream.config.settings import Configuration
from rollstream.consumers.replay.recorded_steps import RecordedSteps, ReplayCourse
from rollstream.consumers.replay.training import ReplayTrainer
from rollstream.consumers.trainer.learn.base import Learner, open_learner
from rollstream.errors import ConfigurationError
from rollstream.roles.context import run_rule, set_torch_threads
from rollstream.roles.train import starting_model
from rollstream.runs.replay_output import (
    ReplayProgress,
    newest_replay_checkpoint,
    open_replay_output,
    read_own_ledger,
)
from rollstream.storage.archive.segments import LogRecord
from rollstream.storage.checkpoints import newest_checkpoint
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.tensors import local_tensors
from rollstream.streams.bus import Bus, Message
from rollstream.streams.reader import classify_message
from rollstream.streams.records import Fence, StepDone, Trajectory
from rollstream.streams.values import Address

TRAINING_FIELDS = {"step": "number", "lag": "number"}
"""Fields of a trajectory that are known only from the ledger or the step in training."""
TrainedSteps = Mapping[Address, int]


def parse_conditions(where: Sequence[str], topic: str = "trajectories") -> list[FieldCondition]:
    """The parsed conditions. Raises `ConfigurationError` for the first invalid one."""
    more = TRAINING_FIELDS if topic == "trajectories" else {}
    return [parse_condition(text, topic, more) for text in where]


def needs_steps(conditions: Sequence[FieldCondition]) -> bool:
    """Whether the conditions need the ledger, for the step that trained each trajectory."""
    return any(one.path[0] in TRAINING_FIELDS for one in conditions)


def training_filter(conditions: Sequence[FieldCondition]) -> Callable[[Trajectory, int], bool]:
    """A filter for trajectories at training from a version; their time is the time when they
    finished.
    """

    def keep(record: Trajectory, version: int) -> bool:
        values = record_values(record) | derived_values(record, round(record.finished_s * 1000))
        values |= _training_values(record, version + 1)
        return all(one.holds(values) for one in conditions)

    return keep


def message_filter(
    conditions: Mapping[str, Sequence[FieldCondition]], steps: TrainedSteps
) -> Callable[[Message], bool]:
    """A filter for messages of topics with many writers, by the conditions of each topic."""

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
        return meets(record, conditions[message.topic], more)

    return keep


def is_wanted_trajectory(
    conditions: Sequence[FieldCondition], record: Trajectory, timestamp_ms: int, step: int | None
) -> bool:
    """Whether the trajectory meets the conditions; `step` trained it, None if no step did."""
    values = (
        record_values(record)
        | derived_values(record, timestamp_ms)
        | _training_values(record, step)
    )
    return all(one.holds(values) for one in conditions)


def _training_values(record: object, step: int | None) -> dict[str, Any]:
    if not isinstance(record, Trajectory):
        return {}
    oldest = oldest_version(record)
    lag = None if step is None or oldest is None else step - 1 - oldest
    return {"step": step, "lag": lag}


CHANGEABLE_SETTINGS = (
    "trainer.lr", "trainer.lr_final", "trainer.lr_ramp_steps", "trainer.steps", "trainer.betas",
    "trainer.weight_decay", "trainer.gradient_norm_max", "trainer.advantage", "trainer.loss",
    "trainer.ratio_max", "trainer.clip_low", "trainer.clip_high", "trainer.ratio",
    "trainer.aggregate", "trainer.reward_terms.", "trainer.survivors_min",
    "trainer.filter_equal_rewards", "dispatch.max_lag",
)  # fmt: skip
"""Settings that change the learning from given takes; all others decided which takes exist."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """With `changes` or `where` the replay is an experiment, from the step after `first` on."""

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
        """The part of the request that must be equal for a replay to resume in a folder."""
        return {
            "run": str(self.folder.path),
            "from_step": self.first,
            "to_step": self.last,
            "changes": {change.key: [change.before, change.now] for change in self.changes},
            "where": list(self.where),
        }

    def words(self) -> str:
        """The changes as text."""
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
    """The request. Raises `ConfigurationError` if it cannot work."""
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
    """The run's own settings and rule, and the requested ones."""
    conditions = parse_conditions(asked.where)
    own, now = _replay_course(asked.before, asked.folder), _replay_course(asked.now, asked.folder)
    kept = ReplayCourse(now.settings, now.rule, training_filter(conditions))
    return own, (kept if conditions else now)


def _replay_course(c: Configuration, folder: RunFolder) -> ReplayCourse:
    return ReplayCourse(c.trainer, run_rule(c, folder.path))


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """Where training starts: the name of a checkpoint of the run, or None for the model of step 0;
    `behind` is that state, or the progress of an earlier process of this replay.
    """

    checkpoint: str | None
    step: int
    behind: ReplayProgress

    def begun(self) -> dict[str, Any]:
        """The start as recorded in the folder."""
        return {"checkpoint": self.checkpoint, "start": self.step}


def find_replay_start(
    store: ObjectStore,
    asked: ReplayRequest,
    before: Mapping[str, Any] | None,
    own: tuple[RunFolder, Configuration],
) -> tuple[ReplayStart, Learner]:
    """The start and its learner: at the folder's newest checkpoint if a replay was stopped there
    (`before` is its recorded request), else at the run's newest stored checkpoint up to the first
    requested step.
    """
    disable_progress_bar()  # of transformers: it would mix with our output
    set_torch_threads(asked.before.trainer.threads)
    model = starting_model(asked.before, asked.folder.path)
    learner = open_learner(model, asked.before.trainer)
    done = newest_replay_checkpoint(*own) if before is not None else None
    if done is not None and before is not None:
        learner.load_state(done.tensors)
        return ReplayStart(before["checkpoint"], before["start"], done), learner
    found = newest_checkpoint(store, asked.first).checkpoint
    if found is None:
        return ReplayStart(None, 0, ReplayProgress(0, {}, None)), learner
    learner.load_state(found.tensors)
    return ReplayStart(
        str(found.id), found.id.step, ReplayProgress(found.id.step, {}, None)
    ), learner


def run_replay(
    source: Bus,
    recorded: RecordedSteps,
    asked: ReplayRequest,
    start: ReplayStart,
    learner: Learner,
    out: tuple[RunFolder, Configuration],
) -> Iterator[StepDone]:
    """Train the steps and yield each; everything is in the folder when this ends."""
    own, wanted = replay_courses(asked)
    done = start.behind.step
    with open_replay_output(*out, start.behind, learner) as written:
        replay = ReplayTrainer(source, written, time.monotonic)
        first = asked.first if asked.is_experiment else asked.last
        with closing(learner):
            steps = recorded.planned(range(done + 1, first + 1), asked.last)
            yield from replay.train(learner, own, steps)
            state = learner.state()
        if asked.is_experiment:
            with closing(_changed_learner(asked)) as changed:
                changed.load_state(local_tensors(state))
                steps = recorded.planned(range(max(done, first) + 1, asked.last + 1), asked.last)
                yield from replay.train(changed, wanted, steps)


def differing_steps(
    out: tuple[RunFolder, Configuration], recorded: RecordedSteps, first: int, last: int
) -> list[int]:
    """The steps from `first` to `last` whose hash in the folder's ledger matches none of the run's
    hashes.
    """
    again = read_own_ledger(*out)  # a step may have been trained twice in the folder
    return [step for step in range(first, last + 1) if not recorded.has_state(again.done[step][-1])]


def _changed_learner(asked: ReplayRequest) -> Learner:
    model = starting_model(asked.before, asked.folder.path)
    return open_learner(model, asked.now.trainer)
