"""`rollstream replay RUN --from-step N --out DIR`: repeats training steps on the recorded data."""

import argparse
import json
from pathlib import Path
from typing import Any

from rollstream.cli.change.progress import count_steps
from rollstream.cli.signals import warn
from rollstream.config.config import fingerprint
from rollstream.config.run_folder import RunFolder, model_folder, write_configuration
from rollstream.consumers.replay.recorded_steps import RecordedSteps
from rollstream.errors import ConfigurationError
from rollstream.report.comparison import OverlaidRun, write_overlay
from rollstream.report.reading import open_history, read_history, run_folder
from rollstream.report.summary import summarise
from rollstream.report.write import write_report
from rollstream.runs.replay import ReplayRequest, replay_request
from rollstream.runs.replay_output import (
    ReplaySource,
    check_outside_run,
    lock_replay_folder,
    open_replay_source,
    read_replay_request,
    refuse_other_request,
    replay_configuration,
    write_replay_request,
)
from rollstream.storage.log_view import LogView
from rollstream.storage.stores.base import ObjectStore

OVERLAY_FILE = "beside.html"


def main(arguments: argparse.Namespace) -> int:
    """Repeat the steps, compare state hashes with the ledger, and write the reports."""
    run = run_folder(arguments.runs[0])
    out = Path(arguments.out).absolute()
    check_outside_run(out, run.path)
    with open_replay_source(str(run.path)) as source:
        if source.store is None:
            name = source.location.name
            raise ConfigurationError(f"{name} has no store, so it has no checkpoint to replay from")
        recorded, before = source.recorded(), read_replay_request(out)
        asked = _asked(arguments, run, recorded, before)
        if before is not None:
            refuse_other_request(out, before, asked.wish())
        folder = RunFolder(out)
        result = _trained(source, source.store, recorded, asked, before, folder)
        pages = _reports(asked, folder, source.log, source.store)
    if arguments.json:
        print(json.dumps({"out": str(out), **result}))
    else:
        _print_result(asked, result, pages)
    return 1 if result["differing"] else 0


def _asked(
    arguments: argparse.Namespace,
    run: RunFolder,
    recorded: RecordedSteps,
    before: dict[str, Any] | None,
) -> ReplayRequest:
    """A resumed replay keeps its last step, even if the run has made further steps since."""
    last = arguments.to_step
    if last is None and before is not None:
        last = before.get("to_step")
    return replay_request(
        run, arguments.overrides, arguments.where, arguments.from_step, last, recorded
    )


def _trained(
    source: ReplaySource,
    store: ObjectStore,
    recorded: RecordedSteps,
    asked: ReplayRequest,
    before: dict[str, Any] | None,
    folder: RunFolder,
) -> dict[str, Any]:
    """Repeats the steps; returns the counts and the differing steps."""
    from rollstream.runs.replay import (  # imports torch, which takes seconds
        differing_steps,
        find_replay_start,
        run_replay,
    )

    model = model_folder(asked.before, asked.folder.path).absolute()
    own = folder, replay_configuration(asked.now, folder.path, model)
    start, learner = find_replay_start(store, asked, before, own)
    recorded.check_whole(range(start.behind.step + 1, asked.last + 1))
    with lock_replay_folder(folder.path):
        write_replay_request(folder.path, asked.wish(), start.begun())
        write_configuration(*own)
        _print_start(asked, start.step, start.checkpoint or "the initial model")
        if start.behind.ledger is not None:
            warn(f"an earlier replay stopped after step {start.behind.step}: resuming there")
        hashes = {configured.configuration_hash for configured in recorded.configured}
        if hashes - {fingerprint(asked.before)}:
            warn("the run changed its configuration; all steps use its last configuration")
        count_steps(run_replay(source.log, recorded, asked, start, learner, own), asked.last)
        last = asked.first if asked.is_experiment else asked.last
        result = {
            **start.begun(), "trained_again": asked.first - start.step,
            "steps": asked.last - asked.first, "experiment": asked.is_experiment,
            "compared": last - start.step,
            "differing": differing_steps(own, recorded, start.step + 1, last),
        }  # fmt: skip
        write_replay_request(folder.path, asked.wish(), result)
    return result


def _reports(
    asked: ReplayRequest, folder: RunFolder, source: LogView, store: ObjectStore
) -> list[Path]:
    """Writes the report of the replay and a page that compares it with the run; returns both paths.
    The run is only read.
    """
    history = open_history(folder)
    summary = summarise(history)
    write_report(history, summary, folder.report)
    before = read_history(source, asked.folder)
    runs = [
        OverlaidRun(asked.folder.path.name, before, summarise(before)),
        OverlaidRun(folder.path.name, history, summary),
    ]
    write_overlay(runs, folder.path / OVERLAY_FILE)
    return [folder.report, folder.path / OVERLAY_FILE]


def _print_start(asked: ReplayRequest, start: int, named: str) -> None:
    again, on = asked.first - start, asked.last - asked.first
    warn(
        f"from {named}: {again} steps are repeated up to step {asked.first}, "
        f"then {on} up to step {asked.last}"
    )
    if asked.is_experiment:
        warn(f"experiment from step {asked.first + 1} on: {asked.words()}")


def _print_result(asked: ReplayRequest, result: dict[str, Any], pages: list[Path]) -> None:
    wrong, compared = result["differing"], result["compared"]
    if wrong:
        print(f"{len(wrong)} of {compared} steps differ from the ledger: {wrong}")
    elif compared:
        print(f"identical: all {compared} steps have the state hash of the ledger")
    if asked.is_experiment:
        print(f"experiment, steps {asked.first + 1} to {asked.last}: {asked.words()}")
    for page in pages:
        print(f"report: {page}")
