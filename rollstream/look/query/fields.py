"""Reads the fields of records, and selects records by conditions such as `reward>=1` (`--where`).

A condition is FIELD, one of `= != < <= > >= ~` (`~`: contains the text), and VALUE. FIELD is a
dotted path (`scores.style_full`, `spans.0.start`); the value of an array is its length. A record
without the field, or with null there, meets only `=null`, and `!=` with any other value.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import eq, ge, gt, le, lt, ne
from typing import Any, cast, get_args

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import fields

from rollstream.errors import ConfigurationError
from rollstream.import_path import nearest
from rollstream.storage.archive.segments import LogRecord
from rollstream.streams.foreign_text import whole_number
from rollstream.streams.records import TOPIC_RECORDS, Dead, Record, Trajectory
from rollstream.streams.topics import catalogue, is_dead_letter_topic, run_topic

ENVELOPE: tuple[str, ...] = ("partition", "offset", "key", "schema", "term", "void", "time")
"""Fields that every record has besides its own; `term` is that of its writer."""
DERIVED = {"lag_finish": "number"}
"""By kind of record. `lag_finish` is the newest version known when the trajectory finished, minus
the version of its oldest span.
"""

_CONDITION = re.compile(r"\s*([\w./:-]+?)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldCondition:
    """`path operator wanted`, on a record's values."""

    path: tuple[str, ...]
    operator: str
    wanted: str

    def holds(self, values: Mapping[str, Any]) -> bool:
        field_value = _at(values, self.path)
        # `take` selects all versions, `take/1` one.
        if self.path == ("schema",) and "/" not in self.wanted:
            field_value = str(field_value).partition("/")[0]
        if field_value is None or self.wanted == "null":
            is_null = field_value is None and self.wanted == "null"
            return (self.operator == "=") == is_null if self.operator in ("=", "!=") else False
        if self.operator == "~":
            return self.wanted in str(field_value)
        if isinstance(field_value, bool):
            return _COMPARE[self.operator](str(field_value).lower(), self.wanted.lower())
        if isinstance(field_value, int | float):
            if not _is_number(self.wanted):  # of a field whose kind only the record has
                return self.operator == "!="
            return _COMPARE[self.operator](field_value, float(self.wanted))
        return _COMPARE[self.operator](str(field_value), self.wanted)


def record_values(record: Record, with_arrays: bool = False) -> dict[str, Any]:
    """Returns the values as builtins; arrays are lists if `with_arrays`, else lengths."""
    hook: Callable[[Any], Any] = np.ndarray.tolist if with_arrays else len
    own_fields: dict[str, Any] = msgspec.to_builtins(record, enc_hook=hook)
    # In the log, names of arrays have a suffix with their type (`tokens:u4`).
    return {name.partition(":")[0]: value for name, value in own_fields.items()}


def derived_values(record: Record | None, timestamp_ms: int) -> dict[str, Any]:
    """What a record does not store: `time` (seconds since 1970), and of a trajectory
    `lag_finish`.
    """
    derived: dict[str, Any] = {"time": timestamp_ms / 1000}
    if isinstance(record, Trajectory):
        oldest = oldest_version(record)
        derived["lag_finish"] = (
            None if oldest is None else max(0, record.trainer_version.number - oldest)
        )
    return derived


def oldest_version(record: Trajectory) -> int | None:
    """Returns the version of the oldest span; None without generated tokens."""
    return min((span.version.number for span in record.spans), default=None)


def record_fields(log_record: LogRecord, with_arrays: bool = False) -> dict[str, Any]:
    """Returns the fields of envelope and record; arrays as in `record_values`."""
    own_fields = {} if log_record.record is None else record_values(log_record.record, with_arrays)
    envelope = {
        "partition": log_record.address.partition,
        "offset": log_record.address.offset,
        "key": log_record.key,
        "term": log_record.term,
        "void": log_record.void,
    }
    return envelope | own_fields


def meets(
    log_record: LogRecord, conditions: Sequence[FieldCondition], more: Mapping[str, Any]
) -> bool:
    """All of them; `more` holds further fields that the caller knows."""
    values = (
        record_fields(log_record)
        | derived_values(log_record.record, log_record.timestamp_ms)
        | dict(more)
    )
    return all(condition.holds(values) for condition in conditions)


def known_topics() -> tuple[str, ...]:
    """Returns the known topics of a run, without those of named weight streams."""
    return tuple(topic.name for topic in catalogue())


def check_topic(topic: str) -> None:
    """Raises `ConfigurationError`, naming the nearest topic, for an unknown one."""
    if run_topic(topic) is None and not is_dead_letter_topic(topic):
        raise ConfigurationError(
            f"no topic {topic!r}{nearest(topic, known_topics())}; "
            f"topics: {', '.join(known_topics())}"
        )


def parse_condition(text: str, topic: str, more: Mapping[str, str] | None = None) -> FieldCondition:
    """`more` maps further fields to their kinds (`number`, `text`, `time` or `open`). Raises
    `ConfigurationError` for an unknown field or an invalid comparison.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"--where {text!r}: write FIELD=VALUE, with one of = != < <= > >= ~ (contains)"
        )
    name, operator, operand = match.groups()
    kinds = _fields_of(topic) | dict(more or {})
    kind = _kind_at(kinds, name)
    if kind is None:
        near = nearest(name, kinds)
        raise ConfigurationError(
            f"--where {text!r}: {topic} has no field {name}{near}; fields: {', '.join(kinds)}"
        )
    if kind == "number" and operator != "~" and operand != "null" and not _is_number(operand):
        raise ConfigurationError(f"--where {text!r}: {name} is a number, but {operand!r} is not")
    if kind == "time":
        operand = _seconds(text, operator, operand)
    return FieldCondition(tuple(name.split(".")), operator, operand)


def _fields_of(topic: str) -> dict[str, str]:
    """Each dotted field → its kind: `number` (arrays too, by their lengths), `text`, `time`, or
    `open` (has inner fields, whose names may be unknown here).
    """
    kinds = {
        name: "number" if name in ("partition", "offset", "term") else "text" for name in ENVELOPE
    }
    kinds["time"] = "time"
    kinds |= DERIVED if topic == "trajectories" else {}
    # A topic without an entry announces a named weight stream.
    records = TOPIC_RECORDS.get(topic, TOPIC_RECORDS["weights"])
    for cls in (Dead,) if is_dead_letter_topic(topic) else records:
        _walk(cls, "", kinds)
    return kinds


def _walk(cls: type[Struct], prefix: str, kinds: dict[str, str]) -> None:
    for field in fields(cls):
        inner = [t for t in get_args(field.type) or (field.type,) if t is not type(None)]
        name, is_array = f"{prefix}{field.name}", ":" in field.encode_name
        struct = inner[0] if len(inner) == 1 and isinstance(inner[0], type) else None
        if is_array or set(inner) <= {int, float}:
            kinds[name] = "number"
        elif struct is not None and issubclass(struct, Struct) and "tuple" not in str(field.type):
            kinds[name] = "open"
            _walk(struct, f"{name}.", kinds)
        else:
            kinds[name] = "open" if str(field.type).startswith(("dict", "tuple")) else "text"


def _kind_at(kinds: Mapping[str, str], name: str) -> str | None:
    if name in kinds:
        return kinds[name]
    parent = name.rpartition(".")[0]
    while parent:
        if parent in kinds:
            # A field inside an `open` one whose inner names are unknown is `open` too.
            deeper = kinds[parent] == "open" and not any(k.startswith(f"{parent}.") for k in kinds)
            return "open" if deeper else None
        parent = parent.rpartition(".")[0]
    return None


def _at(values: object, path: Sequence[str]) -> Any:
    """A list's length; None if the path does not exist."""
    for part in path:
        if isinstance(values, Mapping):
            values = cast("Mapping[str, object]", values).get(part)
        elif isinstance(values, list | tuple) and (at := whole_number(part)) is not None:
            items = cast("Sequence[object]", values)
            values = items[at] if at < len(items) else None
        else:
            return None
    return len(cast("Sequence[object]", values)) if isinstance(values, list | tuple) else values


def _seconds(text: str, operator: str, operand: str) -> str:
    try:
        moment = datetime.fromisoformat(operand)
    except ValueError:
        moment = None
    if moment is None or operator == "~":
        raise ConfigurationError(
            f"--where {text!r}: compare time by < <= > >= with a date or a time of ISO 8601, as "
            "time>=2026-03-01T09:30 (UTC, unless it names its zone)"
        )
    # Without a zone it is UTC.
    return repr((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
