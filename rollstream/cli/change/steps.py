"""Two kinds of `rollstream replay RUN`: `--from-step N --out DIR` trains the run's steps after N
again on the recorded data (`main`), `--to BUS` copies its records to another bus (`publish`).

Training begins at the newest checkpoint up to step N. A repeated step is right if its state hash
equals the one in the run's ledger. With other settings or a selection of trajectories (`--set`,
`--where`) the steps after N are an experiment, and only those up to N are compared. The run is only
read; the same command resumes an interrupted replay.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rollstream.analysis.fields import check_topic
from rollstream.analysis.looking import require_code
from rollstream.cli.signals import count_steps, progress_bar, warn
from rollstream.config.config import fingerprint
from rollstream.config.run_folder import RunFolder, run_folder, write_configuration
from rollstream.config.run_model import MODEL, whole_model_folder
from rollstream.consumers.replay import topic_copy
from rollstream.consumers.replay.recorded_steps import RecordedSteps
from rollstream.errors import ConfigurationError
from rollstream.report.comparison import OverlaidRun, write_overlay
from rollstream.report.summary import open_history, read_history, summarise
from rollstream.report.write import write_report
from rollstream.runs import replay, replay_output
from rollstream.storage.log_view import LogView
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Message
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import is_dead_letter_topic

OVERLAY_FILE = "beside.html"
"""Name of the page that shows run and replay together."""


def main(arguments: argparse.Namespace) -> int:
    """Train the steps again, compare their state hashes with the run's ledger, and write the
    reports. Returns the exit code: 1 if a step differs, else 0.
    """
    run = run_folder(arguments.runs[0])
    out = Path(arguments.out).absolute()
    replay_output.check_outside_run(out, run.path)
    with replay_output.open_replay_source(str(run.path), is_trusted=arguments.is_trusted) as source:
        require_code(source.location, "trainer")
        if source.store is None:
            name = source.location.name
            raise ConfigurationError(f"{name} has no store, so it has no checkpoint to replay from")
        recorded, before = source.recorded(), replay_output.read_replay_request(out)
        request = _request(arguments, run, recorded, before)
        if before is not None:
            replay_output.refuse_other_request(out, before, request.identity())
        folder = RunFolder(out)
        result = _repeat_steps(source, source.store, recorded, request, before, folder)
        pages = _reports(request, folder, source.log, source.store)
    if arguments.json:
        print(json.dumps({"out": str(out), **result}))
    else:
        _print_result(request, result, pages)
    return 1 if result["differing"] else 0


def _request(
    arguments: argparse.Namespace,
    run: RunFolder,
    recorded: RecordedSteps,
    before: dict[str, Any] | None,
) -> replay.ReplayRequest:
    """Returns what the command line asks for. `before` is the request that the folder of an
    interrupted replay records, None in a new folder: its last step stays the last one, even if the
    run has made further steps meanwhile.
    """
    last = arguments.to_step
    if last is None and before is not None:
        last = before.get("to_step")
    return replay.replay_request(
        run, arguments.overrides, arguments.where, arguments.from_step, last, recorded
    )


def _repeat_steps(
    source: replay_output.ReplaySource,
    store: ObjectStore,
    recorded: RecordedSteps,
    request: replay.ReplayRequest,
    before: dict[str, Any] | None,
    folder: RunFolder,
) -> dict[str, Any]:
    """Trains the steps into `folder`, and returns the counts of steps by kind and the numbers of
    those that differ. The request is stored in the folder before, so that an interrupted replay can
    be resumed, and the result after.
    """
    run = request.before, request.folder.path
    model = whole_model_folder(*run, folder.path / MODEL).absolute()
    own = folder, replay_output.replay_configuration(request.now, folder.path, model)
    start, learner = replay.find_replay_start(store, request, before, own)
    recorded.check_whole(range(start.behind.step + 1, request.last + 1))
    with replay_output.lock_replay_folder(folder.path):
        replay_output.write_replay_request(folder.path, request.identity(), start.begun())
        write_configuration(*own)
        _print_start(request, start.step, start.checkpoint or "the initial model")
        if start.behind.ledger is not None:
            warn(f"an earlier replay stopped after step {start.behind.step}: resuming there")
        hashes = {configured.configuration_hash for configured in recorded.configured}
        if hashes - {fingerprint(request.before)}:
            warn("the run changed its configuration; all steps use its last configuration")
        count_steps(
            replay.run_replay(source.log, recorded, request, start, learner, own), request.last
        )
        last = request.first if request.is_experiment else request.last
        result = {
            **start.begun(), "trained_again": request.first - start.step,
            "steps": request.last - request.first, "experiment": request.is_experiment,
            "compared": last - start.step,
            "differing": replay.differing_steps(own, recorded, start.step + 1, last),
        }  # fmt: skip
        replay_output.write_replay_request(folder.path, request.identity(), result)
    return result


def _reports(
    request: replay.ReplayRequest, folder: RunFolder, source: LogView, store: ObjectStore
) -> list[Path]:
    """Writes the replay's report, and a page with the curves of run and replay; returns the paths
    of both.
    """
    history = open_history(folder)
    summary = summarise(history)
    write_report(history, summary, folder.report)
    before = read_history(source, request.folder)
    runs = [
        OverlaidRun(request.folder.path.name, before, summarise(before)),
        OverlaidRun(folder.path.name, history, summary),
    ]
    write_overlay(runs, folder.path / OVERLAY_FILE)
    return [folder.report, folder.path / OVERLAY_FILE]


def _print_start(request: replay.ReplayRequest, start: int, named: str) -> None:
    """Print which steps are trained. `start` is the step of the checkpoint called `named`."""
    repeated, further = request.first - start, request.last - request.first
    warn(
        f"from {named}: {repeated} steps are repeated up to step {request.first}, "
        f"then {further} up to step {request.last}"
    )
    if request.is_experiment:
        warn(f"experiment from step {request.first + 1} on: {request.words()}")


def _print_result(request: replay.ReplayRequest, result: dict[str, Any], pages: list[Path]) -> None:
    wrong, compared = result["differing"], result["compared"]
    if wrong:
        print(f"{len(wrong)} of {compared} steps differ from the ledger: {wrong}")
    elif compared:
        print(f"identical: all {compared} steps have the state hash of the ledger")
    if request.is_experiment:
        print(f"experiment, steps {request.first + 1} to {request.last}: {request.words()}")
    for page in pages:
        print(f"report: {page}")


def publish(arguments: argparse.Namespace) -> int:
    """Copy the topics to another bus, byte for byte, and print the number and the hash of each
    topic's records; `--where` selects records. Returns the exit code 0.
    """
    topics = arguments.topic or (["trajectories"] if arguments.where else [*topic_copy.HISTORY])
    for topic in topics:
        check_topic(topic)
        if is_dead_letter_topic(topic):
            raise ConfigurationError(f"{topic} holds undecodable bytes; it is not copied")
    source_of = replay_output.open_replay_source(
        arguments.runs[0], arguments.name, arguments.is_trusted
    )
    with source_of as source:
        here = _present(source, topics, bool(arguments.topic))
        wanted = topic_copy.CopyRequest(here, arguments.to, _keep(source, arguments.where, here))
        with closing(open_bus(arguments.to)) as target:
            topic_copy.prepare_target(source.log, target, wanted)
            with progress_bar("records", topic_copy.count_records(source.log, here)) as advance:
                done = [topic_copy.copy_topic(source.log, target, t, wanted, advance) for t in here]
    if arguments.json:
        found = [dataclasses.asdict(copied) for copied in done]
        print(json.dumps({"to": arguments.to, "topics": found}))
    else:
        _print_copied(done, arguments.to)
    return 0


def _present(source: replay_output.ReplaySource, topics: Sequence[str], named: bool) -> list[str]:
    """Returns those of `topics` that have records in the source. Raises `ConfigurationError` if
    none has. If the user `named` the topics, each must have some; else empty ones are left out with
    a warning.
    """
    here: list[str] = []
    history = ", ".join(topic_copy.HISTORY)
    for topic in dict.fromkeys(topics):
        if any(source.log.end(topic).values()):
            here.append(topic)
        elif named:
            raise ConfigurationError(
                f"{source.location.name} holds no records in {topic}"
                + ("" if source.location.bus else f"; it is an archive, which keeps {history}")
            )
        else:
            warn(f"{topic} holds no records")
    if not here:
        raise ConfigurationError(f"{source.location.name} holds no records to copy")
    return here


def _keep(
    source: replay_output.ReplaySource, where: Sequence[str], topics: Sequence[str]
) -> Callable[[Message], bool] | None:
    """Returns the filter of the messages to copy, by the conditions `where`; None without any."""
    if not where:
        return None
    conditions = {topic: replay.parse_conditions(where, topic) for topic in topics}
    with_steps = any(
        replay.needs_steps(conditions[topic]) for topic in topics if topic == "trajectories"
    )
    return replay.message_filter(conditions, source.recorded().step_of() if with_steps else {})


def _print_copied(done: Sequence[topic_copy.CopiedTopic], to: str) -> None:
    for copied in done:
        more = [
            f"{number} {what}"
            for number, what in (
                (copied.left_out, "left out"),
                (copied.already, "were there before"),
                (copied.forgotten, "truncated in the source"),
            )
            if number
        ]
        beside = f" ({', '.join(more)})" if more else ""
        print(f"{copied.topic}: {copied.records} records, content {copied.content_hash}{beside}")
    print(f"{to} holds the same bytes, partitions and order as the source")
