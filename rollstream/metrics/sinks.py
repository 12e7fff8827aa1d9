"""Targets of forwarded metrics (TensorBoard, Weights & Biases), and the points sent to them.

Each library is imported only here, and only if its target is used. Points of `trainer.jsonl` and
`eval.jsonl` use the training step; lines of the supervisor and of processes have none and use their
line number.
"""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportAttributeAccessIssue=false

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, cast

from rollstream.errors import ConfigurationError

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
        return MetricPoint(
            f"supervisor/{line.get('role')}", number, {"restarts": line["restart"]}, at
        )
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


class Sink(Protocol):
    """`where` tells the user where the points appear."""

    where: str

    def log(self, point: MetricPoint) -> None: ...

    def flush(self) -> None:
        """After return, all points are on disk or in the library's own process."""
        ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Writes event files to `folder`, one per start; TensorBoard shows them as one run."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise _missing("tensorboard") from None
        self.where = f"tensorboard --logdir {folder}"
        self._writer: Any = Writer(str(folder))

    def log(self, point: MetricPoint) -> None:
        for name, value in point.values.items():
            tag = f"{point.series}/{name}"
            self._writer.add_scalar(tag, value, point.step, wall_time=point.time_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to one W&B run with a stored id, so a later start resumes it. Each series has its own
    step, because W&B's global step only grows and the files are read one after the other.
    """

    def __init__(self, name: str, id: str, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        if not hasattr(wandb, "init"):  # a folder named `wandb` earlier on sys.path
            raise _missing("wandb")
        self._series: set[str] = set()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rollstream"),
            name=name,
            id=id,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )
        url: str | None = self._run.url  # None in offline mode
        self.where = url or f"run {id}, kept in {folder}/wandb"

    def log(self, point: MetricPoint) -> None:
        step = f"{point.series}/step"
        if point.series not in self._series:
            self._series.add(point.series)
            self._run.define_metric(step)
            self._run.define_metric(f"{point.series}/*", step_metric=step)
        values = {f"{point.series}/{name}": value for name, value in point.values.items()}
        self._run.log({**values, step: point.step})

    def flush(self) -> None:
        """No-op: `log` passes points to W&B's own process, which sends them when it can."""

    def close(self) -> None:
        self._run.finish()


def _missing(extra: str) -> ConfigurationError:
    return ConfigurationError(
        f"forwarding to {extra} needs its library: pip install 'rollstream[{extra}]'"
    )
