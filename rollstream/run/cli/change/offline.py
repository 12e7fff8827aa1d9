"""`rollstream replay SOURCE… --offline CONFIG --out DIR`: trains on recorded trajectories, without
rollouts and limit on lag, and writes a report. Sources are only read. The same command resumes;
other sources or `--where` are refused in this DIR.
"""

import argparse
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rollstream.consumers.replay import offline_log
from rollstream.errors import ConfigurationError
from rollstream.keep import replay_output
from rollstream.keep.replay import is_wanted_trajectory, needs_steps, parse_conditions
from rollstream.look.query.fields import FieldCondition
from rollstream.look.report.summary import open_history, summarise
from rollstream.look.report.write import write_report
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import RunFolder, folder_of_run, write_configuration
from rollstream.run.config.run_model import MODEL, local_model_folder, whole_model_folder
from rollstream.run.config.settings import Configuration
from rollstream.run.signals import count_steps, progress_bar, warn
from rollstream.storage.model_folder.hf_folder import find_hf_folder
from rollstream.storage.model_folder.hf_tokenizer import TOKENIZER
from rollstream.streams.admissible import REFUSAL_KINDS
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
        replay_output.check_outside_run(
            folder.path, path.parent if path.name == "config.json" else path
        )
    configuration = _configuration(arguments, folder)
    sources = [word if "://" in word else str(Path(word).absolute()) for word in arguments.runs]
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
    configuration = replay_output.replay_configuration(loaded, folder.path, model)
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
        training = replay_output.OfflineTraining(folder, configuration)
        if sources:
            # Every line of every file is valid before anything is written.
            _check(sources, training)
        stack.enter_context(replay_output.lock_replay_folder(folder.path))
        # The request is in the folder before anything is gathered.
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
    conditions = parse_conditions(arguments.where)
    with_steps = needs_steps(conditions)
    encode = _tokenizer(find_hf_folder(str(c.model.path)))
    sources: list[offline_log.LabelledSource] = []
    for number, word in enumerate(arguments.runs):
        path = Path(word)
        label = path.stem if path.suffix in JSONL else path.name
        # A distinct label is the prefix of the source's trajectories' names.
        label = label if label not in {other.label for other in sources} else f"{label}-{number}"
        if path.suffix in JSONL:
            if not path.is_file():
                raise ConfigurationError(f"{word}: no such file; is the path right?")
            steps: dict[Address, int] = {}
            source = offline_log.JsonLines(path, encode)
        else:
            opened: replay_output.ReplaySource = stack.enter_context(
                replay_output.open_replay_source(word, arguments.name)
            )
            steps = opened.recorded().step_of() if with_steps else {}
            source = offline_log.RecordedSource(opened.log)
        sources.append(
            offline_log.LabelledSource(label, source, partial(_is_wanted, conditions, steps))
        )
    return sources


def _is_wanted(
    conditions: list[FieldCondition],
    steps: dict[Address, int],
    trajectory: offline_log.SourceTrajectory,
) -> bool:
    step = None if trajectory.at is None else steps.get(trajectory.at)
    return not conditions or is_wanted_trajectory(
        conditions, trajectory.record, trajectory.timestamp_ms, step
    )


def _check(
    sources: list[offline_log.LabelledSource], training: replay_output.OfflineTraining
) -> None:
    vocabulary = training.vocabulary
    for labelled in sources:
        if isinstance(labelled.source, offline_log.JsonLines):
            for trajectory in labelled.source.trajectories():
                offline_log.check_tokens(labelled.label, trajectory.record, vocabulary)
                training.behaviours.check(labelled.label, trajectory)


def _tokenizer(model: Path) -> offline_log.TextEncoder | None:
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
