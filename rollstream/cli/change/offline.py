"""`rollstream replay SOURCE… --offline CONFIG --out DIR`: trains on recorded trajectories.

Sources are logs and archives of runs, and files of JSON lines; they are only read. First all their
trajectories are gathered into a log in DIR, then the trainer reads that log as in a run. The same
command resumes where it was interrupted; other sources or conditions in the same DIR are refused.
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
from rollstream.config.run_folder import RunFolder, folder_of_run, model_folder, write_configuration
from rollstream.config.settings import Configuration
from rollstream.consumers.replay.offline_log import (
    JsonLines,
    LabelledSource,
    RecordedSource,
    SourceTrajectory,
    TextEncoder,
    check_tokens,
)
from rollstream.errors import ConfigurationError
from rollstream.report.summary import open_history, summarise
from rollstream.report.write import write_report
from rollstream.runs import replay_output
from rollstream.runs.replay import is_wanted_trajectory, needs_steps, parse_conditions
from rollstream.streams.admissible import REFUSAL_KINDS
from rollstream.streams.values import Address

JSONL = (".jsonl", ".ndjson")
GATHERED_TEXTS = {
    "logprobs_computed": "of them had no log-probabilities: those of the initial model are used",
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
    """Gather the trajectories, train, and write the report."""
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
    model = model_folder(given, folder_of_run(given).path).absolute()
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
    """Gathers the trajectories and trains on them; returns the counts. `recorded` is the request
    and result of an earlier call in this folder: once it holds `gathered`, the sources are not read
    again.
    """
    with ExitStack() as stack:
        sources = [] if "gathered" in recorded else _sources(arguments, configuration, stack)
        training = replay_output.OfflineTraining(folder, configuration)
        if sources:
            _check(sources, training.vocabulary)
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
) -> list[LabelledSource]:
    """Opens the sources, each under a distinct name."""
    conditions = parse_conditions(arguments.where)
    with_steps = needs_steps(conditions)
    encode = _tokenizer(Path(str(c.model.path)))
    found: list[LabelledSource] = []
    for number, named in enumerate(arguments.runs):
        path = Path(named)
        label = path.stem if path.suffix in JSONL else path.name
        label = label if label not in {other.label for other in found} else f"{label}-{number}"
        if path.suffix in JSONL:
            if not path.is_file():
                raise ConfigurationError(f"{named}: no such file; is the path right?")
            steps: dict[Address, int] = {}
            source = JsonLines(path, encode)
        else:
            opened: replay_output.ReplaySource = stack.enter_context(
                replay_output.open_replay_source(named, arguments.name)
            )
            steps = opened.recorded().step_of() if with_steps else {}
            source = RecordedSource(opened.log)
        found.append(LabelledSource(label, source, partial(_is_wanted, conditions, steps)))
    return found


def _is_wanted(
    conditions: list[FieldCondition], steps: dict[Address, int], trajectory: SourceTrajectory
) -> bool:
    step = None if trajectory.at is None else steps.get(trajectory.at)
    return not conditions or is_wanted_trajectory(
        conditions, trajectory.record, trajectory.timestamp_ms, step
    )


def _check(sources: list[LabelledSource], vocabulary: int) -> None:
    """Validate every line of every file before anything is written."""
    for labelled in sources:
        if isinstance(labelled.source, JsonLines):
            for trajectory in labelled.source.trajectories():
                check_tokens(labelled.label, trajectory.record, vocabulary)


def _tokenizer(model: Path) -> TextEncoder | None:
    """Returns a function from text to tokens, without special tokens; None without a tokenizer."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(path))  # pyright: ignore[reportUnknownMemberType]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return encode


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
