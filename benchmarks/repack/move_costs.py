"""The cost of moves, from the log of a run: when each request was asked back, given up, and resumed
at its destination.
"""

from dataclasses import dataclass
from pathlib import Path

from rollstream.look.monitor.state import MOVES_FILE, parse_moves
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import bus_url
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.records import Assignment, Partial, Trajectory


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of each request that moved, and of each plan with moves; `again` counts
    trajectories that restarted.
    """

    asked_ms: tuple[float, ...]
    """From the release until the last partial was in the log."""
    resumed_ms: tuple[float, ...]
    """From there until the destination's engine had the request; known for those that ended
    there.
    """
    plan_ms: tuple[float, ...]
    again: int


def cost_of(folder: Path) -> Cost:
    """Reads a finished run that truncated nothing."""
    bus = open_bus(bus_url(load(folder / "config.json"), folder))
    asked: dict[tuple[str, int], float] = {}
    again = 0
    for one in _read(bus, "assignments"):
        if isinstance(one.record, Assignment):
            again += one.record.kind == "start" and one.record.attempt > 1
            if one.record.kind == "release" and one.record.onward:
                asked[one.record.trajectory, one.record.attempt] = float(one.timestamp_ms)
    given: dict[tuple[str, int], float] = {
        (one.record.trajectory, one.record.attempt): float(one.timestamp_ms)
        for one in _read(bus, "partials")
        if isinstance(one.record, Partial) and one.record.last
    }
    begun = {
        (one.record.trajectory, one.record.attempt - 1): 1000 * one.record.started_s
        for one in _read(bus, "trajectories")
        if isinstance(one.record, Trajectory) and one.record.finish != "dead"
    }
    bus.close()
    moved = [key for key in asked if key in given]
    return Cost(
        tuple(given[key] - asked[key] for key in moved),
        tuple(begun[key] - given[key] for key in moved if key in begun),
        tuple(
            1000 * move.plan_s
            for move in parse_moves(read_metrics(folder / "metrics" / MOVES_FILE))
        ),
        again,
    )


def _read(bus: Bus, topic: str) -> list[Received]:
    return TopicReader(bus, topic, from_begin(bus, topic)).read_to(bus.end(topic))
