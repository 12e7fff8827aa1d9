"""Forwards a run's metrics files to TensorBoard or Weights & Biases, from a process that only reads
the run. No line is lost; a crash can log lines again, at the same steps.
"""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportAttributeAccessIssue=false

import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, cast

import msgspec
import xxhash

from rollstream.errors import ConfigurationError, CorruptObject, LeaseHeld
from rollstream.foreign_json import parse_json
from rollstream.whole_file import whole_file

_NOT_METRICS = frozenset({"step", "term", "time_s", "pid"})  # numbers that describe the line


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """The numbers of one line: `values` by metric name, of the `series` (the file's name, or role
    or process in it) at `step`. `time_s` is in seconds since the epoch, None without a time.
    """

    series: str
    step: int
    values: Mapping[str, float]
    time_s: float | None = None


def metric_point(stem: str, number: int, line: Mapping[str, Any]) -> MetricPoint | None:
    """Returns the point of line `number` (from 1) of `<stem>.jsonl`, at the line's training step
    or, if it has none, its number; None if the line holds no metric.
    """
    time_s = line.get("time_s")
    at = float(time_s) if _is_number(time_s) else None
    # Of the supervisor's lines only starts of roles are forwarded, with their number of restarts.
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
    """Yields the metrics of a line; a nested name is its path, joined by `/`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(cast(dict[str, Any], value), f"{prefix}{name}/")
        elif _is_number(value) and (prefix or name not in _NOT_METRICS):
            yield f"{prefix}{name}", float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Sink(Protocol):
    """Passes points to one target. `where` tells the user where to see them."""

    where: str

    def log(self, point: MetricPoint) -> None: ...

    def flush(self) -> None:
        """Returns once all logged points survive the death of this process."""
        ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Writes TensorBoard's event files to `folder`, one per start of this process; TensorBoard
    shows them as one run.
    """

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
    """Logs to the Weights & Biases run with this `id`, which a later start continues."""

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
        # Each series has its own step: W&B's global step only grows, and the files are read one
        # after the other.
        if point.series not in self._series:
            self._series.add(point.series)
            self._run.define_metric(step)
            self._run.define_metric(f"{point.series}/*", step_metric=step)
        values = {f"{point.series}/{name}": value for name, value in point.values.items()}
        self._run.log({**values, step: point.step})

    def flush(self) -> None:
        """Do nothing: `log` passes points to W&B's own process, which sends them when it can."""

    def close(self) -> None:
        self._run.finish()


def _missing(extra: str) -> ConfigurationError:
    return ConfigurationError(
        f"forwarding to {extra} needs its library: pip install 'rollstream[{extra}]'"
    )


READ_BYTES_MAX = 1 << 20  # per read of a file; lines are far shorter


# Positions are kept here because no client has them: a line that TensorBoard's writer gets twice
# stands twice in its curve, and the run may have thinned the lines that a fresh start would need.
class FilePosition(msgspec.Struct, frozen=True):
    """How far a file was forwarded: up to the byte `offset`, behind line number `line`. The last
    forwarded line has `before` bytes and this `hash`, so that a file which replaced the forwarded
    one is not forwarded from its middle.
    """

    offset: int = 0
    line: int = 0
    before: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """One line of a metrics file: its number from 1, its JSON object (None if it is none), and the
    position `after` it.
    """

    number: int
    values: dict[str, Any] | None
    after: FilePosition


def read_lines(path: Path, place: FilePosition) -> Iterator[MetricsLine]:
    """Yields the complete lines after `place`, up to `READ_BYTES_MAX` bytes; none if the file does
    not exist. Raises `CorruptObject` if the place is of another file.
    """
    try:
        with path.open("rb") as file:
            file.seek(place.offset - place.before)
            if place.offset and _hash(file.read(place.before)) != place.hash:
                # The run thins its files: it removes older lines to bound their sizes.
                place = _in_thinned(path, place)
                file.seek(place.offset)
            data = file.read(READ_BYTES_MAX)
    except FileNotFoundError:
        if place.offset:
            raise _replaced(path) from None
        return
    *raw_lines, rest = data.split(b"\n")
    if len(rest) == READ_BYTES_MAX:
        raise CorruptObject(f"{path} has a line of more than {READ_BYTES_MAX} bytes; it is damaged")
    for raw in (line + b"\n" for line in raw_lines):
        after = FilePosition(place.offset + len(raw), place.line + 1, len(raw), _hash(raw))
        yield MetricsLine(after.line, _parsed(raw), after)
        place = after


def _in_thinned(path: Path, place: FilePosition) -> FilePosition:
    offset = 0
    for raw in path.read_bytes().splitlines(keepends=True):
        offset += len(raw)
        if len(raw) == place.before and _hash(raw) == place.hash:
            return msgspec.structs.replace(place, offset=offset)
    raise _replaced(path)


def _replaced(path: Path) -> CorruptObject:
    return CorruptObject(
        f"{path} is not the file that was forwarded before: the folder holds another run, or its "
        "older lines were thinned while nothing was forwarded"
    )


def _hash(raw: bytes) -> str:
    return xxhash.xxh3_64(raw).hexdigest()


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        return parse_json(raw, dict[str, Any])
    except ValueError:
        return None


log = logging.getLogger(__name__)


class ForwardState(msgspec.Struct, frozen=True):
    """The content of `RUN/metrics/forward-<to>.json`: the `id` of the run at the target, drawn at
    the first start, and by file name how far each file was forwarded.
    """

    id: str
    places: dict[str, FilePosition]


class Forwarder:
    """Forwards the files in the folder `metrics` to the target `to`, which `open_sink` opens for
    the stored id. The constructor raises `LeaseHeld` if another process forwards this run there.
    """

    def __init__(self, metrics: Path, to: str, open_sink: Callable[[str], Sink]) -> None:
        self._metrics, self._file = metrics, metrics / f"forward-{to}.json"
        self._lock = _locked(self._file.with_suffix(".lock"))
        try:
            self._state = self._load()
            self.sink = open_sink(self._state.id)
        except BaseException:
            os.close(self._lock)
            raise

    def once(self) -> int:
        """Forward all new lines of each file; returns their number.

        1. Log the lines.  2. Flush the sink.  3. Store the file's position. A crash before 3
           repeats the lines, at the same steps. Raises `CorruptObject` for a file that is another
           than before, or damaged.
        """
        count = 0
        for path in sorted(self._metrics.glob("*.jsonl")):
            while lines := self._next(path):
                for line in lines:
                    self._log(path, line)  # 1
                self.sink.flush()  # 2
                self._store(path.name, lines[-1].after)  # 3
                count += len(lines)
        return count

    def close(self) -> None:
        self.sink.close()
        os.close(self._lock)

    def _next(self, path: Path) -> list[MetricsLine]:
        try:
            return list(read_lines(path, self._state.places.get(path.name, FilePosition())))
        except CorruptObject as error:
            raise CorruptObject(f"{error}; delete {self._file} to forward it again") from None

    def _log(self, path: Path, line: MetricsLine) -> None:
        if line.values is None:
            log.warning("%s, line %d is not a JSON object: skipped", path, line.number)
            return
        point = metric_point(path.stem, line.number, line.values)
        if point is not None:
            self.sink.log(point)

    def _load(self) -> ForwardState:
        try:
            return parse_json(self._file.read_bytes(), ForwardState)
        except FileNotFoundError:
            return ForwardState(secrets.token_hex(6), {})
        except ValueError as error:
            raise ConfigurationError(
                f"{self._file} cannot be read ({error}); delete it to forward everything again"
            ) from None

    def _store(self, name: str, place: FilePosition) -> None:
        self._state = ForwardState(self._state.id, {**self._state.places, name: place})
        with whole_file(self._file) as partial:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(self._state), indent=1))


def _locked(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LeaseHeld(f"another process already forwards this run ({path} is locked)") from None
    return descriptor
