"""`rollstream replay SOURCE… --offline CONFIG --out DIR`: trains on recorded trajectories, without
rollouts, and writes a report.

Sources are runs, archives of runs, and files of JSON lines; they are only read. First the
trajectories that meet `--where` are gathered into a log in DIR; then a trainer with the settings of
CONFIG, but without a limit on lag, trains on the groups of that log. The same command resumes where
it was interrupted; a command with other sources or another `--where` is refused in the same DIR.
"""

import argparse
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rollstream.analysis.fields import FieldCondition
from rollstream.cli.signals import count_steps, progress_bar, warn
from rollstream.config.config import load
from rollstream.config.run_folder import RunFolder, folder_of_run, write_configuration
from rollstream.config.run_model import MODEL, local_model_folder, whole_model_folder
from rollstream.config.settings import Configuration
from rollstream.consumers.replay import offline_log
from rollstream.errors import ConfigurationError
from rollstream.report.summary import open_history, summarise
from rollstream.report.write import write_report
from rollstream.runs import replay_output
from rollstream.runs.replay import is_wanted_trajectory, needs_steps, parse_conditions
from rollstream.storage.hf_folder import find_hf_folder
from rollstream.storage.hf_tokenizer import TOKENIZER
from rollstream.streams.admissible import REFUSAL_KINDS
from rollstream.streams.values import Address

JSONL = (".jsonl", ".ndjson")  # a source with such a name is a file, any other a run or archive
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
"""A count of `gather_sources` → the text that is printed after its number."""


def main(arguments: argparse.Namespace) -> int:
    """Gather the trajectories, train on them, write the report, and print the result. Refuses a
    DIR inside the folder of a source run, and one that holds another replay.
    """
    folder = RunFolder(Path(arguments.out).absolute())
    for named in arguments.runs:
        path = Path(named).absolute()
        replay_output.check_outside_run(
            folder.path, path.parent if path.name == "config.json" else path
        )
    configuration = _configuration(arguments, folder)
    sources = [named if "://" in named else str(Path(named).absolute()) for named in arguments.runs]
    request = {"sources": sources, "name": arguments.name, "where": list(arguments.where)}
    recorded = replay_output.read_replay_request(folder.path)
    if recorded is not None:
        replay_output.refuse_other_request(folder.path, recorded, request)
    result = _gather_and_train(arguments, folder, configuration, request, recorded or {})
    history = open_history(folder)
    write_report(history, summarise(history), folder.report)
    if arguments.json:
        print(json.dumps({"out": str(folder.path), **result}))
    else:
        _print_result(result, folder)
    return 0


def _configuration(arguments: argparse.Namespace, folder: RunFolder) -> Configuration:
    """Returns the given configuration with all data inside the folder and without a lag limit.
    Raises `ConfigurationError` if it names no initial model.
    """
    given = load(arguments.offline, arguments.overrides)
    run = folder_of_run(given).path
    model = local_model_folder(given, run).absolute()
    if not (model / "config.json").is_file():
        model = whole_model_folder(given, run, folder.path / MODEL).absolute()
    if not (model / "config.json").is_file():
        raise ConfigurationError(
            f"{model} holds no initial model; name a folder with a Hugging Face checkpoint: "
            "--set model.path=DIR"
        )
    own = replay_output.replay_configuration(given, folder.path, model)
    return own.model_copy(update={"dispatch": own.dispatch.model_copy(update={"max_lag": None})})


def _gather_and_train(
    arguments: argparse.Namespace,
    folder: RunFolder,
    configuration: Configuration,
    request: dict[str, Any],
    recorded: dict[str, Any],
) -> dict[str, Any]:
    """Gathers the trajectories and trains on them; returns the counts. `request` is recorded in the
    folder before anything is gathered. `recorded` is what an earlier call recorded there, its
    request and its result so far: once it holds `gathered`, the sources are not read again.
    """
    with ExitStack() as stack:
        sources = [] if "gathered" in recorded else _sources(arguments, configuration, stack)
        training = replay_output.OfflineTraining(folder, configuration)
        if sources:
            _check(sources, training)
        stack.enter_context(replay_output.lock_replay_folder(folder.path))
        if "gathered" not in recorded:
            replay_output.write_replay_request(folder.path, request)
        write_configuration(folder, configuration)
        gathered = recorded.get("gathered")
        if gathered is None:
            with progress_bar("gathering", None):
                gathered = dict(training.gather(sources))
            replay_output.write_replay_request(folder.path, request, {"gathered": gathered})
        _print_gathered(gathered, configuration)
        count_steps(training.train(), configuration.trainer.steps)
        result = {"gathered": gathered, **training.outcome()}
        replay_output.write_replay_request(folder.path, request, result)
    return result


def _sources(
    arguments: argparse.Namespace, c: Configuration, stack: ExitStack
) -> list[offline_log.LabelledSource]:
    """Opens the sources for as long as `stack` is open. Each gets a distinct label, which the names
    of its trajectories get as a prefix, and the filter of `--where`.
    """
    conditions = parse_conditions(arguments.where)
    with_steps = needs_steps(conditions)
    encode = _tokenizer(find_hf_folder(str(c.model.path)))
    found: list[offline_log.LabelledSource] = []
    for number, named in enumerate(arguments.runs):
        path = Path(named)
        label = path.stem if path.suffix in JSONL else path.name
        label = label if label not in {other.label for other in found} else f"{label}-{number}"
        if path.suffix in JSONL:
            if not path.is_file():
                raise ConfigurationError(f"{named}: no such file; is the path right?")
            steps: dict[Address, int] = {}
            source = offline_log.JsonLines(path, encode)
        else:
            opened: replay_output.ReplaySource = stack.enter_context(
                replay_output.open_replay_source(named, arguments.name)
            )
            steps = opened.recorded().step_of() if with_steps else {}
            source = offline_log.RecordedSource(opened.log)
        found.append(
            offline_log.LabelledSource(label, source, partial(_is_wanted, conditions, steps))
        )
    return found


def _is_wanted(
    conditions: list[FieldCondition],
    steps: dict[Address, int],
    trajectory: offline_log.SourceTrajectory,
) -> bool:
    """Whether a trajectory meets all conditions; `steps` are the steps that trained trajectories of
    its source, by address.
    """
    step = None if trajectory.at is None else steps.get(trajectory.at)
    return not conditions or is_wanted_trajectory(
        conditions, trajectory.record, trajectory.timestamp_ms, step
    )


def _check(
    sources: list[offline_log.LabelledSource], training: replay_output.OfflineTraining
) -> None:
    """Validate every line of every file before anything is written; raises `ConfigurationError`."""
    vocabulary = training.vocabulary
    for labelled in sources:
        if isinstance(labelled.source, offline_log.JsonLines):
            for trajectory in labelled.source.trajectories():
                offline_log.check_tokens(labelled.label, trajectory.record, vocabulary)
                training.behaviours.check(labelled.label, trajectory)


def _tokenizer(model: Path) -> offline_log.TextEncoder | None:
    """Returns a function from text to tokens that adds no special tokens; None if the model's
    folder has no tokenizer.
    """
    if not (model / TOKENIZER).is_file():
        return None
    from rollstream.producers.tasks.text_tokenizer import TextTokenizer

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
