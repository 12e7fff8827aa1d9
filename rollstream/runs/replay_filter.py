"""Which records a replay keeps: conditions on their fields, as `rollstream tail` knows them, and of
trajectories also the `step` that trained them and their `lag` then, in steps, by the oldest span.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.analysis.fields import FieldCondition, derived_values, parse_condition, oldest_version, record_values
from rollstream.analysis.tail import TailRecord, meets
from rollstream.streams.bus import Message
from rollstream.streams.judging import classify_message
from rollstream.streams.values import Address
from rollstream.streams.records import Fence, Trajectory

TRAINING_FIELDS = {"step": "number", "lag": "number"}
"""What only the ledger, or the step that is being trained, knows of a trajectory."""
TrainedSteps = Mapping[Address, int]


def parse_conditions(where: Sequence[str], topic: str = "trajectories") -> list[FieldCondition]:
    """All of them, or the `ConfigurationError` of the first that means nothing."""
    more = TRAINING_FIELDS if topic == "trajectories" else {}
    return [parse_condition(text, topic, more) for text in where]


def needs_steps(conditions: Sequence[FieldCondition]) -> bool:
    """Whether the ledger must say by which step each trajectory was trained."""
    return any(one.path[0] in TRAINING_FIELDS for one in conditions)


def training_filter(conditions: Sequence[FieldCondition]) -> Callable[[Trajectory, int], bool]:
    """For trajectories that are trained from a version; their time is when they finished."""

    def keep(record: Trajectory, version: int) -> bool:
        values = record_values(record) | derived_values(record, round(record.finished_s * 1000))
        values |= _training_values(record, version + 1)
        return all(one.holds(values) for one in conditions)

    return keep


def message_filter(
    conditions: Mapping[str, Sequence[FieldCondition]], steps: TrainedSteps
) -> Callable[[Message], bool]:
    """For messages of the topics that many write, each by its topic's conditions."""

    def keep(message: Message) -> bool:
        _, judged = classify_message(
            message.value or b"", Fence(), topic=message.topic, fenced=False, compacted=False
        )
        at = Address(message.partition, message.offset)
        passing = TailRecord(
            message.partition,
            message.offset,
            message.timestamp_ms,
            message.key.decode(errors="replace"),
            judged.record,
            None,
            False,
            judged.reason,
        )
        more = _training_values(judged.record, steps.get(at))
        return meets(passing, conditions[message.topic], more)

    return keep


def is_wanted_trajectory(
    conditions: Sequence[FieldCondition], record: Trajectory, timestamp_ms: int, step: int | None
) -> bool:
    """Whether a trajectory is wanted, `step` having trained it, or none."""
    values = record_values(record) | derived_values(record, timestamp_ms) | _training_values(record, step)
    return all(one.holds(values) for one in conditions)


def _training_values(record: object, step: int | None) -> dict[str, Any]:
    if not isinstance(record, Trajectory):
        return {}
    oldest = oldest_version(record)
    lag = None if step is None or oldest is None else step - 1 - oldest
    return {"step": step, "lag": lag}
