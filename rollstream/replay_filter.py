"""Which records a replay keeps: conditions on their fields, as `rollstream tail` knows them, and of
trajectories also the `step` that trained them and their `lag` then, in steps, by the oldest span.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.analysis.fields import (
    Condition,
    asked_of,
    condition,
    oldest_version,
    values_of,
)
from rollstream.analysis.passing import Passing, meets
from streams.bus import Message
from streams.judging import judge
from streams.records import Address, Fence, Trajectory

CONSUMED = {"step": "number", "lag": "number"}
"""What only the ledger, or the step that is being trained, knows of a trajectory."""
Steps = Mapping[Address, int]


def conditions_of(where: Sequence[str], topic: str = "trajectories") -> list[Condition]:
    """All of them, or the `ConfigurationError` of the first that means nothing."""
    more = CONSUMED if topic == "trajectories" else {}
    return [condition(text, topic, more) for text in where]


def asks_for_steps(conditions: Sequence[Condition]) -> bool:
    """Whether the ledger must say by which step each trajectory was trained."""
    return any(one.path[0] in CONSUMED for one in conditions)


def of_training(conditions: Sequence[Condition]) -> Callable[[Trajectory, int], bool]:
    """For trajectories that are trained from a version; their time is when they finished."""

    def keep(record: Trajectory, version: int) -> bool:
        values = values_of(record) | asked_of(record, round(record.finished_s * 1000))
        values |= _consumed(record, version + 1)
        return all(one.holds(values) for one in conditions)

    return keep


def of_messages(
    conditions: Mapping[str, Sequence[Condition]], steps: Steps
) -> Callable[[Message], bool]:
    """For messages of the topics that many write, each by its topic's conditions."""

    def keep(message: Message) -> bool:
        _, judged = judge(
            message.value or b"", Fence(), topic=message.topic, fenced=False, compacted=False
        )
        at = Address(message.partition, message.offset)
        passing = Passing(
            message.partition,
            message.offset,
            message.timestamp_ms,
            message.key.decode(errors="replace"),
            judged.record,
            None,
            False,
            judged.reason,
        )
        more = _consumed(judged.record, steps.get(at))
        return meets(passing, conditions[message.topic], more)

    return keep


def keeps(
    conditions: Sequence[Condition], record: Trajectory, timestamp_ms: int, step: int | None
) -> bool:
    """Whether a trajectory is wanted, `step` having trained it, or none."""
    values = values_of(record) | asked_of(record, timestamp_ms) | _consumed(record, step)
    return all(one.holds(values) for one in conditions)


def _consumed(record: object, step: int | None) -> dict[str, Any]:
    if not isinstance(record, Trajectory):
        return {}
    oldest = oldest_version(record)
    lag = None if step is None or oldest is None else step - 1 - oldest
    return {"step": step, "lag": lag}
