"""`rollstream replay SOURCE… --offline CONFIG --out DIR`: trains on recorded trajectories, without
rollouts, and writes a report.

Sources are only read. Trajectories that meet `--where` are gathered into a log in DIR; a trainer
with the settings of CONFIG, but no limit on lag, trains on them. The same command resumes; other
sources or `--where` are refused in this DIR.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.objective_settings import BEHAVIOUR
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.learn.base import open_learner
from rollstream.consumers.trainer.past_versions import PublishedVersions
from rollstream.errors import ConfigurationError
from rollstream.keep.replay import gathering
from rollstream.keep.replay.behaviour import Behaviours
from rollstream.keep.replay.conditions import meets_conditions, needs_steps, parse_conditions
from rollstream.keep.replay.folder import (
    lock_replay_folder,
    read_own_ledger,
    read_replay_request,
    refuse_other_request,
    replay_configuration,
    write_replay_request,
)
from rollstream.keep.replay.offline_plan import OfflinePlan, groups_used, index_log
from rollstream.keep.replay.recorded_steps import steps_of_run
from rollstream.keep.replay.training import (
    ReplayCourse,
    ReplayProgress,
    newest_replay_checkpoint,
    open_replay_loop,
)
from rollstream.keep.source import RunSource, check_outside_run, open_run_source
from rollstream.look.explorer.serving.report_file import write_report
from rollstream.look.query.fields import FieldCondition
from rollstream.look.report.summary import open_history, summarise
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import (
    RunFolder,
    folder_of_run,
    open_run_log_for_writing,
    store_for_writing,
    write_configuration,
)
from rollstream.run.config.run_model import MODEL, local_model_folder, whole_model_folder
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import set_torch_threads
from rollstream.run.roles.train import starting_model
from rollstream.run.signals import count_steps, progress_bar, warn
from rollstream.storage.model_folder.hf_folder import find_hf_folder
from rollstream.storage.model_folder.hf_tokenizer import TOKENIZER
from rollstream.storage.model_folder.model_fit import read_model_config
from rollstream.storage.starting_model.models import load_model
from rollstream.streams.admissible import REFUSAL_KINDS, TrainingBounds
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address

# A source with such a name is a file, any other a run or archive.
JSONL = (".jsonl", ".ndjson")
# A count of `gather_sources` → the text that is printed after its number.
GATHERED_TEXTS = {
    "logprobs_computed": "of them had no log-probabilities: those of the initial model are used",
    "logprobs_recomputed": "of them had no log-probabilities: those of the versions that they name "
    "are used",
    "filtered_out": "others are left out by --where",
    "duplicate": "others repeat a trajectory: only the first is used",
    "unreadable": "records are unreadable and left out",
    **{
        f"refused_{kind}": f"others cannot be trained ({kind}: docs/explanation/learning.md) "
        "and are left out"
        for kind in REFUSAL_KINDS
    },
}


def main(arguments: argparse.Namespace) -> int:
    """Refuses a DIR inside the folder of a source run, and one that holds another replay."""
    folder = RunFolder(Path(arguments.out).absolute())
    for word in arguments.runs:
        path = Path(word).absolute()
        check_outside_run(folder.path, path.parent if path.name == "config.json" else path)
    configuration = _configuration(arguments, folder)
    sources = [word if "://" in word else str(Path(word).absolute()) for word in arguments.runs]
    request = {"sources": sources, "name": arguments.name, "where": list(arguments.where)}
    recorded = read_replay_request(folder.path)
    if recorded is not None:
        refuse_other_request(folder.path, recorded, request)
    result = _gather_and_train(arguments, folder, configuration, request, recorded or {})
    history = open_history(folder)
    write_report(history, summarise(history), folder.report)
    if arguments.json:
        print(json.dumps({"out": str(folder.path), **result}))
    else:
        _print_result(result, folder)
    return 0


def _configuration(arguments: argparse.Namespace, folder: RunFolder) -> Configuration:
    loaded = load(arguments.offline, arguments.overrides)
    run = folder_of_run(loaded).path
    model = local_model_folder(loaded, run).absolute()
    if not (model / "config.json").is_file():
        model = whole_model_folder(loaded, run, folder.path / MODEL).absolute()
    if not (model / "config.json").is_file():
        raise ConfigurationError(
            f"{model} holds no initial model; name a folder with a Hugging Face checkpoint: "
            "--set model.path=DIR"
        )
    configuration = replay_configuration(loaded, folder.path, model)
    return configuration.model_copy(
        update={"dispatch": configuration.dispatch.model_copy(update={"max_lag": None})}
    )


def _gather_and_train(
    arguments: argparse.Namespace,
    folder: RunFolder,
    configuration: Configuration,
    request: dict[str, Any],
    recorded: dict[str, Any],
) -> dict[str, Any]:
    """Returns the counts. `recorded` is an earlier call's request and result: once it has
    `gathered`, the sources are not read again.
    """
    with ExitStack() as stack:
        sources = [] if "gathered" in recorded else _sources(arguments, configuration, stack)
        training = OfflineTraining(folder, configuration)
        if sources:
            # Every line of every file is valid before anything is written.
            _check(sources, training)
        stack.enter_context(lock_replay_folder(folder.path))
        # The request is in the folder before anything is gathered.
        if "gathered" not in recorded:
            write_replay_request(folder.path, request)
        write_configuration(folder, configuration)
        gathered = recorded.get("gathered")
        if gathered is None:
            with progress_bar("gathering", None):
                gathered = dict(training.gather(sources))
            write_replay_request(folder.path, request, {"gathered": gathered})
        _print_gathered(gathered, configuration)
        count_steps(training.train(), configuration.trainer.steps)
        result = {"gathered": gathered, **training.outcome()}
        write_replay_request(folder.path, request, result)
    return result


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
    def course(self) -> ReplayCourse:
        # No bound on lag: no version of this training made the trajectories.
        return ReplayCourse(
            self.configuration.trainer, training_rule(self.configuration.trainer, None, False)
        )

    def gather(self, sources: Sequence[gathering.LabelledSource]) -> Counter[str]:
        """Copy the trajectories of all sources into the folder's log, except those that a filter
        excludes or that cannot be trained. Returns the numbers of copied trajectories and groups,
        and of trajectories left out, by reason.
        """
        disable_progress_bar()
        set_torch_threads(self.configuration.trainer.threads)
        with closing(open_run_log_for_writing(self.configuration, self.folder.path)) as log:
            log.create(catalogue())
            bounds, fill = TrainingBounds(self.vocabulary), self.behaviours.fill
            return gathering.gather_sources(sources, log, bounds, fill, str(self.folder.path))

    def train(self) -> Iterator[int]:
        """Train from the folder's newest checkpoint to `trainer.steps`, or as far as the
        trajectories suffice; yields the number of each step.
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
        used = groups_used(read_own_ledger(self.folder, c), progress.step)
        with closing(open_run_log_for_writing(c, self.folder.path)) as log, closing(learner):
            index = index_log(log, self.course.rule.names)
            plan = OfflinePlan(log, index, self.course, used)
            out = self.folder, c
            with open_replay_loop(*out, progress, log, learner, self.course) as loop:
                yield from loop.train(plan.steps(progress.step, c.trainer.steps))
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


def _sources(
    arguments: argparse.Namespace, c: Configuration, stack: ExitStack
) -> list[gathering.LabelledSource]:
    conditions = parse_conditions(arguments.where)
    with_steps = needs_steps(conditions)
    encode = _tokenizer(find_hf_folder(str(c.model.path)))
    sources: list[gathering.LabelledSource] = []
    for number, word in enumerate(arguments.runs):
        path = Path(word)
        label = path.stem if path.suffix in JSONL else path.name
        # A distinct label is the prefix of the source's trajectories' names.
        label = label if label not in {other.label for other in sources} else f"{label}-{number}"
        if path.suffix in JSONL:
            if not path.is_file():
                raise ConfigurationError(f"{word}: no such file; is the path right?")
            steps: dict[Address, int] = {}
            source = gathering.JsonLines(path, encode)
        else:
            opened: RunSource = stack.enter_context(open_run_source(word, arguments.name))
            steps = steps_of_run(opened).step_of() if with_steps else {}
            source = gathering.RecordedSource(opened.log)
        sources.append(
            gathering.LabelledSource(label, source, partial(_is_wanted, conditions, steps))
        )
    return sources


def _is_wanted(
    conditions: list[FieldCondition],
    steps: dict[Address, int],
    trajectory: gathering.SourceTrajectory,
) -> bool:
    step = None if trajectory.at is None else steps.get(trajectory.at)
    return not conditions or meets_conditions(
        conditions, trajectory.record, trajectory.timestamp_ms, step
    )


def _check(sources: list[gathering.LabelledSource], training: OfflineTraining) -> None:
    vocabulary = training.vocabulary
    for labelled in sources:
        if isinstance(labelled.source, gathering.JsonLines):
            for trajectory in labelled.source.trajectories():
                gathering.check_tokens(labelled.label, trajectory.record, vocabulary)
                training.behaviours.check(labelled.label, trajectory)


def _tokenizer(model: Path) -> gathering.TextEncoder | None:
    # Text is encoded without special tokens.
    if not (model / TOKENIZER).is_file():
        return None
    from rollstream.producers.dialogue.text_tokenizer import TextTokenizer

    return TextTokenizer(model).encode


def _print_gathered(gathered: dict[str, int], c: Configuration) -> None:
    per_step = c.trainer.groups_per_step
    warn(
        f"{gathered.get('trajectories', 0)} trajectories in {gathered.get('groups', 0)} groups, "
        f"{per_step} groups a step (trainer.groups_per_step), at most {c.trainer.steps} steps"
    )
    for name, words in GATHERED_TEXTS.items():
        if gathered.get(name):
            warn(f"{gathered[name]} {words}")


def _print_result(result: dict[str, Any], folder: RunFolder) -> None:
    more = f", {result['left_over']} groups left over" if result["left_over"] else ""
    print(f"{result['steps']} steps trained{more}")
    if result["closed"]:
        print(f"{result['closed']} groups had nothing to train and were closed (reasons: ledger)")
    print(f"report: {folder.report}")
