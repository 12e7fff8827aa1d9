"""Replays recorded steps of a run: checks the request (the steps, settings and trajectories), finds
the checkpoint to start with, and trains to the last requested step.

A replay trains the run's recorded steps up to the first step of the request as the run did, then
the requested steps under the requested settings. The conditions on trajectories have the syntax of
`rollstream tail`; here a trajectory also has the `step` that trained it and its `lag` at that step,
in steps, by its oldest span.
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
TrainedSteps = Mapping[Address, int]  # the step that trained the trajectory at an address


def parse_conditions(where: Sequence[str], topic: str = "trajectories") -> list[FieldCondition]:
    """Parse conditions on the topic's records. Raises `ConfigurationError` for the first invalid
    one.
    """
    more = TRAINING_FIELDS if topic == "trajectories" else {}
    return [parse_condition(text, topic, more) for text in where]


def needs_steps(conditions: Sequence[FieldCondition]) -> bool:
    """Returns whether the conditions need the ledger, for the step that trained a trajectory."""
    return any(condition.path[0] in TRAINING_FIELDS for condition in conditions)


def training_filter(conditions: Sequence[FieldCondition]) -> Callable[[Trajectory, int], bool]:
    """Returns a filter of trajectories that are about to be trained from a version; its second
    argument is that version's number. A trajectory's time is the time when it finished.
    """

    def keep(record: Trajectory, version: int) -> bool:
        values = record_values(record) | derived_values(record, round(record.finished_s * 1000))
        values |= _training_values(record, version + 1)
        return all(condition.holds(values) for condition in conditions)

    return keep


def message_filter(
    conditions: Mapping[str, Sequence[FieldCondition]], steps: TrainedSteps
) -> Callable[[Message], bool]:
    """Returns a filter for messages of topics with many writers, by the conditions of each
    topic.
    """

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
    """Returns whether the trajectory meets the conditions; `step` trained it, None if no step
    did.
    """
    values = (
        record_values(record)
        | derived_values(record, timestamp_ms)
        | _training_values(record, step)
    )
    return all(condition.holds(values) for condition in conditions)


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
"""Settings that change the learning from given takes; all other settings decided which takes
exist. A name that ends in a dot stands for all settings below it.
"""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Asks for a replay of the steps after `first` up to `last` of the run in `folder`, whose
    settings were `before` and are `now` in the replay. With `changes` of settings or conditions
    `where` on trajectories the replay is an experiment: its results may differ from the run's.
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
        """Returns the part of the request that must be equal for a replay to resume in a folder."""
        return {
            "run": str(self.folder.path),
            "from_step": self.first,
            "to_step": self.last,
            "changes": {change.key: [change.before, change.now] for change in self.changes},
            "where": list(self.where),
        }

    def words(self) -> str:
        """Describes the changes and conditions as text."""
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
    """Make a request from a command's options; `last` None is the last `recorded` step. Raises
    `ConfigurationError` if it cannot work.
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
    """Returns the run's own course (settings and training rule), and the requested one."""
    conditions = parse_conditions(asked.where)
    own, now = _replay_course(asked.before, asked.folder), _replay_course(asked.now, asked.folder)
    kept = ReplayCourse(now.settings, now.rule, training_filter(conditions))
    return own, (kept if conditions else now)


def _replay_course(c: Configuration, folder: RunFolder) -> ReplayCourse:
    return ReplayCourse(c.trainer, run_rule(c, folder.path))


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """States where training starts: at the `checkpoint` of the run with that id, or with the model
    of step 0 if it is None. `behind` is the progress at that start, or that of an earlier process
    of this replay.
    """

    checkpoint: str | None
    step: int
    behind: ReplayProgress

    def begun(self) -> dict[str, Any]:
        """Returns the start as the folder records it."""
        return {"checkpoint": self.checkpoint, "start": self.step}


def find_replay_start(
    store: ObjectStore,
    asked: ReplayRequest,
    before: Mapping[str, Any] | None,
    own: tuple[RunFolder, Configuration],
) -> tuple[ReplayStart, Learner]:
    """Returns the start and a learner in its state. The start is the newest checkpoint of the
    replay's folder `own` if a replay was stopped there (`before` is its recorded request), else the
    run's newest stored checkpoint up to the first requested step.
    """
    disable_progress_bar()  # of transformers: it would mix with the command's output
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
    """Train the steps from `start` and yield each; when the iteration ends, everything is in the
    folder `out`.
    """
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
    """Returns the steps from `first` to `last` whose state hash in the replay's ledger matches none
    of the hashes that the run recorded for the step.
    """
    again = read_own_ledger(*out)  # a step may have been trained twice in the folder
    return [step for step in range(first, last + 1) if not recorded.has_state(again.done[step][-1])]


def _changed_learner(asked: ReplayRequest) -> Learner:
    model = starting_model(asked.before, asked.folder.path)
    return open_learner(model, asked.now.trainer)
