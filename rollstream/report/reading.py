"""Reading a run for its report: topics up to their present ends, metrics files, configuration."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollstream.config import flat, load
from rollstream.folder import RunFolder
from rollstream.report.history import History
from storage.metrics import read_metrics
from streams.bus import Bus
from streams.reader import TopicReader, from_begin
from streams.records import Record

# The ledger first: a group that ends while we read is then never without its admission.
TOPICS = ("ledger", "admissions", "applied", "weights", "status", "trajectories")
RECORDS_MAX = 1024


def read_history(bus: Bus, folder: RunFolder) -> History:
    """The run as far as it is now; it may be running, and half of it may be missing."""
    history = History(
        configuration=flat(load(folder.configuration)) if folder.configuration.exists() else {},
        warmup=_json(folder.model / "warmup.json"),
        evaluations=read_metrics(folder.metrics / "eval.jsonl"),
        events=read_metrics(folder.metrics / "supervisor.jsonl"),
    )
    for topic in TOPICS:
        for record in _records(bus, topic):
            history.apply(record)
    return history


def _records(bus: Bus, topic: str) -> Iterator[Record]:
    """Everything kept, up to the end that the topic had when reading began."""
    ends = bus.end(topic)
    reader = TopicReader(bus, topic, from_begin(bus, topic))
    while any(at.offset < ends[partition] for partition, at in reader.positions.items()):
        before = dict(reader.positions)
        yield from (one.record for one in reader.poll(0.0, RECORDS_MAX))
        if reader.positions == before:  # what is left was compacted away
            return


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
