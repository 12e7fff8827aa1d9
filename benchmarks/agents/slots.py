"""Slots while environments work: the share of slot-seconds in which slots decode, while each turn
waits ten seconds for its environment (`waiting.toml`: sleeping environments, the paced engine).

A turn decodes for about a second, so of eleven open dialogues ten wait. Status records are sent
every 100 ms; a heartbeat counts until the next one. The window starts when as many dialogues wait
as the lengths of turns let expect.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.agents.world import CONFIGURATION, options
from benchmarks.case import Case, alone
from benchmarks.runs.watched import slots_of, watched

SLOTS = 32
TURNS = 6
WINDOW_S, WINDOW_QUICK_S = 60.0, 30.0
WARM_S = 40.0
# About 32 · 11 dialogues are open at a time; admission leaves room for 960.
SETTINGS = (
    f"rollouts.slots={SLOTS}",
    "trainer.steps=10000",
    "dispatch.max_lag=14",
    "trainer.groups_per_step=8",
    "paced.lengths.median=128",
    "paced.lengths.p99=256",
)


def cases(quick: bool) -> Iterator[Case]:
    """Yields the share of busy slot-seconds."""
    with tempfile.TemporaryDirectory(prefix="rollstream-slots-") as scratch:
        settings = (*SETTINGS, *options(turns=TURNS, shape="fixed"))
        with watched(Path(scratch) / "run", settings, CONFIGURATION) as run:
            run.wait_for(lambda: 1 in run.steps)
            run.rest(WARM_S)
            begin_s = time.time()
            run.rest(WINDOW_QUICK_S if quick else WINDOW_S)
            end_s = min(beats[-1].time_s for beats in run.beats.values())
            found = slots_of(run, begin_s, end_s)
            beats = [beat for beats in run.beats.values() for beat in beats]
            parked = [beat.parked for beat in beats if begin_s <= beat.time_s <= end_s]
    mean = sum(parked) / max(1, len(parked))
    note = (
        f"sleeping environments, paced engine, real time; {SLOTS} slots, {mean:.0f} dialogues "
        f"waited on average, each turn 10 s; {found.bound:.1%} more stood empty for want of KV"
    )
    yield alone("agents_slots", found.running, "share", at_least=0.95, note=note)
