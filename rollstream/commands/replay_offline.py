"""`rollstream replay SOURCE… --offline CONFIG --out DIR`: trains on recorded trajectories.

Sources are logs and archives of runs, and files of JSON lines.
"""

import argparse
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from consumers.replay.gathering import Archived, Draft, Named, check
from consumers.replay.jsonl import Encode, JsonLines
from rollstream.analysis.fields import Condition
from rollstream.commands.replay_words import bar, say, tell_steps
from rollstream.config import Configuration, load
from rollstream.folder import RunFolder, folder_of, model_folder, settle
from rollstream.replay_filter import asks_for_steps, conditions_of, keeps
from rollstream.replay_folder import (
    check_place,
    held,
    note,
    noted,
    own_configuration,
    refuse_other_wish,
)
from rollstream.replay_source import Opened, opened
from rollstream.report.opening import open_history
from rollstream.report.summary import summarise
from rollstream.report.write import write_report
from streams.admissible import KINDS
from streams.errors import ConfigurationError
from streams.records import Address

JSONL = (".jsonl", ".ndjson")
WORDS = {
    "logprobs_computed": "of them had no log-probabilities: those of the initial model are used",
    "filtered_out": "others are left out by --where",
    "duplicate": "others repeat a trajectory: only the first is used",
    "unreadable": "records are unreadable and left out",
    **{
        f"refused_{kind}": f"others cannot be trained ({kind}: docs/learning.md) and are left out"
        for kind in KINDS
    },
}


def main(arguments: argparse.Namespace) -> int:
    """Gather the trajectories, train, and write the report."""
    folder = RunFolder(Path(arguments.out).absolute())
    for named in arguments.runs:
        path = Path(named).absolute()
        check_place(folder.path, path.parent if path.name == "config.json" else path)
    configuration = _configuration(arguments, folder)
    sources = [named if "://" in named else str(Path(named).absolute()) for named in arguments.runs]
    wish = {"sources": sources, "name": arguments.name, "where": list(arguments.where)}
    before = noted(folder.path)
    if before is not None:
        refuse_other_wish(folder.path, before, wish)
    result = _trained(arguments, folder, configuration, wish, before or {})
    history = open_history(folder)
    write_report(history, summarise(history), folder.report)
    if arguments.json:
        print(json.dumps({"out": str(folder.path), **result}))
    else:
        _tell_end(result, folder)
    return 0


def _configuration(arguments: argparse.Namespace, folder: RunFolder) -> Configuration:
    """Returns the given configuration with all data inside the folder and without a lag limit."""
    given = load(arguments.offline, arguments.overrides)
    model = model_folder(given, folder_of(given).path).absolute()
    if not (model / "config.json").is_file():
        raise ConfigurationError(
            f"{model} holds no initial model; name a folder with a Hugging Face checkpoint: "
            "--set model.path=DIR"
        )
    own = own_configuration(given, folder.path, model)
    return own.model_copy(update={"dispatch": own.dispatch.model_copy(update={"max_lag": None})})


def _trained(
    arguments: argparse.Namespace,
    folder: RunFolder,
    configuration: Configuration,
    wish: dict[str, Any],
    before: dict[str, Any],
) -> dict[str, Any]:
    """Gathers and trains; returns the counts. Sources are not read again after gathering
    completed.
    """
    with ExitStack() as stack:
        sources = [] if "gathered" in before else _sources(arguments, configuration, stack)
        from rollstream.replay_offline import Offline  # imports torch, which takes seconds

        training = Offline(folder, configuration)
        if sources:
            _check(sources, training.vocabulary)
        stack.enter_context(held(folder.path))
        if "gathered" not in before:
            note(folder.path, wish)
        settle(folder, configuration)
        gathered = before.get("gathered")
        if gathered is None:
            with bar("gathering", None):
                gathered = dict(training.gather(sources))
            note(folder.path, wish, {"gathered": gathered})
        _tell_gathered(gathered, configuration)
        tell_steps(training.train(), configuration.trainer.steps)
        result = {"gathered": gathered, **training.outcome()}
        note(folder.path, wish, result)
    return result


def _sources(arguments: argparse.Namespace, c: Configuration, stack: ExitStack) -> list[Named]:
    """Opens the sources, each under a distinct name."""
    conditions = conditions_of(arguments.where)
    asked = asks_for_steps(conditions)
    encode = _tokenizer(Path(str(c.model.path)))
    found: list[Named] = []
    for number, named in enumerate(arguments.runs):
        path = Path(named)
        label = path.stem if path.suffix in JSONL else path.name
        label = label if label not in {one.label for one in found} else f"{label}-{number}"
        if path.suffix in JSONL:
            if not path.is_file():
                raise ConfigurationError(f"{named}: no such file; is the path right?")
            steps: dict[Address, int] = {}
            source = JsonLines(path, encode)
        else:
            here: Opened = stack.enter_context(opened(named, arguments.name))
            steps = here.recorded().step_of() if asked else {}
            source = Archived(here.log)
        found.append(Named(label, source, partial(_is_wanted, conditions, steps)))
    return found


def _is_wanted(conditions: list[Condition], steps: dict[Address, int], draft: Draft) -> bool:
    step = None if draft.at is None else steps.get(draft.at)
    return not conditions or keeps(conditions, draft.record, draft.timestamp_ms, step)


def _check(sources: list[Named], vocabulary: int) -> None:
    """Validate every line of every file before anything is written."""
    for one in sources:
        if isinstance(one.source, JsonLines):
            for draft in one.source.trajectories():
                check(one.label, draft.record, vocabulary)


def _tokenizer(model: Path) -> Encode | None:
    """Returns a function from text to tokens, without special tokens; None without a tokenizer."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(path))  # pyright: ignore[reportUnknownMemberType]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return encode


def _tell_gathered(gathered: dict[str, int], c: Configuration) -> None:
    per_step = c.trainer.groups_per_step
    say(
        f"{gathered.get('trajectories', 0)} trajectories in {gathered.get('groups', 0)} groups, "
        f"{per_step} groups a step (trainer.groups_per_step), at most {c.trainer.steps} steps"
    )
    for name, words in WORDS.items():
        if gathered.get(name):
            say(f"{gathered[name]} {words}")


def _tell_end(result: dict[str, Any], folder: RunFolder) -> None:
    more = f", {result['left_over']} groups left over" if result["left_over"] else ""
    print(f"{result['steps']} steps trained{more}")
    if result["closed"]:
        print(f"{result['closed']} groups had nothing to train and were closed (reasons: ledger)")
    print(f"report: {folder.report}")
