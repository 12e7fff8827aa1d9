"""`python -m testbed.kills.aimed_role COMMAND …` is `rollstream COMMAND …` with every write passing
a gate, at which a test can aim a signal (`aims.py`). A supervisor started this way starts its roles
this way.

Only the entry points are wrapped: the functions that open the bus and the store, a line of metrics,
the supervisor's file of nonces, and the insertion into the history that a node's rollouts draft
from.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollstream.run.supervisor.process import ProcessSpec
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.stores import connect as stores_connect
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams import connect
from rollstream.streams.bus import AppendEntry, Bus, GroupReader, Message
from rollstream.streams.records import Position
from rollstream.streams.topics import Topic
from testbed.kills.aims import FOLDER, AimedGate
from testbed.kills.moments import FILL
from testbed.stepped.crashing_store import CrashingStore

MODULE = "testbed.kills.aimed_role"


class AimedBus:
    """See `Bus`; methods that are not defined here only read."""

    def __init__(self, inner: Bus, gate: AimedGate) -> None:
        self._inner, self._gate = inner, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, topics: Sequence[Topic]) -> None:
        self._gate.write("create topics", lambda: self._inner.create(topics))

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        return self._gate.write(f"append {topic}", lambda: self._inner.append(topic, entries))

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        kind = f"commit {group} {topic}"
        self._gate.write(kind, lambda: self._inner.commit(group, topic, positions))

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        self._gate.write(f"truncate {topic}", lambda: self._inner.truncate(topic, before))

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        inner = self._inner.join(group, topic, member)
        return AimedReader(inner, self._gate, f"commit {group} {topic}")


@dataclass(frozen=True)
class AimedReader(GroupReader):
    """See `GroupReader`; a commit is a write of this `kind`."""

    inner: GroupReader
    gate: AimedGate
    kind: str

    def poll(self, wait_s: float, records_max: int = 512) -> list[Message]:
        return self.inner.poll(wait_s, records_max)

    def commit(self, before: Mapping[int, int] | None = None) -> None:
        self.gate.write(self.kind, lambda: self.inner.commit(before))

    def pass_lost(self) -> dict[int, int]:
        return self.inner.pass_lost()

    def close(self) -> None:
        self.inner.close()


def aim_at_writes(gate: AimedGate) -> None:
    """Wraps the opening functions. Call it before any other import of the product."""
    open_bus, open_store = connect.open_bus, stores_connect.open_store
    line = MetricsFile.append

    def open_aimed_bus(*given: Any, **named: Any) -> Bus:
        return AimedBus(open_bus(*given, **named), gate)  # type: ignore[return-value]

    def open_aimed_store(*given: Any, **named: Any) -> ObjectStore:
        return CrashingStore(open_store(*given, **named), gate)

    connect.open_bus = open_aimed_bus
    stores_connect.open_store = open_aimed_store

    def append(self: MetricsFile, values: Mapping[str, Any]) -> None:
        gate.write(f"line {self._path.name}", lambda: line(self, values))  # pyright: ignore[reportPrivateUsage]

    MetricsFile.append = append  # pyright: ignore[reportAttributeAccessIssue]


def aim_at_supervisor(gate: AimedGate) -> None:
    """Wraps the supervisor's file of nonces and the command lines of its roles."""
    from rollstream.run.supervisor import plan
    from rollstream.run.supervisor.supervisor import RunLock

    process_specs, keep = plan.process_specs, RunLock.keep_nonces

    def aimed_specs(*given: Any, **named: Any) -> list[ProcessSpec]:
        return [
            replace(
                spec,
                command=[MODULE if word == "rollstream" else word for word in spec.command],
            )
            for spec in process_specs(*given, **named)
        ]

    def keep_nonces(self: RunLock, nonces: Mapping[str, str]) -> None:
        gate.write("nonces", lambda: keep(self, nonces))

    plan.process_specs = aimed_specs
    RunLock.keep_nonces = keep_nonces


def aim_at_history(gate: AimedGate) -> None:
    """Wraps insertion in the rollout that fills the history: `FILL` is the middle of one, when its
    tokens are in the ring and its patterns enter the table, under the folder's lock.
    """
    from rollstream.producers.drafts.node import NodeHistory

    take_over = NodeHistory.take_over

    def aimed(self: NodeHistory) -> Any:
        history = take_over(self)
        if history is not None:
            table = history._table  # pyright: ignore[reportPrivateUsage]
            add = table.add
            table.add = lambda *a: gate.write(FILL, lambda: add(*a))  # type: ignore[method-assign]
        return history

    NodeHistory.take_over = aimed  # type: ignore[method-assign]


def main() -> int:
    words = sys.argv[1:]
    name = "supervisor"
    with suppress(ValueError):
        name = words[words.index("--name") + 1]
    gate = AimedGate(Path(os.environ[FOLDER]), name)
    aim_at_writes(gate)
    if words[0] == "run":
        aim_at_supervisor(gate)
    elif words[0] == "rollout":
        aim_at_history(gate)
    from rollstream.run.cli.main import main as rollstream

    return rollstream(words)


if __name__ == "__main__":
    sys.exit(main())
