"""A stepped run in memory into whose topics of many writers hostile records are appended."""

from collections.abc import Sequence

from rollstream.storage.claim_check import ClaimCheck
from rollstream.streams.bus import AppendEntry, Bus
from testbed.hostile.records import Hostile, hostile_records
from testbed.memory import MemoryBus, MemoryStore
from testbed.stepped.baton import Baton, Process
from testbed.stepped.run import Shape, SteppedRun
from testbed.stepped.trials import Trial, scratch_folder, tried

PARTITIONS = 2
BATCH = 25
PAUSE_S = 0.02
SHAPE = Shape(steps=12, groups=2, samples=2)


def hostile_trial(seed: int, count: int, shape: Shape = SHAPE) -> tuple[Trial, SteppedRun]:
    """Runs to the end; a role that ends through a record is a finding."""
    with scratch_folder() as folder:
        baton, store = Baton(seed), MemoryStore()
        bus = ClaimCheck(MemoryBus(baton.clock), store)
        run = SteppedRun(lambda: (bus, store), folder, baton, shape)
        records = list(hostile_records(seed, count, PARTITIONS))

        def publish() -> None:
            for first in range(0, len(records), BATCH):
                append_all(bus, records[first : first + BATCH])
                baton.wait(PAUSE_S)

        baton.start(Process("hostile"), publish)
        trial = tried(run, f"seed {seed}, {count} hostile records", run.plan)
        trial.found.wrong += [
            f"{name} started {n} times" for name, n in run.starts.items() if n > 1
        ]
        return trial, run


def append_all(bus: Bus, records: Sequence[Hostile]) -> None:
    """Appends each record to its topic, in one append a topic."""
    for topic in {record.topic for record in records}:
        entries = [
            AppendEntry(record.key, record.value, record.partition)
            for record in records
            if record.topic == topic
        ]
        bus.append(topic, entries)
