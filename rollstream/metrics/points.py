"""Converts a metrics line to the point that is forwarded: its numbers, a series and a step. Pure.

Lines of `trainer.jsonl` and `eval.jsonl` use their training step. Lines of the supervisor and of
processes have none and use their line number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

_NOT_METRICS = frozenset({"step", "term", "time_s", "pid"})


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """`values` of `series` at `step`; `time_s` is seconds since the epoch if the line has a
    time.
    """

    series: str
    step: int
    values: Mapping[str, float]
    time_s: float | None = None


def metric_point(stem: str, number: int, line: Mapping[str, Any]) -> MetricPoint | None:
    """Returns the point of line `number` (from 1) of `<stem>.jsonl`; None without numbers."""
    time_s = line.get("time_s")
    at = float(time_s) if _is_number(time_s) else None
    if stem == "supervisor":
        if line.get("event") != "start" or not _is_number(line.get("restart")):
            return None
        return MetricPoint(f"supervisor/{line.get('role')}", number, {"restarts": line["restart"]}, at)
    values = dict(_numbers(line))
    if not values:
        return None
    if stem.startswith("process-"):
        return MetricPoint(f"process/{stem.removeprefix('process-')}", number, values, at)
    step = line.get("step")
    return MetricPoint(stem, int(step) if _is_number(step) else number, values, at)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(cast(dict[str, Any], value), f"{prefix}{name}/")
        elif _is_number(value) and (prefix or name not in _NOT_METRICS):
            yield f"{prefix}{name}", float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
