"""Metrics of one process as JSON lines, which people, programs and the live view read while it
runs.

Lines are appended whole. A kill can tear only the last one; the next writer removes it and readers
ignore it. There is no NaN: a number that is not finite becomes null.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from rollstream.errors import CorruptObject
from rollstream.storage.stores.file import translate_os_errors

TAIL_BYTES = 1 << 16  # longest line; a torn line is searched for in this many last bytes


class MetricsFile:
    """`RUN/metrics/<role>.jsonl`, opened for appending by its only writer."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with translate_os_errors("open", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _remove_torn_line(self._file)

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one line completely, or not at all and raise `StoreError`."""
        data = msgspec.json.encode(line) + b"\n"
        with translate_os_errors("write", self._path):
            size = os.fstat(self._file).st_size
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes fit")

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines, oldest first; none if there is no file yet.

    Raises `CorruptObject`, which names the line, if a line is not JSON.
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
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CorruptObject(f"{path}, line {number} is not a JSON object: {error}") from error


def _remove_torn_line(file: int) -> None:
    size = os.fstat(file).st_size
    tail = os.pread(file, TAIL_BYTES, max(0, size - TAIL_BYTES))
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        os.ftruncate(file, size - torn)
