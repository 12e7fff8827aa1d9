"""`rollstream tail TOPIC [RUN]`: prints a topic's records, one readable line each."""

import argparse
import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rollstream.analysis.fields import Condition, check_topic, condition
from rollstream.analysis.lines import in_words
from rollstream.analysis.live import has_topic, open_log
from rollstream.analysis.passing import Log, Passing, in_json, matching
from rollstream.analysis.place import Place, asked_place
from rollstream.commands.pipes import ending_quietly
from rollstream.commands.query import warn
from rollstream.commands.signals import listen
from rollstream.main import INTERRUPTED
from streams.errors import ConfigurationError

LAST = 10  # records printed without --from and --last


@ending_quietly
def main(arguments: argparse.Namespace) -> int:
    """Print the records, and with `--follow` new ones until Ctrl-C."""
    check_topic(arguments.topic)
    conditions = [condition(text, arguments.topic) for text in arguments.where]
    _check(arguments)
    place = asked_place(arguments.run, arguments.name, warn)
    stop = listen().stop
    day = ""
    for one in _passing(place, arguments, conditions, stop):
        if stop.is_set():
            break
        if arguments.json:
            print(json.dumps(in_json(arguments.topic, one)), flush=arguments.follow)
        else:
            day = _print(one, day, arguments.follow)
    return INTERRUPTED if stop.is_set() and not arguments.follow else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.start is not None and arguments.last is not None:
        raise ConfigurationError("--from and --last both set the start: give one of them")
    if arguments.last is not None and arguments.last < 1:
        raise ConfigurationError(f"--last must be ≥ 1, got {arguments.last}")
    if arguments.start not in (None, "begin", "end") and not arguments.start.isdigit():
        raise ConfigurationError(f"--from {arguments.start!r}: write begin, end or an offset")


def _passing(
    place: Place,
    arguments: argparse.Namespace,
    conditions: Sequence[Condition],
    stop: threading.Event,
) -> Iterator[Passing]:
    """Yields the selected records from the log, or from the archive if no log is left."""
    if place.bus is None:
        yield from _last(_of_archive(place, arguments), conditions, arguments)
        return
    bus = open_log(place)
    try:
        if not has_topic(bus, arguments.topic):
            raise ConfigurationError(f"{place.name} has no topic {arguments.topic} yet")
        log = Log(bus, arguments.topic, warn)
        ends = _chosen(bus.end(arguments.topic), arguments)
        begins = _chosen(bus.begin(arguments.topic), arguments)
        starts = {p: _start(arguments, begins[p], end, conditions) for p, end in ends.items()}
        yield from _last(log.between(starts, ends), conditions, arguments)
        if arguments.follow:
            yield from matching(log.follow(ends, stop), conditions)
    finally:
        bus.close()


def _start(
    arguments: argparse.Namespace, begin: int, end: int, conditions: Sequence[Condition]
) -> int:
    """Returns the start offset in a partition. With conditions the last matches may be anywhere, so
    reading starts at the begin.
    """
    if arguments.start == "end":
        return end
    if arguments.start not in (None, "begin"):
        return min(int(arguments.start), end)
    if arguments.start == "begin" or conditions:
        return begin
    return max(begin, end - (arguments.last or LAST))


def _last(
    passing: Iterator[Passing], conditions: Sequence[Condition], arguments: argparse.Namespace
) -> Iterator[Passing]:
    """Returns the records that meet the conditions; only the last ones unless --from is given."""
    wanted = matching(passing, conditions)
    if arguments.start is not None:
        return wanted
    return iter(deque(wanted, maxlen=arguments.last or LAST))


def _of_archive(place: Place, arguments: argparse.Namespace) -> Iterator[Passing]:
    from rollstream.analysis.passing_archive import archived
    from rollstream.analysis.session import Session
    from rollstream.analysis.views import TOPICS

    if arguments.follow:
        raise ConfigurationError(f"{place.name} has no log to follow, only an archive")
    if arguments.topic not in TOPICS:
        raise ConfigurationError(
            f"{place.name} has no log, only an archive, and {arguments.topic} is not archived; "
            f"archived are {', '.join(TOPICS)}"
        )
    where = [] if arguments.partition is None else [f"partition = {arguments.partition}"]
    if arguments.start == "end":
        return
    if arguments.start not in (None, "begin"):
        where.append(f'"offset" >= {int(arguments.start)}')
    with Session(place, warn, arguments.skip_corrupt) as session:
        yield from archived(session, arguments.topic, " AND ".join(where) or "true")


def _chosen(offsets: dict[int, int], arguments: argparse.Namespace) -> dict[int, int]:
    if arguments.partition is None:
        return offsets
    if arguments.partition not in offsets:
        known = f"0 to {len(offsets) - 1}" if len(offsets) > 1 else "0 alone"
        raise ConfigurationError(
            f"{arguments.topic} has no partition {arguments.partition}; there are {known}"
        )
    return {arguments.partition: offsets[arguments.partition]}


def _print(one: Passing, day: str, flush: bool) -> str:
    """Print a line, preceded by its day if that changed; returns the day."""
    when = datetime.fromtimestamp(one.timestamp_ms / 1000, UTC)
    if when.date().isoformat() != day:
        day = when.date().isoformat()
        print(f"{day} (UTC)")
    words = in_words(one.record) if one.record is not None else f"not a record: {one.reason}"
    void = " (void)" if one.void else ""
    place = f"{one.partition}:{one.offset}"
    print(f"{when:%H:%M:%S}.{when.microsecond // 1000:03d} {place:>8}  {words}{void}", flush=flush)
    return day
