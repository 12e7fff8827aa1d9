"""Answers `records/{topic}/{partition}/{offset}`: one record, with links to what it names."""

from typing import Any

from rollstream.errors import ObjectMissing
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.query.describe import describe
from rollstream.look.query.fields import known_topics, record_values
from rollstream.look.query.output import json_value
from rollstream.streams import records
from rollstream.streams.records import Record

ITEMS_MAX = 1000  # items of each list
TEXT_MAX = 100_000
LINKS_MAX = 64


def show_record(run: ExploredRun, topic: str, partition: int, offset: int) -> dict[str, Any]:
    """Raises `ObjectMissing` if neither log nor archive holds the place."""
    if topic not in known_topics():
        raise ObjectMissing(f"no topic {topic[:40]!r}; topics: {', '.join(known_topics())}")
    message = run.records.record(topic, partition, offset)
    if message is None:
        raise ObjectMissing(f"neither log nor archive holds {topic} {partition}:{offset}")
    record = message.record
    return {
        "topic": topic,
        "partition": partition,
        "offset": offset,
        "schema": None if record is None else record.schema(),
        "term": message.term,
        "void": message.void,
        "reason": message.reason,
        "time_s": message.time_s,
        "key": message.key,
        "summary": message.reason if record is None else describe(record),
        "fields": None if record is None else _bounded(json_value(record_values(record, True))),
        "links": [] if record is None else _links(record),
        "previous": offset - 1 if offset else None,
        "next": offset + 1,
    }


def _bounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _bounded(child) for key, child in list(value.items())[:ITEMS_MAX]}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_bounded(child) for child in value[:ITEMS_MAX]]  # pyright: ignore[reportUnknownVariableType]
    return value[:TEXT_MAX] if isinstance(value, str) else value


def _links(record: Record) -> list[dict[str, str]]:
    links: dict[str, str] = {}
    for name in ("trajectory", "group", "step"):
        value = getattr(record, name, None)
        if value is not None:
            links[f"{name} {value}"] = f"{name.replace('trajectory', 'trajectorie')}s/{value}"
    if isinstance(record, records.Take):
        links |= {f"group {members.group}": f"groups/{members.group}" for members in record.groups}
        names = [member.trajectory for member in record.members]
        links |= {f"trajectory {name}": f"trajectories/{name}" for name in names}
    if isinstance(record, records.Admitted):
        links |= {f"trajectory {name}": f"trajectories/{name}" for name in record.trajectories}
    if isinstance(record, records.Superseded):
        links |= {f"group {group}": f"groups/{group}" for group in record.poisoned}
    return [{"text": text, "to": to} for text, to in list(links.items())[:LINKS_MAX]]
