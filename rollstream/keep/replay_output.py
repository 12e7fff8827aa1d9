"""Opens input and output of a replay. The output is a folder laid out as a run's, with the request
in `replay.json`: only the same request resumes it.
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.objective_settings import BEHAVIOUR
from rollstream.consumers.replay import recorded_steps
from rollstream.consumers.replay.offline_log import GatherRules, LabelledSource, gather_sources
from rollstream.consumers.replay.training import (
    ReplayOutput,
    ReplayTrainer,
    ledger_position,
)
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.learn.base import Learner, open_learner
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.past_versions import NeededVersions, PublishedVersions
from rollstream.consumers.trainer.publisher import CheckpointRetention, StepPublisher
from rollstream.consumers.trainer.retention import HeldVersions
from rollstream.consumers.trainer.totals import missing_lines
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, LeaseHeld
from rollstream.foreign_json import parse_json
from rollstream.keep.behaviour import Behaviours
from rollstream.look.query.locate import REPLAY_FILE, RunLocation, locate_run
from rollstream.look.query.looking import open_run_view
from rollstream.os_failures import explain_os_error
from rollstream.revision import code_revision
from rollstream.run.config.config import fingerprint
from rollstream.run.config.run_folder import (
    RunFolder,
    open_run_log_for_writing,
    store_for_writing,
    store_url,
)
from rollstream.run.config.run_model import model_is_read
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import set_torch_threads
from rollstream.run.roles.train import starting_model, version_files
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.metrics_file import MetricsFile, read_metrics
from rollstream.storage.model_folder.hf_folder import find_hf_folder
from rollstream.storage.model_folder.model_fit import read_model_config
from rollstream.storage.starting_model.models import load_model
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.terms import REPLAYS, next_term
from rollstream.storage.weights.checkpoints import newest_checkpoint, write_checkpoint
from rollstream.streams.admissible import TrainingBounds
from rollstream.streams.records import Configured, Position, StepDone
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter
from rollstream.whole_file import whole_file


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """The trained step and the tensors of the learner's state. `ledger` is the position in the
    folder's own ledger behind that step, None without a checkpoint there.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    ledger: Position | None


def newest_replay_checkpoint(folder: RunFolder, c: Configuration) -> ReplayProgress | None:
    """Returns the progress at the newest checkpoint in a replay's folder; None without one."""
    checkpoint = newest_checkpoint(open_store(store_url(c, folder.path), c.sync)).checkpoint
    if checkpoint is None:
        return None
    return ReplayProgress(checkpoint.id.step, checkpoint.tensors, ledger_position(checkpoint.state))


def read_own_ledger(folder: RunFolder, c: Configuration) -> recorded_steps.RecordedSteps:
    """Returns the steps in the ledger of the replay's own folder."""
    with closing(open_run_log_for_writing(c, folder.path)) as bus:
        bus.create(catalogue())
        return recorded_steps.read_recorded(bus)


@contextmanager
def open_replay_output(
    folder: RunFolder, c: Configuration, progress: ReplayProgress, learner: Learner
) -> Generator[ReplayOutput]:
    """Open the output of a replay in `folder`; everything is written when the block ends. `learner`
    must have the state of `progress`.

    1. Take a new term, and fence earlier processes of this replay from publishing versions.
    2. Fence them from the ledger, and read their records after the newest checkpoint, which are not
       appended again.
    3. Publish the version to start with, and write its checkpoint if the folder has none.
    """
    with closing(open_run_log_for_writing(c, folder.path)) as bus:
        bus.create(catalogue())
        store = store_for_writing(c, folder.path)
        read_or_create_identity(store, c.run)  # by it `rm` knows the replay's files
        term = next_term(store, REPLAYS, REPLAYS)
        writer = FencedWriter(bus, "weights", "trainer", term)
        files = version_files(c, folder.path)
        needed = NeededVersions(store, c.trainer, c.dispatch.max_lag)
        versions = VersionWriter(
            store, writer, c.run, term, c.weights, files, HeldVersions(bus), needed
        )
        versions.open()  # 1
        ledger = Ledger(bus, term)
        left_records = ledger.open(progress.ledger or Position())  # 2
        configured = Configured(fingerprint(c), code_revision(), progress.step)
        ledger.append([configured])
        versions.publish(progress.step, learner.snapshot(c.weights.dtype))  # 3
        with MetricsFile(folder.metrics / "trainer.jsonl") as metrics:
            for line in missing_lines(
                left_records.done, read_metrics(folder.metrics / "trainer.jsonl")
            ):
                metrics.append(line)
            publisher = StepPublisher(
                store, versions, ledger, metrics, CheckpointRetention(c.checkpoints.keep)
            )
            every = c.checkpoints.every
            out = ReplayOutput(
                publisher, ledger, c.weights.dtype, every, configured, term, left_records
            )
            if progress.ledger is None:  # 3
                state = out.state(progress.step, learner.updates)
                write_checkpoint(store, progress.step, term, learner.state(), state.encode())
            yield out
            publisher.close()


REPLAY_LOCK = "replay.lock"
IGNORED_FILES = {REPLAY_LOCK}
"""Files in a folder before its first request is recorded."""


def check_outside_run(path: Path, run: Path) -> None:
    """Raise `ConfigurationError` if the output folder `path` is inside the folder `run`."""
    if path.absolute().is_relative_to(run):
        raise ConfigurationError(f"--out {path.absolute()} is inside the run's own folder")


def read_replay_request(path: Path) -> dict[str, Any] | None:
    """Returns the recorded request; None for a new or empty folder. Raises `ConfigurationError` for
    any other folder.
    """
    if not path.exists() or (
        path.is_dir() and not {p.name for p in path.iterdir()} - IGNORED_FILES
    ):
        return None
    try:
        return parse_json(ContainedFolder(path).read(REPLAY_FILE), dict[str, Any])
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{path} is not empty and holds no replay; give a new folder with --out"
        ) from None


def refuse_other_request(path: Path, before: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError`, which names the differences, if the recorded request `before` is
    another one.
    """
    differences = [
        f"  {key}: {json.dumps(before.get(key))} there, {json.dumps(value)} asked for"
        for key, value in request.items()
        if before.get(key) != value
    ]
    if differences:
        lines = "\n".join(differences)
        raise ConfigurationError(
            f"{path} holds another replay:\n{lines}\nrepeat its request to resume it, or give a "
            "new folder with --out"
        )


@contextmanager
def lock_replay_folder(path: Path) -> Generator[None]:
    """Create the folder and hold its lock during the block. Raises `LeaseHeld` if another replay
    runs there, `ConfigurationError` if the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / REPLAY_LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {path} cannot be made: {explain_os_error(error)} (--out names another)"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LeaseHeld(f"another replay runs in {path}; wait for it, or give --out DIR") from None
    try:
        yield
    finally:
        os.close(descriptor)


def write_replay_request(path: Path, *parts: Mapping[str, Any]) -> None:
    """Record the request in `replay.json`, atomically."""
    line: dict[str, Any] = {}
    for part in parts:
        line |= part
    with whole_file(path / REPLAY_FILE) as partial:
        partial.write_text(json.dumps(line, indent=2) + "\n", encoding="utf-8")


def replay_configuration(c: Configuration, path: Path, model: Path) -> Configuration:
    """Returns the settings `c` for a replay in the folder `path`: log and store inside it, `model`
    as starting model, nothing truncated or archived.
    """
    changed: dict[str, Any] = {
        "folder": str(path), "bus": "sqlite:bus", "store": "file:store", "truncate": False,
        "model": c.model.model_copy(update={"path": str(model)}),
        "archive": c.archive.model_copy(update={"enabled": False}),
    }  # fmt: skip
    return c.model_copy(update=changed)


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """An opened input. `log` reads log and archive as one; `store` is None if it does not exist."""

    location: RunLocation
    store: ObjectStore | None
    log: LogView

    def recorded(self) -> recorded_steps.RecordedSteps:
        """Returns the recorded steps. Raises `ConfigurationError` without a ledger."""
        if not any(self.log.end("ledger").values()):
            raise ConfigurationError(
                f"{self.location.name} has no ledger, and only the ledger records what a step "
                "trained"
            )
        return recorded_steps.read_recorded(self.log)


@contextmanager
def open_replay_source(
    argument: str, name: str | None = None, is_trusted: bool = False
) -> Generator[ReplaySource]:
    """Open the input of a command, as `locate_run` finds it; `name` selects the run in an archive
    that holds several. If the log has no ledger, the archive alone is read. While the block runs,
    its model's files are kept in a private folder.
    """
    location = locate_run(argument, is_trusted)
    location = location if name is None else replace(location, run=name)
    read = model_is_read(location) if location.configuration else nullcontext()
    with open_run_view(location) as view, read:
        log = view if view.has("ledger") else LogView(None, view.store, view.run)
        yield ReplaySource(location, view.store, log)


@dataclass(slots=True)
class OfflineTraining:
    """Trains in one folder on gathered trajectories instead of recorded steps (`rollstream replay
    --offline`): `gather` copies them into the folder's log, `train` forms steps from their groups.
    `left_over` is the number of groups that no step used, set once all steps are trained.
    """

    folder: RunFolder
    configuration: Configuration
    left_over: int = 0
    behaviours: Behaviours = field(init=False)
    """Loads models only where needed."""

    def __post_init__(self) -> None:
        self.behaviours = Behaviours(lambda: load_model(str(self._model)))

    @property
    def course(self) -> recorded_steps.ReplayCourse:
        # No bound on lag: no version of this training made the trajectories.
        return recorded_steps.ReplayCourse(
            self.configuration.trainer, training_rule(self.configuration.trainer, None, False)
        )

    def gather(self, sources: Sequence[LabelledSource]) -> Counter[str]:
        """Copy the trajectories of all sources into the folder's log, except those that a filter
        excludes or that cannot be trained. Returns the numbers of copied trajectories and groups,
        and of trajectories left out, by reason.
        """
        disable_progress_bar()
        set_torch_threads(self.configuration.trainer.threads)
        with closing(open_run_log_for_writing(self.configuration, self.folder.path)) as log:
            log.create(catalogue())
            rules = GatherRules(TrainingBounds(self.vocabulary), self.behaviours.fill)
            return gather_sources(sources, log, rules, str(self.folder.path))

    def train(self) -> Iterator[StepDone]:
        """Train from the folder's newest checkpoint to `trainer.steps`, or as far as the
        trajectories suffice; yields the record of each step.
        """
        c = self.configuration
        if c.trainer.proximal == BEHAVIOUR:
            raise ConfigurationError(
                f"trainer.proximal must not be {BEHAVIOUR!r} offline: the versions that emitted "
                "these trajectories are not stored here"
            )
        disable_progress_bar()
        set_torch_threads(c.trainer.threads)
        store = store_for_writing(c, self.folder.path)
        past = PublishedVersions(lambda: (store,), c.weights.dtype)
        learner = open_learner(starting_model(c, self.folder.path), c.trainer, past)
        progress = newest_replay_checkpoint(self.folder, c) or ReplayProgress(0, {}, None)
        if progress.ledger is not None:
            learner.load_state(progress.tensors)
        used = recorded_steps.groups_used(read_own_ledger(self.folder, c), progress.step)
        with closing(open_run_log_for_writing(c, self.folder.path)) as log, closing(learner):
            index = recorded_steps.index_log(log, self.course.rule.names)
            plan = recorded_steps.OfflinePlan(log, index, self.course, used)
            with open_replay_output(self.folder, c, progress, learner) as written:
                replay = ReplayTrainer(log, written, time.monotonic)
                steps = plan.steps(progress.step, c.trainer.steps)
                yield from replay.train(learner, self.course, steps)
            self.left_over = plan.left_over

    @property
    def vocabulary(self) -> int:
        model_config: Any = read_model_config(self._model)
        return int(model_config.get_text_config().vocab_size)

    def outcome(self) -> dict[str, Any]:
        """Returns the numbers of trained steps, of groups closed in them, and of unused groups."""
        ledger = read_own_ledger(self.folder, self.configuration)
        closed = {record.group for records in ledger.closed.values() for record in records}
        return {"steps": ledger.last(), "closed": len(closed), "left_over": self.left_over}

    @property
    def _model(self) -> Path:
        path = self.configuration.model.path
        assert path is not None
        return find_hf_folder(path)
