"""Forwards a run's metrics files to another system; it runs as a process apart from the roles.

Delivery is at least once: (1) lines are logged, (2) the sink flushes, (3) the file positions are
stored. A crash before (3) logs the same lines again, at the same steps.
"""

import fcntl
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollstream.metrics.lines import MetricsLine, FilePosition, read_lines
from rollstream.metrics.points import metric_point
from rollstream.metrics.sinks import Sink
from rollstream.errors import ConfigurationError, CorruptObject, LeaseHeld

log = logging.getLogger(__name__)


class ForwardState(msgspec.Struct, frozen=True):
    """`RUN/metrics/forward-<to>.json`: the id of the target's run, and each file's next
    position.
    """

    id: str
    places: dict[str, FilePosition]


class Forwarder:
    """One target of one run; raises `LeaseHeld` if another process forwards to it."""

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
        """Forward all new lines; returns their number."""
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
            return msgspec.json.decode(self._file.read_bytes(), type=ForwardState)
        except FileNotFoundError:
            return ForwardState(secrets.token_hex(6), {})
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{self._file} cannot be read ({error}); delete it to forward everything again"
            ) from None

    def _store(self, name: str, place: FilePosition) -> None:
        self._state = ForwardState(self._state.id, {**self._state.places, name: place})
        partial = self._file.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self._state), indent=1))
        os.replace(partial, self._file)


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LeaseHeld(f"another process already forwards this run ({path} is locked)") from None
    return descriptor
