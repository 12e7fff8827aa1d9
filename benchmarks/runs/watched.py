"""Runs of `examples/longtail.toml` that are watched while they last: heartbeats are read as they
come, since `status` is compacted, and everything else from the log at the end (nothing is
truncated).

The engine is paced, so lengths are drawn and times computed; processes, log, weights, moves and
kills are real. A run is ended by its id when its window is over: there is no final drain in it.
"""

import subprocess
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rollstream.config.config import load
from rollstream.config.run_folder import open_run_log_for_writing
from rollstream.errors import BusError
from rollstream.monitor.feed import TopicWatcher
from rollstream.streams.bus import Bus
from rollstream.streams.records import RolloutStatus, StepDone
from testbed.repository import EXAMPLES
from testbed.run_process import run_line, running

EXAMPLE = EXAMPLES / "longtail.toml"
LOOK_S = 0.2
WAIT_S = 600.0
SETTINGS = ("trainer.steps=60", "truncate=false", "archive.enabled=false", "checkpoints.every=60")


@dataclass(slots=True)
class Watched:
    """A run under way: the heartbeats of each rollout, and when each step was done."""

    process: subprocess.Popen[bytes]
    folder: Path
    beats: dict[str, list[RolloutStatus]] = field(default_factory=dict[str, list[RolloutStatus]])
    steps: dict[int, StepDone] = field(default_factory=dict[int, StepDone])
    _bus: Bus | None = None
    _watchers: dict[str, TopicWatcher] = field(default_factory=dict[str, TopicWatcher])

    def until(self, done: Callable[[], bool]) -> None:
        """Look until it is so; a run that ends meanwhile raises."""
        give_up = time.monotonic() + WAIT_S
        while True:
            self.look()
            if done():
                return
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended early, see {self.folder}.log")
            if time.monotonic() > give_up:
                raise RuntimeError(f"nothing came in {WAIT_S:g} s, see {self.folder}.log")
            time.sleep(LOOK_S)

    def wait(self, seconds: float) -> None:
        """Look for so long."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    def look(self) -> None:
        if not self._watchers and not self._open():
            return
        for topic in ("status", "ledger"):
            for seen in self._watchers[topic].poll(4096):
                if isinstance(seen.record, RolloutStatus):
                    self.beats.setdefault(seen.record.rollout, []).append(seen.record)
                elif isinstance(seen.record, StepDone):
                    self.steps[seen.record.step] = seen.record

    def _open(self) -> bool:
        """Whether the log is there, with all its topics."""
        path = self.folder / "config.json"
        if not path.exists() or not (self.folder / "bus").is_dir():
            return False
        try:
            bus = open_run_log_for_writing(load(path), self.folder)
            ends = {topic: bus.end(topic) for topic in ("status", "ledger")}
        except BusError:
            return False
        self._bus = bus
        self._watchers = {t: TopicWatcher(bus, t, dict.fromkeys(end, 0)) for t, end in ends.items()}
        return True

    def close(self) -> None:
        if self._bus is not None:
            self._bus.close()


@contextmanager
def watched(folder: Path, settings: Sequence[str], example: Path = EXAMPLE) -> Generator[Watched]:
    """The example as a process with `settings` over it; killed with its roles in the end."""
    line = run_line(example, folder, [*SETTINGS, *settings])
    with running(line, Path(f"{folder}.log")) as process:
        run = Watched(process, folder)
        try:
            yield run
        finally:
            run.close()


def tokens_by(beats: Sequence[RolloutStatus], time_s: float) -> float:
    """Generated tokens of one rollout by then, over all its terms, linear between heartbeats."""
    times = [beat.time_s for beat in beats]
    totals: list[float] = []
    before, last = 0, None
    for beat in beats:
        if last is not None and beat.term > last.term:
            before += last.tokens_total
        totals.append(before + beat.tokens_total)
        last = beat
    at = bisect_right(times, time_s)
    if not 0 < at < len(times):
        return totals[at - 1] if at else 0.0
    share = (time_s - times[at - 1]) / max(1e-9, times[at] - times[at - 1])
    return totals[at - 1] + share * (totals[at] - totals[at - 1])


def throughput(run: Watched, begin_s: float, end_s: float) -> float:
    """Tokens that all rollouts generated per second."""
    made = (tokens_by(b, end_s) - tokens_by(b, begin_s) for b in run.beats.values())
    return sum(made) / (end_s - begin_s)


@dataclass(frozen=True, slots=True)
class Slots:
    """Slot-seconds of a window as shares of all: `running`, and `bound` where slots stay empty
    because requests wait in the engine for KV; both again outside of drains, whose share of the
    time is `draining`; `kv` is the mean of KV used.
    """

    running: float
    bound: float
    running_outside: float
    bound_outside: float
    draining: float
    kv: float

    @property
    def busy_outside(self) -> float:
        return self.running_outside + self.bound_outside

    @property
    def idle(self) -> float:
        return 1 - self.running - self.bound


def slots_of(run: Watched, begin_s: float, end_s: float) -> Slots:
    """A heartbeat counts until the next one. A drain is the time in which a rollout says that it is
    `draining`: a newer version is out, its quota is drawn, and it takes nothing new until empty.
    """
    whole = running = bound = kv = 0.0
    outside = running_outside = bound_outside = 0.0
    for beats in run.beats.values():
        for beat, after in pairwise(beats):
            seconds = min(after.time_s, end_s) - max(beat.time_s, begin_s)
            if seconds <= 0:
                continue
            ran = seconds * beat.running / beat.slots
            is_bound = beat.waiting - beat.queued > 0
            held_back = seconds - ran if is_bound else 0.0
            whole, running, bound = whole + seconds, running + ran, bound + held_back
            kv += seconds * beat.kv_used / beat.kv_capacity
            if beat.health != "draining":
                outside += seconds
                running_outside, bound_outside = running_outside + ran, bound_outside + held_back
    whole, outside = max(1e-9, whole), max(1e-9, outside)
    return Slots(
        running / whole,
        bound / whole,
        running_outside / outside,
        bound_outside / outside,
        1 - outside / whole,
        kv / whole,
    )
