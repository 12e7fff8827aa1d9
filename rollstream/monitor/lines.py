"""Reads a growing metrics file of JSON lines, starting from a bounded tail.

An incomplete last line (in progress, or truncated by a kill) is read once its newline arrives. A
line that is not a JSON object is counted and skipped: a monitor must not fail on a foreign file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

TAIL_BYTES = 1 << 18  # a few thousand lines; the monitor ignores the earlier ones of an old run


@dataclass(slots=True)
class JsonLinesTail:
    """Follows `path`, which may not exist yet and may be replaced by a shorter file."""

    path: Path
    at: int = -1
    broken: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete lines since the previous call, oldest first."""
        try:
            size = self.path.stat().st_size
            if size == self.at:
                return []
            with self.path.open("rb") as file:
                return self._lines(file.read(TAIL_BYTES) if self._seek(file, size) else b"")
        except OSError:  # missing or not readable: nothing to show
            return []

    def _seek(self, file: Any, size: int) -> bool:
        if size < self.at:
            self.at = -1
        start = self.at
        if start < 0 or size - start > TAIL_BYTES:
            start = max(0, size - TAIL_BYTES)
            file.seek(max(0, start - 1))
            if start:
                file.readline()  # skip the rest of a partial line
            self.at = file.tell() if start else 0
        file.seek(self.at)
        return size > self.at

    def _lines(self, data: bytes) -> list[dict[str, Any]]:
        whole = data[: data.rfind(b"\n") + 1]
        self.at += len(whole)
        found: list[dict[str, Any]] = []
        for line in whole.splitlines():
            try:
                found.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                self.broken += 1
        return found
