"""A bus that passes every call to another one (`BusWrapper`)."""

from collections.abc import Mapping, Sequence

from rollstream.metric_values import MetricValues, ProvidesMetrics
from rollstream.streams.bus import AppendEntry, Bus, GroupReader, Message
from rollstream.streams.records import Position
from rollstream.streams.topics import Topic


class BusWrapper:
    """Passes every call to the bus `below`, and closes it. What changes a bus (claim check, fault
    injection) derives from this class.
    """

    def __init__(self, below: Bus) -> None:
        self._below = below

    def create(self, topics: Sequence[Topic]) -> None:
        self._below.create(topics)

    def settings(self, topic: str) -> Topic:
        return self._below.settings(topic)

    def partitions(self, topic: str) -> int:
        return self._below.partitions(topic)

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        return self._below.append(topic, entries)

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
        return self._below.read(
            topic,
            positions,
            records_max=records_max,
            bytes_max=bytes_max,
            wait_s=wait_s,
            exact=exact,
        )

    def begin(self, topic: str) -> dict[int, int]:
        return self._below.begin(topic)

    def end(self, topic: str) -> dict[int, int]:
        return self._below.end(topic)

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        self._below.commit(group, topic, positions)

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        return self._below.committed(group, topic)

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        self._below.truncate(topic, before)

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        return self._below.join(group, topic, member)

    def metric_values(self) -> MetricValues:
        return self._below.metric_values() if isinstance(self._below, ProvidesMetrics) else {}

    def close(self) -> None:
        self._below.close()
