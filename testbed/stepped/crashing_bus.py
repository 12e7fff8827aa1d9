"""A real bus as one process sees it: each write passes its gate, each wait passes the baton on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollstream.streams.bus import AppendEntry, Bus, GroupReader, Message
from rollstream.streams.records import Position
from rollstream.streams.topics import Topic
from testbed.stepped.crashes import Gate


@dataclass
class CrashingBus:
    """See `Bus`."""

    inner: Bus
    gate: Gate

    def create(self, topics: Sequence[Topic]) -> None:
        self.gate.write("bus.create", lambda: self.inner.create(topics))

    def settings(self, topic: str) -> Topic:
        return self.inner.settings(topic)

    def partitions(self, topic: str) -> int:
        return self.inner.partitions(topic)

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        with self.gate.baton.appending():
            return self.gate.write(f"append {topic}", lambda: self.inner.append(topic, entries))

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        records_max: int = 512,
        bytes_max: int = 16 << 20,
        wait_s: float = 0.0,
        exact: bool = True,
    ) -> list[Message]:
        self.gate.look()
        found = self._read(topic, positions, records_max, bytes_max)
        if not found and wait_s > 0:
            self.gate.baton.wait(wait_s)
            found = self._read(topic, positions, records_max, bytes_max)
        return found

    def begin(self, topic: str) -> dict[int, int]:
        self.gate.look()
        return self.inner.begin(topic)

    def end(self, topic: str) -> dict[int, int]:
        self.gate.look()
        return self.inner.end(topic)

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        self.gate.write(f"commit {topic}", lambda: self.inner.commit(group, topic, positions))

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        self.gate.look()
        return self.inner.committed(group, topic)

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        self.gate.write(f"truncate {topic}", lambda: self.inner.truncate(topic, before))

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        raise NotImplementedError("no role of a stepped run joins a group")

    def close(self) -> None:
        """The opener closes the medium."""

    def _read(
        self, topic: str, positions: Mapping[int, int], records_max: int, bytes_max: int
    ) -> list[Message]:
        return self.inner.read(topic, positions, records_max=records_max, bytes_max=bytes_max)
