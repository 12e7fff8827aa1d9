"""Checks that all back ends of a bus share: they refuse the same input with the same texts."""

import dataclasses
from collections.abc import Sequence

from rollstream.errors import BusError, PositionLost, RecordTooLarge, TopicMissing
from rollstream.streams.bus import AppendEntry
from rollstream.streams.topics import Topic


def check_same_settings(existing: Topic, requested: Topic) -> None:
    """Raise `BusError`, naming each difference. An existing topic may accept larger records, as
    topics of earlier runs do.
    """
    larger = max(existing.record_bytes_max, requested.record_bytes_max)
    requested = dataclasses.replace(requested, record_bytes_max=larger)
    differences = [
        f"{field.name} is {has!r}, asked for {required!r}"
        for field in dataclasses.fields(Topic)
        if (has := getattr(existing, field.name)) != (required := getattr(requested, field.name))
    ]
    if differences:
        raise BusError(
            f"topic {requested.name!r} exists with other settings: {'; '.join(differences)}; "
            "use another folder or prefix for the new run, or the settings it was created with"
        )


def check_entries(topic: Topic, entries: Sequence[AppendEntry]) -> None:
    for entry in entries:
        size = len(entry.key) + len(entry.value or b"")
        if size > topic.record_bytes_max:
            raise RecordTooLarge(
                f"a record of {size} bytes with key {entry.key!r} is above the "
                f"{topic.record_bytes_max} that topic {topic.name!r} takes"
            )
        if entry.partition is not None and not 0 <= entry.partition < topic.partitions:
            raise BusError(f"topic {topic.name!r} has no partition {entry.partition}")


def check_position(topic: str, partition: int, offset: int, begin: int, end: int) -> None:
    """Raise `PositionLost` below the first kept offset and `BusError` beyond the end."""
    if offset < begin:
        raise PositionLost(
            f"{topic}/{partition}: offset {offset} was truncated, kept are {begin} to {end}; "
            "start from a newer checkpoint or from the begin"
        )
    if offset > end:
        raise BusError(
            f"{topic}/{partition}: offset {offset} is beyond the end {end}; "
            "this position belongs to another log, or the log's files were replaced"
        )


def missing_topic(topic: str, where: str) -> TopicMissing:
    return TopicMissing(
        f"{where} has no topic {topic!r}; is the path right? `Bus.create` makes those of a new log"
    )
