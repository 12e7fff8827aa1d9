"""`rollstream replay RUN --from-step N --out DIR` trains the steps after N again.

Training begins at the newest checkpoint up to N. A repeated step is right if its state hash equals
the ledger's; with `--set` or `--where` the steps after N are an experiment and not compared. The
run is only read; the same command resumes.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.credit import scored_reference
from rollstream.consumers.objective_settings import ObjectiveSettings
from rollstream.consumers.trainer.learn.base import Learner, open_learner
from rollstream.consumers.trainer.past_versions import PublishedVersions
from rollstream.errors import ConfigurationError
from rollstream.keep.replay import folder
from rollstream.keep.replay.conditions import meets_conditions, parse_conditions
from rollstream.keep.replay.recorded_steps import RecordedSteps, steps_of_run
from rollstream.keep.replay.training import (
    ReplayCourse,
    ReplayProgress,
    newest_replay_checkpoint,
    open_replay_loop,
)
from rollstream.keep.source import check_outside_run, open_run_source
from rollstream.look.explorer.serving.report_file import write_overlay, write_report
from rollstream.look.query.looking import require_code
from rollstream.look.report.comparison import OverlaidRun
from rollstream.look.report.summary import open_history, read_history, summarise
from rollstream.run.config.config import (
    SettingChange,
    essential_settings,
    fingerprint,
    load,
    setting_changes,
)
from rollstream.run.config.run_folder import RunFolder, run_folder, store_url, write_configuration
from rollstream.run.config.run_model import MODEL, whole_model_folder
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import run_rule, set_torch_threads
from rollstream.run.roles.train import starting_model
from rollstream.run.signals import count_steps, warn
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.checkpoints import newest_checkpoint
from rollstream.storage.weights.tensors import local_tensors
from rollstream.streams.records import Trajectory

# The page that shows run and replay together.
OVERLAY_FILE = "beside.html"
# These decide the result of learning from given takes; the others decided which trajectories and
# takes exist. A name that ends in a dot stands for all below it.
CHANGEABLE_SETTINGS = (
    "trainer.lr", "trainer.lr_final", "trainer.lr_ramp_steps", "trainer.steps", "trainer.betas",
    "trainer.weight_decay", "trainer.gradient_norm_max", "trainer.reward_terms.",
    "trainer.survivors_min", "trainer.filter_equal_rewards", "dispatch.max_lag",
    *(f"trainer.{name}" for name in ObjectiveSettings.model_fields),
)  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Train the steps again, compare their state hashes with the ledger, and write the reports.
    Returns the exit code: 1 if a step differs, else 0.
    """
    run, out = run_folder(arguments.runs[0]), RunFolder(Path(arguments.out).absolute())
    check_outside_run(out.path, run.path)
    with open_run_source(str(run.path), is_trusted=arguments.is_trusted) as source:
        require_code(source.location, "trainer")
        store = source.store
        if store is None:
            name = source.location.name
            raise ConfigurationError(f"{name} has no store, so it has no checkpoint to replay from")
        recorded, before = steps_of_run(source), folder.read_replay_request(out.path)
        request = _request(arguments, run, recorded, before)
        if before is not None:
            folder.refuse_other_request(out.path, before, request.identity())
        model = whole_model_folder(request.before, run.path, out.path / MODEL).absolute()
        c = folder.replay_configuration(request.now, out.path, model)
        repetition = Repetition(source.log, store, recorded, request, out, c)
        result = repetition.run(before)
        pages = _write_reports(request, out, source.log)
    if arguments.json:
        print(json.dumps({"out": str(out.path), **result}))
    else:
        _print_result(request, result, pages)
    return 1 if result["differing"] else 0


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

    def own_course(self) -> ReplayCourse:
        """Returns the settings and the rule by which the run trained."""
        return ReplayCourse(self.before.trainer, run_rule(self.before, self.folder.path))

    def requested_course(self) -> ReplayCourse:
        """Returns the settings, the rule and the filter of the steps after `first`."""
        conditions = parse_conditions(self.where)

        def keep(record: Trajectory, step: int) -> bool:
            # The append time is not at hand: the time when the trajectory finished stands for it.
            return meets_conditions(conditions, record, round(record.finished_s * 1000), step)

        return ReplayCourse(self.now.trainer, run_rule(self.now, self.folder.path), keep)


def _request(
    arguments: argparse.Namespace,
    run: RunFolder,
    recorded: RecordedSteps,
    recorded_request: Mapping[str, Any] | None,
) -> ReplayRequest:
    """Raises `ConfigurationError` for a setting that a replay cannot change, an invalid condition,
    or steps that the ledger lacks.
    """
    before, now = load(run.configuration), load(run.configuration, arguments.overrides)
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
    parse_conditions(arguments.where)
    first, last, done = arguments.from_step, arguments.to_step, recorded.last()
    if last is None:
        # An interrupted replay keeps its last step, though the run may have made further ones.
        last = (recorded_request or {}).get("to_step")
    last = done if last is None else last
    if not 0 <= first < last <= done:
        raise ConfigurationError(
            f"--from-step {first} --to-step {last}: the ledger has steps 1 to {done}; "
            "give 0 ≤ from < to ≤ the last"
        )
    return ReplayRequest(run, before, now, changes, arguments.where, first, last)


class Repetition:
    """Trains the requested steps of the run with this log and store into the folder `out`, under
    the settings `c` there.
    """

    def __init__(
        self,
        log: LogView,
        store: ObjectStore,
        recorded: RecordedSteps,
        request: ReplayRequest,
        out: RunFolder,
        c: Configuration,
    ) -> None:
        self._log, self._store, self._recorded, self._request = log, store, recorded, request
        self._out, self._configuration = out, c

    def run(self, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the result, which `replay.json` then holds beside the request. `before` is that
        file's content, from which a stopped replay resumes; None for a new folder.
        """
        request, out, recorded = self._request, self._out, self._recorded
        disable_progress_bar()  # of transformers: it would mix with the command's output
        set_torch_threads(request.before.trainer.threads)
        learner = self._learner(request.before)
        begun, progress = self._load_start(learner, before)
        recorded.check_whole(range(progress.step + 1, request.last + 1))
        with folder.lock_replay_folder(out.path):
            # Stored before the steps, so that an interrupted replay can be resumed.
            folder.write_replay_request(out.path, request.identity(), begun)
            write_configuration(out, self._configuration)
            _print_start(request, begun)
            if progress.ledger is not None:
                warn(f"an earlier replay stopped after step {progress.step}: resuming there")
            hashes = {configured.configuration_hash for configured in recorded.configured}
            if hashes - {fingerprint(request.before)}:
                warn("the run changed its configuration; all steps use its last configuration")
            count_steps(self._train(learner, progress), request.last)
            start, last = begun["start"], request.first if request.is_experiment else request.last
            # A step may be in the folder's ledger twice, after a resume: the last one counts.
            done = folder.read_own_ledger(out, self._configuration).done
            compared = range(start + 1, last + 1)
            result = {
                **begun, "trained_again": request.first - start,
                "steps": request.last - request.first, "experiment": request.is_experiment,
                "compared": len(compared),
                "differing": [s for s in compared if not recorded.has_state(done[s][-1])],
            }  # fmt: skip
            folder.write_replay_request(out.path, request.identity(), result)
        return result

    def _load_start(
        self, learner: Learner, before: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], ReplayProgress]:
        """Loads the newest checkpoint of a stopped replay, else the newest of the run up to the
        step `first`, else nothing (the model of step 0). Returns the run's checkpoint and its step
        as JSON values, and the progress.
        """
        if before is not None:
            progress = newest_replay_checkpoint(self._out, self._configuration)
            if progress is not None:
                learner.load_state(progress.tensors)
                return {name: before[name] for name in ("checkpoint", "start")}, progress
        checkpoint = newest_checkpoint(self._store, self._request.first).checkpoint
        if checkpoint is None:
            return {"checkpoint": None, "start": 0}, ReplayProgress(0, {}, None)
        learner.load_state(checkpoint.tensors)
        step = checkpoint.id.step
        return {"checkpoint": str(checkpoint.id), "start": step}, ReplayProgress(step, {}, None)

    def _train(self, learner: Learner, progress: ReplayProgress) -> Iterator[int]:
        request, recorded, log = self._request, self._recorded, self._log
        first = request.first if request.is_experiment else request.last
        out = self._out, self._configuration
        course, terms = request.own_course(), recorded.terms()
        with open_replay_loop(*out, progress, log, learner, course, terms) as loop:
            with closing(learner):
                yield from loop.train(
                    recorded.planned(range(progress.step + 1, first + 1), request.last)
                )
                state = learner.state()
            if request.is_experiment:
                # A second learner with the new settings takes over the state after step `first`.
                with closing(self._learner(request.now)) as changed:
                    changed.load_state(local_tensors(state))
                    loop.change(changed, request.requested_course())
                    steps = range(max(progress.step, first) + 1, request.last + 1)
                    yield from loop.train(recorded.planned(steps, request.last))

    def _learner(self, c: Configuration) -> Learner:
        model = starting_model(self._request.before, self._request.folder.path)
        out = self._configuration
        # The versions that this replay has published, and those of the run.
        past = PublishedVersions(
            lambda: (open_store(store_url(out, self._out.path), out.sync), self._store),
            out.weights.dtype,
        )
        return open_learner(model, c.trainer, past)


def _write_reports(request: ReplayRequest, out: RunFolder, log: LogView) -> list[Path]:
    history = open_history(out)
    summary = summarise(history)
    write_report(history, summary, out.report)
    before = read_history(log, request.folder)
    runs = [
        OverlaidRun(request.folder.path.name, before, summarise(before)),
        OverlaidRun(out.path.name, history, summary),
    ]
    write_overlay(runs, out.path / OVERLAY_FILE)
    return [out.report, out.path / OVERLAY_FILE]


def _print_start(request: ReplayRequest, begun: Mapping[str, Any]) -> None:
    repeated, further = request.first - begun["start"], request.last - request.first
    warn(
        f"from {begun['checkpoint'] or 'the initial model'}: {repeated} steps are repeated up to "
        f"step {request.first}, then {further} up to step {request.last}"
    )
    if request.is_experiment:
        warn(f"experiment from step {request.first + 1} on: {request.words()}")


def _print_result(request: ReplayRequest, result: dict[str, Any], pages: list[Path]) -> None:
    differing, compared = result["differing"], result["compared"]
    if differing:
        print(f"{len(differing)} of {compared} steps differ from the ledger: {differing}")
    elif compared:
        print(f"identical: all {compared} steps have the state hash of the ledger")
    if request.is_experiment:
        print(f"experiment, steps {request.first + 1} to {request.last}: {request.words()}")
    for page in pages:
        print(f"report: {page}")
