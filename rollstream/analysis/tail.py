"""Reads a topic for `tail`, from archive and log: messages in order of their times, validated and
never changed. Undecodable bytes are shown as such, records below the fence of invariant 7 as void.
"""

import heapq
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollstream.analysis.fields import FieldCondition, derived_values, record_values
from rollstream.analysis.output import json_value
from rollstream.storage.archive.segments import Hole, LogRecord
from rollstream.storage.log_view import LogView

WAIT_S = 0.25  # longest delay of Ctrl-C


def record_fields(one: LogRecord, whole: bool = False) -> dict[str, Any]:
    """Returns the fields of envelope and record as builtins. Arrays are lists if `whole`, else
    their lengths.
    """
    found = {} if one.record is None else record_values(one.record, whole)
    envelope = {
        "partition": one.address.partition,
        "offset": one.address.offset,
        "key": one.key,
        "term": one.term,
        "void": one.void,
    }
    return envelope | found


def messages_by_time(
    view: LogView,
    topic: str,
    starts: Mapping[int, int],
    ends: Mapping[int, int],
    on_hole: Callable[[Hole], None],
    skip_damaged: bool = False,
) -> Iterator[LogRecord]:
    """Yields the messages of all partitions from `starts` to before `ends`, by time."""
    one_by_one = (
        view.topic(topic, {p: start}, on_hole=on_hole, skip_damaged=skip_damaged).messages(ends)
        for p, start in starts.items()
    )
    return heapq.merge(*one_by_one, key=lambda one: (one.timestamp_ms, one.address.partition))


def new_messages(
    view: LogView,
    topic: str,
    starts: Mapping[int, int],
    on_hole: Callable[[Hole], None],
    stop: threading.Event,
) -> Iterator[LogRecord]:
    """Yields messages from `starts` on until `stop` is set."""
    reader = view.topic(topic, starts, on_hole=on_hole)
    while not stop.is_set():
        yield from sorted(reader.poll(wait_s=WAIT_S), key=lambda one: one.timestamp_ms)


def matching(
    records: Iterator[LogRecord], conditions: Sequence[FieldCondition]
) -> Iterator[LogRecord]:
    """Yields the records that meet all conditions."""
    if not conditions:
        return records
    return (one for one in records if meets(one, conditions, {}))


def meets(one: LogRecord, conditions: Sequence[FieldCondition], more: Mapping[str, Any]) -> bool:
    """True if the record meets all conditions; `more` holds further fields from the caller."""
    values = record_fields(one) | derived_values(one.record, one.timestamp_ms) | dict(more)
    return all(condition.holds(values) for condition in conditions)


def tail_json(one: LogRecord) -> dict[str, Any]:
    """Returns the record as a JSON object with complete arrays."""
    where = {"topic": one.topic, "timestamp_ms": one.timestamp_ms}
    why = {"reason": one.reason} if one.record is None else {}
    return json_value(where | record_fields(one, whole=True) | why)
