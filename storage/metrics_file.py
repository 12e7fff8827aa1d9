"""JSON lines that one process appends. A kill can leave only the last line incomplete, which the
next writer removes and readers ignore.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollstream.errors import CorruptObject
from rollstream.foreign_json import parse_json
from rollstream.storage.stores.file import translate_os_errors

FILE_BYTES_MAX = 8 << 20
TAIL_BYTES = 1 << 16  # an incomplete line is searched for in so many last bytes; no line is longer


class MetricsFile:
    """The only writer of a file in a run's folder `metrics/`. With `bytes_max` None the file is
    never thinned.
    """

    def __init__(self, path: str | Path, bytes_max: int | None = FILE_BYTES_MAX) -> None:
        self._path, self._bytes_max = Path(path), bytes_max
        with translate_os_errors("open", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            _remove_torn_line(self._file)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def append(self, line: Mapping[str, Any]) -> None:
        """Appends one line. If it cannot be written completely, nothing of it stays in the file,
        and `StoreError` is raised.
        """
        data = msgspec.json.encode(line) + b"\n"
        with translate_os_errors("write", self._path):
            size = os.fstat(self._file).st_size
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes fit")
            if self._bytes_max is not None and size + written > self._bytes_max:
                self._thin()

    def _thin(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(b"".join(thinned(self._path.read_bytes().splitlines(keepends=True))))
        # A kill before the rename leaves the file as it was.
        os.replace(partial, self._path)
        os.close(self._file)
        self._file = self._open()

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def thinned(lines: Sequence[bytes]) -> list[bytes]:
    """Returns all lines in the newer half of the bytes, and at most half of the older ones, evenly
    spaced in time (every second one if times are missing or equal).
    """
    older, bytes_to_pass = 0, sum(map(len, lines)) // 2
    while older < len(lines) and bytes_to_pass > 0:
        bytes_to_pass -= len(lines[older])
        older += 1
    times = [_time_s(line) for line in lines[:older]]
    stated_times = [time_s for time_s in times if time_s is not None]
    sparse_lines = lines[:older:2]
    if len(stated_times) == older > 1 and max(stated_times) > min(stated_times):
        wide_s = (max(stated_times) - min(stated_times)) / (older // 2 - 0.5)
        at = [int((time_s - min(stated_times)) / wide_s) for time_s in stated_times]
        sparse_lines = [
            line for n, line in enumerate(lines[:older]) if n == 0 or at[n] != at[n - 1]
        ]
    return [*sparse_lines[: older // 2], *lines[older:]]


class _Timed(msgspec.Struct):
    time_s: float | None = None


def _time_s(line: bytes) -> float | None:
    try:
        return parse_json(line, _Timed).time_s
    except ValueError:
        return None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the lines, oldest first; none without a file. Raises `CorruptObject`, which names the
    line, if one is not JSON.
    """
    try:
        with translate_os_errors("read", Path(path)):
            data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]  # bytes after the last newline are being written, or torn
    return [_parse_line(line, number, path) for number, line in enumerate(lines, start=1)]


def _parse_line(line: bytes, number: int, path: str | Path) -> dict[str, Any]:
    try:
        return parse_json(line, dict[str, Any])
    except ValueError as error:
        raise CorruptObject(f"{path}, line {number} is not a JSON object: {error}") from error


def _remove_torn_line(file: int) -> None:
    size = os.fstat(file).st_size
    tail = os.pread(file, TAIL_BYTES, max(0, size - TAIL_BYTES))
    # A killed writer left these bytes.
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        os.ftruncate(file, size - torn)
