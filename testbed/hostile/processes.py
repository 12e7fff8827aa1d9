"""Runs of real processes with hostile records in every topic of many writers, and how each record
was handled.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.classified import classify_message
from rollstream.streams.dead_letters import DeadLetterReader
from rollstream.streams.records import Fence, Take
from rollstream.streams.topics import partition_of
from rollstream.streams.values import GroupMembers
from testbed.hostile.records import Hostile, hostile_records
from testbed.run_driver import RunDriver
from testbed.run_process import random_model, read, started
from testbed.scraping import endpoint, scrape
from testbed.waiting import let_pass

BATCH = 250
PAUSE_S = 0.02
CONSUME_S = 120.0
REFUSING = (
    ("trainer", "trainer_completions_total"),
    ("dispatch", "dispatch_records_refused_total"),
)
"""The roles that act on a topic of many writers, and their counters for it."""


@dataclass
class Met:
    """One run: the roles that ended, the groups trained, the findings of audit, the counters."""

    ended: Counter[str] = field(default_factory=Counter[str])
    trained: frozenset[int] = frozenset()
    wrong: list[str] = field(default_factory=list[str])
    refused: int = 0
    readable: int = 0
    letters: Counter[tuple[str, int, int]] = field(default_factory=Counter[tuple[str, int, int]])
    expected: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])

    @property
    def unaccounted(self) -> int:
        """Hostile records without their one dead letter or their one refusal, and records counted
        twice.
        """
        wrong = sum(count != 1 for count in self.letters.values())
        wrong += len(self.expected ^ set(self.letters))
        return wrong + abs(self.refused - self.readable)


def hostile_pair(base: Path, form: str, seed: int, count: int, steps: int) -> tuple[Met, Met]:
    """Runs without hostile records and with `count` of them."""
    model = random_model(base / "model")
    records = list(hostile_records(seed, count))
    calm = _run(base / "calm", model, form, [], steps)
    return calm, _run(base / "hostile", model, form, records, steps)


def _run(folder: Path, model: Path, form: str, records: Sequence[Hostile], steps: int) -> Met:
    """Runs to the end; `records` are appended once the first step is trained."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = [
        f"trainer.steps={steps}", "trainer.filter_equal_rewards=false", "truncate=false",
        "dispatch.max_lag=null", "rollouts.partial_tokens=1000000", *_urls(form),
    ]  # fmt: skip
    met = Met()
    with started(folder, model, settings) as run:
        run.wait_for_step(1)
        if records:
            bus = open_run_log_for_writing(load(folder / "config.json"), folder)
            _append_all(bus, records, met)
            give_up = time.monotonic() + CONSUME_S
            while time.monotonic() < give_up and not run.newest().is_over:
                met.refused = _refused(folder) or met.refused
                if met.refused >= met.readable:
                    break
                let_pass(0.5)
            bus.close()
        if code := run.newest().wait(None, CONSUME_S * 5):
            met.wrong.append(f"the run ended with {code}")
    _look(folder, met, bool(records))
    return met


def _append_all(bus: Bus, records: Sequence[Hostile], met: Met) -> None:
    """Appends the records by topic, in batches; notes the position of each and whether it can be
    decoded.
    """
    for first in range(0, len(records), BATCH):
        batch = records[first : first + BATCH]
        for topic in sorted({one.topic for one in batch}):
            mine = [one for one in batch if one.topic == topic]
            partitions = bus.partitions(topic)
            entries = [AppendEntry(one.key, one.value, _partition(one, partitions)) for one in mine]
            offsets = bus.append(topic, entries)
            for entry, offset in zip(entries, offsets, strict=True):
                _, judged = classify_message(
                    entry.value or b"", Fence(), topic=topic, fenced=False, compacted=False
                )
                if judged.reason:
                    met.expected.add((topic, entry.partition or 0, offset))
                else:
                    met.readable += 1
        let_pass(PAUSE_S)


def _partition(one: Hostile, partitions: int) -> int:
    named = partition_of(one.key, partitions) if one.partition is None else one.partition
    return named % partitions


def _refused(folder: Path) -> int:
    """The counters of the acting roles now; 0 where a role does not answer."""
    found = 0
    for name, counter in REFUSING:
        try:
            series = scrape(endpoint(folder, name)["url"])
        except OSError:
            return 0
        found += int(sum(value for _, value in series.get(f"rollstream_{counter}", [])))
    return found


def _look(folder: Path, met: Met, hostile: bool) -> None:
    takes = read(folder, "ledger", Take)
    groups: list[GroupMembers] = [group for take in takes for group in take.groups]
    met.trained = frozenset(group.group for group in groups)
    for line in read_metrics(folder / "metrics" / "supervisor.jsonl"):
        if line.get("event") == "start" and line.get("restart"):
            met.ended[str(line.get("role"))] += 1
    report = RunDriver(folder).audit()
    met.wrong += [o["what"] for line in report["invariants"] for o in line["offenders"]]
    if hostile:
        bus = open_run_log_for_writing(load(folder / "config.json"), folder)
        for dead in DeadLetterReader(bus, ()).read():
            met.letters[dead.source, dead.partition, dead.offset] += 1
        bus.close()


def _urls(form: str) -> list[str]:
    if form == "embedded":
        return []
    from testbed.servers import kafka_broker, versity

    return [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}"]
