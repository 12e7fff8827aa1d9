"""The conditions (`--where`) by which a replay selects records, in the syntax of `rollstream tail`
with the fields `step` and `lag` besides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.look.query import fields
from rollstream.storage.archive.segments import LogRecord
from rollstream.streams.bus import Message
from rollstream.streams.classified import classify_message
from rollstream.streams.records import Fence, Trajectory
from rollstream.streams.values import Address

TRAINING_FIELDS = {"step": "number", "lag": "number"}
"""Fields of conditions that a trajectory's record lacks: the step that trained it, and its lag at
that step by its oldest span.
"""
TrainedSteps = Mapping[Address, int]
"""Address of a trajectory → the step that trained it."""


def parse_conditions(
    where: Sequence[str], topic: str = "trajectories"
) -> list[fields.FieldCondition]:
    """Returns the conditions; raises `ConfigurationError` for an invalid one."""
    more = TRAINING_FIELDS if topic == "trajectories" else {}
    return [fields.parse_condition(text, topic, more) for text in where]


def needs_steps(conditions: Sequence[fields.FieldCondition]) -> bool:
    return any(condition.path[0] in TRAINING_FIELDS for condition in conditions)


def meets_conditions(
    conditions: Sequence[fields.FieldCondition],
    record: Trajectory,
    timestamp_ms: int,
    step: int | None,
) -> bool:
    """Returns whether the trajectory meets the conditions. `timestamp_ms` is its append time,
    `step` the step that trained it, or None.
    """
    if not conditions:
        return True
    values = (
        fields.record_values(record)
        | fields.derived_values(record, timestamp_ms)
        | _training_values(record, step)
    )
    return all(condition.holds(values) for condition in conditions)


def message_filter(
    conditions: Mapping[str, Sequence[fields.FieldCondition]], steps: TrainedSteps
) -> Callable[[Message], bool]:
    """Returns a filter of messages by the conditions of their topic."""

    def keep(message: Message) -> bool:
        _, judged = classify_message(
            message.value or b"", Fence(), topic=message.topic, fenced=False, compacted=False
        )
        at = Address(message.partition, message.offset)
        key = message.key.decode(errors="replace")
        record = LogRecord(
            message.topic, at, message.timestamp_ms, key, judged.record, reason=judged.reason
        )
        more = _training_values(judged.record, steps.get(at))
        return fields.meets(record, conditions[message.topic], more)

    return keep


def _training_values(record: object, step: int | None) -> dict[str, Any]:
    if not isinstance(record, Trajectory):
        return {}
    oldest = fields.oldest_version(record)
    lag = None if step is None or oldest is None else max(0, step - 1 - oldest)
    return {"step": step, "lag": lag}
