"""The index and the views of a run that consists of a few records, through a bus in memory."""

from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa

from rollstream.look.index.index_reader import IndexReader
from rollstream.look.index.run_index import RunIndex
from rollstream.look.query.base_views import define_misplaced
from rollstream.look.query.record_times import with_known_times
from rollstream.look.query.views import VIEWS, dependency_order
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.schema import arrow_schema
from rollstream.streams.bus import Bus
from rollstream.streams.records import (
    Admitted,
    Annotation,
    Applied,
    Opened,
    Prompt,
    Record,
    RolloutStatus,
    Trajectory,
    WeightsAnnounced,
)
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus

APPENDED_S = 1_700_000_000.0
RUN = "run"
WRITERS = {
    "admissions": "dispatch",
    "ledger": "trainer",
    "weights": "trainer",
    "prompts": "prompts",
}
TOPICS = ("trajectories", "annotations", "ledger", "admissions")


def log_of(records: Sequence[Record], partitions: int = 1) -> MemoryBus:
    """Publishes the records in this order, each to its topic; those of no other topic are the
    ledger's. An `Opened` begins the next term of a role.
    """
    bus = MemoryBus(lambda: APPENDED_S)
    bus.create(catalogue(partitions))
    writers = {topic: _writer(bus, topic, 1) for topic in WRITERS}
    for record in records:
        match record:
            case Opened():
                topics = (topic for topic, role in WRITERS.items() if role == record.role)
                writers |= {topic: _writer(bus, topic, record.term) for topic in topics}
            case Trajectory():
                publish(bus, "trajectories", str(record.group), record)
            case Annotation():
                publish(bus, "annotations", str(record.group), record)
            case Applied():
                publish(bus, "applied", record.rollout, record)
            case RolloutStatus():
                publish(bus, "status", f"{record.rollout}/{record.term}", record)
            case Admitted():
                writers["admissions"].append([(str(record.group), record)])
            case Prompt():
                writers["prompts"].append([(str(record.group), record)])
            case WeightsAnnounced():
                writers["weights"].append([(RUN, record)])
            case _:
                writers["ledger"].append([(RUN, record)])
    return bus


def _writer(bus: Bus, topic: str, term: int) -> FencedWriter:
    writer = FencedWriter(bus, topic, WRITERS[topic], term)
    writer.open()
    return writer


def index_of(*records: Record, partitions: int = 1) -> RunIndex:
    return read_index(LogView(log_of(records, partitions), None, RUN))


def read_index(
    view: LogView, max_lag: int | None = None, process_rewards: bool = False
) -> RunIndex:
    index = RunIndex(max_lag, process_rewards)
    IndexReader(view, index, with_tokens=True).refresh()
    return index


class RunViews:
    """The views of `rollstream query` over the same log."""

    def __init__(
        self, view: LogView, max_lag: int | None = None, process_rewards: bool = False
    ) -> None:
        self._connection = duckdb.connect()
        for topic in TOPICS:
            empty: Any = arrow_schema(topic).empty_table()
            self._insert(f"CREATE TABLE {topic} AS", empty)
            for table in view.topic(topic).tables():
                self._insert(f"INSERT INTO {topic} BY NAME", with_known_times(table))
        define_misplaced(self._connection, view.key_partitions("trajectories"))
        self._connection.execute(
            "CREATE TABLE settings (max_lag BIGINT, process_rewards BOOLEAN); "
            "CREATE TABLE evaluations (step BIGINT, by_prompt DOUBLE[][])"
        )
        self._connection.execute("INSERT INTO settings VALUES (?, ?)", [max_lag, process_rewards])
        for name in dependency_order(VIEWS):
            if VIEWS[name].query:
                self._connection.execute(f"CREATE VIEW {name} AS {VIEWS[name].query}")

    def _insert(self, statement: str, table: pa.Table) -> None:
        self._connection.register("arrow_rows", table)
        self._connection.execute(f"{statement} FROM arrow_rows")
        self._connection.unregister("arrow_rows")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()

    def close(self) -> None:
        self._connection.close()
