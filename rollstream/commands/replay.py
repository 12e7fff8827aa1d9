"""`rollstream replay RUN --from-step N --out DIR`: steps trained again on identical data
(docs/replay.md).

Exit codes: 0 every hash that can be compared is the ledger's, 1 some differ or something is gone.
"""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from consumers.replay.recorded import read_recorded
from consumers.replay.whole_log import WholeLog
from rollstream.analysis.live import has_topic, open_log
from rollstream.analysis.place import Place, find_place
from rollstream.config import fingerprint
from rollstream.folder import RunFolder
from rollstream.replaying import Asked, asked_of, check_folder, make_folder, note
from rollstream.report.opening import open_history, run_folder
from rollstream.report.overlay import Run, write_overlay
from rollstream.report.reading import read_history
from rollstream.report.summary import summarise
from rollstream.report.write import write_report
from storage.connect import open_store
from storage.objects import ObjectStore
from streams.errors import ConfigurationError
from streams.records import StepDone

BESIDE = "beside.html"


def main(arguments: argparse.Namespace) -> int:
    """Train, compare, report."""
    run = run_folder(arguments.run)
    place = find_place(str(run.path))
    check_folder(Path(arguments.out), run)
    if not place.has_store:
        raise ConfigurationError(f"{place.name} has no store: nothing is kept to replay from")
    store = open_store(place.store)
    with closing(_whole(place, store)) as source:
        recorded = read_recorded(source)
        asked = asked_of(
            run, arguments.overrides, arguments.where, arguments.from_step, arguments.to_step,
            recorded,
        )  # fmt: skip
        from rollstream.replay_run import differing, find_start, replayed  # torch: seconds

        start, learner = find_start(store, asked)
        recorded.check_whole(range(start.step + 1, asked.last + 1))
        folder, configuration = make_folder(asked, Path(arguments.out))
        begun = {"checkpoint": start.checkpoint and str(start.checkpoint), "start": start.step}
        note(folder, asked, **begun)
        _tell_beginning(asked, start.step, str(start.checkpoint or "the starting model"))
        hashes = {configured.configuration_hash for configured in recorded.configured}
        if hashes - {fingerprint(asked.before)}:
            _say("the run changed its configuration; all steps are trained under its last one")
        steps = replayed(source, recorded, asked, start, learner, (folder, configuration))
        own = asked.first if asked.is_experiment else asked.last
        wrong = differing(steps, recorded, own, _progress(asked.last))
        result = {
            **begun, "trained_again": asked.first - start.step, "steps": asked.last - asked.first,
            "experiment": asked.is_experiment, "compared": own - start.step, "differing": wrong,
        }  # fmt: skip
        note(folder, asked, **result)
        pages = _reports(asked, folder, source, store)
    if arguments.json:
        print(json.dumps({"out": str(folder.path), **result}))
    else:
        _tell_end(asked, result, pages)
    return 1 if wrong else 0


def _whole(place: Place, store: ObjectStore) -> WholeLog:
    bus = None if place.bus is None else open_log(place)
    if bus is not None and not has_topic(bus, "ledger"):
        bus.close()
        bus = None
    return WholeLog(bus, store, place.run or "run")


def _progress(last: int) -> Any:
    shown = sys.stderr.isatty()

    def tell(done: StepDone) -> None:
        if shown:
            end = "\n" if done.step == last else ""
            print(f"\r\x1b[Kstep {done.step} of {last}", end=end, file=sys.stderr, flush=True)

    return tell


def _reports(asked: Asked, folder: RunFolder, source: WholeLog, store: ObjectStore) -> list[Path]:
    """The replay's own, and of both: the run's is read here as all of it is, without a trace."""
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
    _say(
        f"from {named}: {again} steps are trained again up to step {asked.first}, "
        f"then {on} up to step {asked.last}"
    )
    if asked.is_experiment:
        _say(f"an experiment from step {asked.first + 1} on: {asked.words()}")


def _tell_end(asked: Asked, result: dict[str, Any], pages: list[Path]) -> None:
    wrong, compared = result["differing"], result["compared"]
    if wrong:
        print(f"{len(wrong)} of {compared} steps differ from the ledger: {wrong}")
    elif compared:
        print(f"identical: all {compared} steps have the state hash that the ledger has")
    if asked.is_experiment:
        print(f"experiment, steps {asked.first + 1} to {asked.last}: {asked.words()}")
    for page in pages:
        print(f"report: {page}")


def _say(text: str) -> None:
    print(f"rollstream: {text}", file=sys.stderr)
