"""`rollstream replay RUN --from-step N --out DIR` trains the steps after N again (`main`), `--to
BUS` copies the records (`publish`).

A repeated step is right if its state hash equals the ledger's; with `--set` or `--where` the steps
after N are an experiment and not compared. The run is only read; the same command resumes.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rollstream.consumers.replay import topic_copy
from rollstream.consumers.replay.recorded_steps import RecordedSteps
from rollstream.errors import ConfigurationError
from rollstream.keep import replay, replay_output
from rollstream.look.query.fields import check_topic
from rollstream.look.query.looking import require_code
from rollstream.look.report.comparison import OverlaidRun, write_overlay
from rollstream.look.report.summary import open_history, read_history, summarise
from rollstream.look.report.write import write_report
from rollstream.run.config.config import fingerprint
from rollstream.run.config.run_folder import RunFolder, run_folder, write_configuration
from rollstream.run.config.run_model import MODEL, whole_model_folder
from rollstream.run.signals import count_steps, progress_bar, warn
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Message
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import is_dead_letter_topic

# The page that shows run and replay together.
OVERLAY_FILE = "beside.html"


def main(arguments: argparse.Namespace) -> int:
    """Returns 1 if a step differs from the ledger's state hash, else 0."""
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
    last = arguments.to_step
    if last is None and before is not None:
        # An interrupted replay keeps its last step, though the run may have made further ones.
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
    run = request.before, request.folder.path
    model = whole_model_folder(*run, folder.path / MODEL).absolute()
    target = folder, replay_output.replay_configuration(request.now, folder.path, model)
    start, learner = replay.find_replay_start(store, request, before, target)
    recorded.check_whole(range(start.behind.step + 1, request.last + 1))
    with replay_output.lock_replay_folder(folder.path):
        # Stored before the steps, so that an interrupted replay can be resumed.
        replay_output.write_replay_request(folder.path, request.identity(), start.begun())
        write_configuration(*target)
        _print_start(request, start.step, start.checkpoint or "the initial model")
        if start.behind.ledger is not None:
            warn(f"an earlier replay stopped after step {start.behind.step}: resuming there")
        hashes = {configured.configuration_hash for configured in recorded.configured}
        if hashes - {fingerprint(request.before)}:
            warn("the run changed its configuration; all steps use its last configuration")
        count_steps(
            replay.run_replay(source.log, recorded, request, start, learner, target), request.last
        )
        last = request.first if request.is_experiment else request.last
        result = {
            **start.begun(), "trained_again": request.first - start.step,
            "steps": request.last - request.first, "experiment": request.is_experiment,
            "compared": last - start.step,
            "differing": replay.differing_steps(target, recorded, start.step + 1, last),
        }  # fmt: skip
        replay_output.write_replay_request(folder.path, request.identity(), result)
    return result


def _reports(
    request: replay.ReplayRequest, folder: RunFolder, source: LogView, store: ObjectStore
) -> list[Path]:
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


def _print_start(request: replay.ReplayRequest, start: int, checkpoint_name: str) -> None:
    repeated, further = request.first - start, request.last - request.first
    warn(
        f"from {checkpoint_name}: {repeated} steps are repeated up to step {request.first}, "
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
    """Copies the topics, or the records that meet `--where`, byte for byte, and prints count and
    hash of each. Returns 0.
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
        present = _present(source, topics, bool(arguments.topic))
        copy_request = topic_copy.CopyRequest(
            present, arguments.to, _keep(source, arguments.where, present)
        )
        with closing(open_bus(arguments.to)) as target:
            topic_copy.prepare_target(source.log, target, copy_request)
            with progress_bar("records", topic_copy.count_records(source.log, present)) as advance:
                done = [
                    topic_copy.copy_topic(source.log, target, t, copy_request, advance)
                    for t in present
                ]
    if arguments.json:
        topic_lines = [dataclasses.asdict(copied) for copied in done]
        print(json.dumps({"to": arguments.to, "topics": topic_lines}))
    else:
        _print_copied(done, arguments.to)
    return 0


def _present(
    source: replay_output.ReplaySource, topics: Sequence[str], is_typed: bool
) -> list[str]:
    """The `topics` with records. Raises `ConfigurationError` if none has, or one that the user
    named has none.
    """
    present: list[str] = []
    history = ", ".join(topic_copy.HISTORY)
    for topic in dict.fromkeys(topics):
        if any(source.log.end(topic).values()):
            present.append(topic)
        elif is_typed:
            raise ConfigurationError(
                f"{source.location.name} holds no records in {topic}"
                + ("" if source.location.bus else f"; it is an archive, which keeps {history}")
            )
        else:
            warn(f"{topic} holds no records")
    if not present:
        raise ConfigurationError(f"{source.location.name} holds no records to copy")
    return present


def _keep(
    source: replay_output.ReplaySource, where: Sequence[str], topics: Sequence[str]
) -> Callable[[Message], bool] | None:
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
