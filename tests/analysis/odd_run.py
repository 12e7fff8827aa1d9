"""A run whose records are sound in form and odd in content: times beyond any calendar, numbers
beyond any sense, texts with control characters. Every viewer shows it, or counts what it does not
show.
"""

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import encode
from rollstream.streams.records import Admitted, Dead, GroupClosed, StepDone, TakeFailed
from rollstream.streams.values import Address, Version
from rollstream.streams.writer import FencedWriter
from tests.analysis.asked_run import admitted, dead, make_run, note, open_log, trajectory

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\u202e\x00end"
"""Sets the title, clears the terminal, changes colours, returns to the line's begin, reorders."""
FAR_MS = 1 << 55
"""Milliseconds since the epoch, about a million years ahead."""
TIMES_MS = (FAR_MS, 253_402_300_800_000, -1, -FAR_MS, 0, (1 << 63) - 1, -(1 << 62))
"""The second is the first moment of year 10000."""
INFINITE, HUGE = float("inf"), 1e300


def make_odd_run(folder: Path) -> Path:
    """Writes the run of `make_run` and the odd records after its own."""
    make_run(folder)
    bus = open_log(folder)
    _append_texts(bus)
    _append_times(bus)
    bus.close()
    return folder


def _append_texts(bus: Bus) -> None:
    dispatch = FencedWriter(bus, "admissions", "dispatch", 3)
    trainer = FencedWriter(bus, "ledger", "trainer", 3)
    dispatch.open()
    trainer.open()
    dispatch.append([("4", admitted(4)), ("5", Admitted(5, 2, (), HUGE, Address(0, 0)))])
    odd = trajectory(4, 0, ((0, 9, 1),), HUGE)
    for record in (
        replace(odd, started_s=-HUGE, finished_s=HUGE),
        replace(dead(4, 1), reason=ESCAPES, rollout=ESCAPES, task=ESCAPES),
    ):
        bus.append("trajectories", [AppendEntry(b"4", encode(record))])
    for values in ([INFINITE], [-INFINITE], []):
        bus.append(
            "annotations", [AppendEntry(b"4", encode(note("4.0", ESCAPES, values, ESCAPES)))]
        )
    trainer.append(
        [
            ("run", TakeFailed(3, 0, (0,), ESCAPES)),
            ("run", GroupClosed(4, "dead", ESCAPES, 3)),
            ("run", StepDone(3, Version(3, 3), ESCAPES, 0, {ESCAPES: HUGE}, {}, HUGE)),
        ]
    )
    original = np.frombuffer(ESCAPES.encode(), np.uint8)
    lost = Dead("trajectories", 0, 0, ESCAPES, original)
    bus.append("dead", [AppendEntry(ESCAPES.encode(), encode(lost))])


def _append_times(bus: Bus) -> None:
    for number, at_ms in enumerate(TIMES_MS):
        group = 6 + number
        record = trajectory(group, 0, ((0, 9, 1),), None)
        entry = AppendEntry(str(group).encode(), encode(record), timestamp_ms=at_ms)
        bus.append("trajectories", [entry])
        for topic in ("annotations", "admissions", "ledger", "assignments", "status"):
            noted = encode(note(f"{group}.0", "length", [1.0]))
            bus.append(topic, [AppendEntry(b"x", noted, 0, at_ms)])
