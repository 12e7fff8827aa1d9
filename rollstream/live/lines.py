"""A metrics file as it grows: each look gives the lines that are new, from a bounded tail on.

Lines appear whole, but for a last one that is being written or was torn by a kill (it waits for its
newline). A line that is no JSON object is counted and passed over: an onlooker has no use for an
error about somebody else's file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

TAIL_BYTES = 1 << 18  # some thousand lines of an old run; its earlier ones nobody looks at here


@dataclass(slots=True)
class LineTail:
    """Follow `path`, which may not exist yet, or be replaced by a shorter one."""

    path: Path
    at: int = -1
    broken: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Lines since the last look, oldest first."""
        try:
            size = self.path.stat().st_size
            if size == self.at:
                return []
            with self.path.open("rb") as file:
                return self._lines(file.read(TAIL_BYTES) if self._seek(file, size) else b"")
        except OSError:  # not there yet, or not ours to read: then there is nothing to show
            return []

    def _seek(self, file: Any, size: int) -> bool:
        if size < self.at:
            self.at = -1
        start = self.at
        if start < 0 or size - start > TAIL_BYTES:
            start = max(0, size - TAIL_BYTES)
            file.seek(max(0, start - 1))
            if start:
                file.readline()  # the rest of a line that began before
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
