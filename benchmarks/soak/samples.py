"""Memory, open files, threads and interpreter allocations of the processes of a run while it lasts,
and how much of each there is in the last quarter of its steps against the second.
"""

import statistics
import urllib.error
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from testbed.scraping import endpoint, scrape, value

SETTLED_S = 10.0  # age before which a process still imports
MEASURES = ("memory", "files", "threads", "allocations")
Found = dict[tuple[str, str], list[tuple[int, float]]]
"""(role or place, measure) → (step, value), in the order of time."""


@dataclass(frozen=True, slots=True)
class Growth:
    """`ratio` = median of the last quarter / median of the second; `place` is a role, or a part of
    the store.
    """

    place: str
    measure: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / max(1.0, self.before)

    def __str__(self) -> str:
        return f"{self.place} {self.measure} {self.before:,.6g} → {self.after:,.6g}"


@dataclass(slots=True)
class Samples:
    """What was measured so far, by role: `visitor-3` and `visitor-4` are both `visitor`."""

    folder: Path
    found: Found = field(default_factory=Found)

    def step(self) -> int:
        """Steps that the trainer finished; 0 before it answers."""
        return int(self._metric("trainer", "rollstream_trainer_step"))

    def add_process(self, step: int, name: str, process: psutil.Process, now_s: float) -> None:
        """Measure a role with its own children. A process that ended meanwhile is left out, and so
        is one whose metrics do not answer yet: on a busy machine imports take longer than
        `SETTLED_S`.
        """
        try:
            allocations = self._metric(name, "rollstream_interpreter_allocations")
            if not allocations or now_s - process.create_time() < SETTLED_S:
                return
            tree = [process] if name == "supervisor" else [process, *process.children(True)]
            values = {
                "memory": sum(one.memory_full_info().uss for one in tree) / 1e6,
                "files": float(sum(one.num_fds() for one in tree)),
                "threads": float(sum(one.num_threads() for one in tree)),
                "allocations": allocations,
            }
        except psutil.NoSuchProcess:
            return
        self.add(step, name.split("_")[0], values)

    def add(self, step: int, place: str, values: Mapping[str, float]) -> None:
        for measure, number in values.items():
            self.found.setdefault((place, measure), []).append((step, number))

    def growths(self, steps: int, measures: Iterable[str]) -> list[Growth]:
        """Of everything that was there in both quarters, the largest first."""
        wanted, grown = set(measures), list[Growth]()
        for (place, measure), values in self.found.items():
            before = [v for step, v in values if steps / 4 < step <= steps / 2 and v]
            after = [v for step, v in values if step > 3 * steps / 4 and v]
            if measure in wanted and before and after:
                grown.append(
                    Growth(place, measure, statistics.median(before), statistics.median(after))
                )
        return sorted(grown, key=lambda one: one.ratio, reverse=True)

    def _metric(self, name: str, metric: str) -> float:
        """One figure of the role's own endpoint; 0 where it does not answer."""
        try:
            at = endpoint(self.folder, name)
            return value(scrape(f"http://{at['host']}:{at['port']}"), metric)
        except (OSError, KeyError, ValueError, urllib.error.URLError):
            return 0.0


def lines(grown: Sequence[Growth], count: int) -> str:
    """The largest growths as text."""
    return "; ".join(map(str, grown[:count]))
