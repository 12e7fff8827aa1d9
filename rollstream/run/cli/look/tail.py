"""`rollstream tail TOPIC [RUN]`: a topic's records from archive and log, partitions merged by
timestamp, one line or JSON object each. Invalid records are printed too, with their defect.
"""

import argparse
import heapq
import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rollstream.errors import ConfigurationError
from rollstream.look.monitor.format import plain_text
from rollstream.look.query.describe import describe
from rollstream.look.query.fields import (
    FieldCondition,
    check_topic,
    meets,
    parse_condition,
    record_fields,
)
from rollstream.look.query.locate import RunLocation, locate_asked_run
from rollstream.look.query.looking import open_run_view
from rollstream.look.query.output import json_value
from rollstream.look.query.record_times import utc_time
from rollstream.run.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser
from rollstream.run.cli.main import EXIT_INTERRUPTED
from rollstream.run.signals import listen_for_signals, warn
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.segments import Hole, LogRecord
from rollstream.streams.foreign_text import whole_number
from rollstream.streams.topics import ARCHIVED_TOPICS, is_dead_letter_topic

# Longest wait for new records, so Ctrl-C takes no longer.
WAIT_S = 0.25
KEY_SHOWN = 60  # characters
# Without --from and --last.
LAST_RECORDS = 10


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 trajectories --last 5",
        "trajectories --follow --where 'reward>=1' --where rollout=rollout-0",
        "ledger --from begin --where schema=step_done --json",
    )
    command.add_run(RUN_OR_ARCHIVE_HELP, before=("topic",))
    command.add_argument("topic", metavar="TOPIC", help="e.g. trajectories, ledger, status")
    command.add_argument(
        "--follow", action="store_true", help="keep printing new records until Ctrl-C"
    )
    command.add_argument(
        "--from",
        metavar="WHERE",
        dest="start",
        help="start at begin, end, or an offset (of each partition, or of the one of --partition)",
    )
    command.add_argument("--last", metavar="N", type=int, help="start N records before the end")
    command.add_argument("--partition", metavar="P", type=int, help="read only this partition")
    command.add_conditions(
        "only records whose field, e.g. version.number, is = != < <= > >= VALUE; ~ contains"
    )
    command.add_archive()
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    check_topic(arguments.topic)
    conditions = [parse_condition(text, arguments.topic) for text in arguments.where]
    _check(arguments)
    location = locate_asked_run(arguments.run, arguments.name, warn, arguments.is_trusted)
    stop = listen_for_signals().stop
    day = ""
    for record in _records(location, arguments, conditions, stop):
        if stop.is_set():
            break
        if arguments.json:
            print(json.dumps(tail_json(record)), flush=arguments.follow)
        else:
            day = _print(record, day, arguments.follow)
    return EXIT_INTERRUPTED if stop.is_set() and not arguments.follow else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.start is not None and arguments.last is not None:
        raise ConfigurationError("--from and --last both set the start: give one of them")
    if arguments.last is not None and arguments.last < 1:
        raise ConfigurationError(f"--last must be ≥ 1, got {arguments.last}")
    if arguments.start not in (None, "begin", "end") and whole_number(arguments.start) is None:
        raise ConfigurationError(
            f"--from {arguments.start!r}: write begin, end or an offset, a whole number below 2^63"
        )


def _records(
    location: RunLocation,
    arguments: argparse.Namespace,
    conditions: Sequence[FieldCondition],
    stop: threading.Event,
) -> Iterator[LogRecord]:
    """The selected records, each partition in its own order and all merged by timestamp; then, with
    `--follow`, new ones until `stop`, ordered within one poll. Undecodable bytes come with the
    reason, records of a replaced holder (invariant 7) as void.
    """
    topic = arguments.topic
    with open_run_view(location) as view:
        _check_topic(view, location, arguments)
        ends = _chosen_partitions(view.end(topic), arguments)
        begins = _chosen_partitions(view.begin(topic), arguments)
        starts = {p: _start(arguments, begins[p], end, conditions) for p, end in ends.items()}
        partitions = (
            view.topic(topic, {p: start}, on_hole=_warn, skip_damaged=arguments.skip_corrupt)
            for p, start in starts.items()
        )
        records = heapq.merge(*(partition.messages(ends) for partition in partitions), key=_time)
        yield from _last(records, conditions, arguments)
        if arguments.follow:
            reader = view.topic(topic, ends, on_hole=_warn)
            while not stop.is_set():
                new = sorted(reader.poll(wait_s=WAIT_S), key=_time)
                yield from _matching(new, conditions)


def _check_topic(view: LogView, location: RunLocation, arguments: argparse.Namespace) -> None:
    topic = arguments.topic
    if view.bus is None and arguments.follow:
        raise ConfigurationError(f"{location.name} has no log to follow, only an archive")
    if view.bus is None and topic not in ARCHIVED_TOPICS:
        raise ConfigurationError(
            f"{location.name} has no log, only an archive, and {topic} is not archived; "
            f"archived are {', '.join(ARCHIVED_TOPICS)}"
        )
    if view.bus is not None and not view.has(topic):
        raise ConfigurationError(f"{location.name} has no topic {topic} yet")


def _warn(hole: Hole) -> None:
    warn(str(hole))


def _time(record: LogRecord) -> tuple[int, int]:
    return record.timestamp_ms, record.address.partition


def _matching(
    records: Iterable[LogRecord], conditions: Sequence[FieldCondition]
) -> Iterator[LogRecord]:
    return (record for record in records if not conditions or meets(record, conditions, {}))


def _start(
    arguments: argparse.Namespace, begin: int, end: int, conditions: Sequence[FieldCondition]
) -> int:
    if arguments.start == "end":
        return end
    if arguments.start not in (None, "begin"):
        return min(int(arguments.start), end)
    # The last records that meet conditions may be anywhere.
    if arguments.start == "begin" or conditions:
        return begin
    return max(begin, end - (arguments.last or LAST_RECORDS))


def _last(
    records: Iterable[LogRecord],
    conditions: Sequence[FieldCondition],
    arguments: argparse.Namespace,
) -> Iterator[LogRecord]:
    matching = _matching(records, conditions)
    if arguments.start is not None:
        return matching
    return iter(deque(matching, maxlen=arguments.last or LAST_RECORDS))


def _chosen_partitions(offsets: dict[int, int], arguments: argparse.Namespace) -> dict[int, int]:
    if arguments.partition is None:
        return offsets
    if arguments.partition not in offsets:
        numbers = (
            f"{min(offsets)} to {max(offsets)}" if len(offsets) > 1 else f"only {min(offsets)}"
        )
        raise ConfigurationError(
            f"{arguments.topic} has no partition {arguments.partition}; it has {numbers}"
        )
    return {arguments.partition: offsets[arguments.partition]}


def tail_json(record: LogRecord) -> dict[str, Any]:
    """Returns the record with complete arrays; `reason` is set if the bytes are not a record."""
    where = {"topic": record.topic, "timestamp_ms": record.timestamp_ms}
    why = {"reason": record.reason} if record.record is None else {}
    return json_value(where | record_fields(record, with_arrays=True) | why)


def _print(record: LogRecord, day: str, flush: bool) -> str:
    """Prints the record after a line with its date if that is not `day`; returns the date."""
    when = utc_time(record.timestamp_ms)
    if when is not None and when.date().isoformat() != day:
        day = when.date().isoformat()
        print(f"{day} (UTC)")
    at = f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}" if when else f"{record.timestamp_ms} ms"
    words = (
        describe(record.record) if record.record is not None else f"not a record: {record.reason}"
    )
    if record.record is None or is_dead_letter_topic(record.topic):
        words += f", key {plain_text(record.key, KEY_SHOWN)}"  # it often names the program
    void = " (void)" if record.void else ""
    position = f"{record.address.partition}:{record.address.offset}"
    print(f"{at} {position:>8}  {words}{void}", flush=flush)
    return day
