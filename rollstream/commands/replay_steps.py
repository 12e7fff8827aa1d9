"""`rollstream replay RUN --from-step N --out DIR`: repeats training steps on the recorded data."""

import argparse
import json
from pathlib import Path
from typing import Any

from consumers.replay.recorded import RecordedSteps
from rollstream.commands.replay_words import say, tell_steps
from rollstream.config import fingerprint
from rollstream.folder import RunFolder, model_folder, settle
from rollstream.replay_folder import (
    check_place,
    held,
    note,
    noted,
    own_configuration,
    refuse_other_wish,
)
from rollstream.replay_source import Opened, opened
from rollstream.replaying import Asked, asked_of
from rollstream.report.opening import open_history, run_folder
from rollstream.report.overlay import Run, write_overlay
from rollstream.report.reading import read_history
from rollstream.report.summary import summarise
from rollstream.report.write import write_report
from storage.archive.whole_log import WholeLog
from storage.objects import ObjectStore
from streams.errors import ConfigurationError

BESIDE = "beside.html"


def main(arguments: argparse.Namespace) -> int:
    """Repeat the steps, compare state hashes with the ledger, and write the reports."""
    run = run_folder(arguments.runs[0])
    out = Path(arguments.out).absolute()
    check_place(out, run.path)
    with opened(str(run.path)) as source:
        if source.store is None:
            name = source.place.name
            raise ConfigurationError(f"{name} has no store, so it has no checkpoint to replay from")
        recorded, before = source.recorded(), noted(out)
        asked = _asked(arguments, run, recorded, before)
        if before is not None:
            refuse_other_wish(out, before, asked.wish())
        folder = RunFolder(out)
        result = _trained(source, source.store, recorded, asked, before, folder)
        pages = _reports(asked, folder, source.log, source.store)
    if arguments.json:
        print(json.dumps({"out": str(out), **result}))
    else:
        _tell_end(asked, result, pages)
    return 1 if result["differing"] else 0


def _asked(
    arguments: argparse.Namespace,
    run: RunFolder,
    recorded: RecordedSteps,
    before: dict[str, Any] | None,
) -> Asked:
    """A resumed replay keeps its last step, even if the run has made further steps since."""
    last = arguments.to_step
    if last is None and before is not None:
        last = before.get("to_step")
    return asked_of(run, arguments.overrides, arguments.where, arguments.from_step, last, recorded)


def _trained(
    source: Opened,
    store: ObjectStore,
    recorded: RecordedSteps,
    asked: Asked,
    before: dict[str, Any] | None,
    folder: RunFolder,
) -> dict[str, Any]:
    """Repeats the steps; returns the counts and the differing steps."""
    from rollstream.replay_run import (
        differing,
        find_start,
        replayed,
    )  # imports torch, which takes seconds

    model = model_folder(asked.before, asked.folder.path).absolute()
    own = folder, own_configuration(asked.now, folder.path, model)
    start, learner = find_start(store, asked, before, own)
    recorded.check_whole(range(start.behind.step + 1, asked.last + 1))
    with held(folder.path):
        note(folder.path, asked.wish(), start.begun())
        settle(*own)
        _tell_beginning(asked, start.step, start.checkpoint or "the initial model")
        if start.behind.ledger is not None:
            say(f"an earlier replay stopped after step {start.behind.step}: resuming there")
        hashes = {configured.configuration_hash for configured in recorded.configured}
        if hashes - {fingerprint(asked.before)}:
            say("the run changed its configuration; all steps use its last configuration")
        tell_steps(replayed(source.log, recorded, asked, start, learner, own), asked.last)
        last = asked.first if asked.is_experiment else asked.last
        result = {
            **start.begun(), "trained_again": asked.first - start.step,
            "steps": asked.last - asked.first, "experiment": asked.is_experiment,
            "compared": last - start.step,
            "differing": differing(own, recorded, start.step + 1, last),
        }  # fmt: skip
        note(folder.path, asked.wish(), result)
    return result


def _reports(asked: Asked, folder: RunFolder, source: WholeLog, store: ObjectStore) -> list[Path]:
    """Writes the report of the replay and a page that compares it with the run; returns both paths.
    The run is only read.
    """
    history = open_history(folder)
    summary = summarise(history)
    write_report(history, summary, folder.report)
    before = read_history(source, store, asked.folder)
    runs = [
        Run(asked.folder.path.name, before, summarise(before)),
        Run(folder.path.name, history, summary),
    ]
    write_overlay(runs, folder.path / BESIDE)
    return [folder.report, folder.path / BESIDE]


def _tell_beginning(asked: Asked, start: int, named: str) -> None:
    again, on = asked.first - start, asked.last - asked.first
    say(
        f"from {named}: {again} steps are repeated up to step {asked.first}, "
        f"then {on} up to step {asked.last}"
    )
    if asked.is_experiment:
        say(f"experiment from step {asked.first + 1} on: {asked.words()}")


def _tell_end(asked: Asked, result: dict[str, Any], pages: list[Path]) -> None:
    wrong, compared = result["differing"], result["compared"]
    if wrong:
        print(f"{len(wrong)} of {compared} steps differ from the ledger: {wrong}")
    elif compared:
        print(f"identical: all {compared} steps have the state hash of the ledger")
    if asked.is_experiment:
        print(f"experiment, steps {asked.first + 1} to {asked.last}: {asked.words()}")
    for page in pages:
        print(f"report: {page}")
