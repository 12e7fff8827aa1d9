"""The bus over Apache Kafka: a record whose offset `append` returned is on all in-sync replicas."""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from rollstream.errors import BusError
from rollstream.foreign_json import parse_json
from rollstream.metric_values import MetricValues
from rollstream.streams.bus import LEASE_S, AppendEntry, GroupReader, Message
from rollstream.streams.bus_checks import check_entries, check_same_settings, missing_topic
from rollstream.streams.kafka import client, topic_settings
from rollstream.streams.kafka.address import KafkaAddress, Secrets
from rollstream.streams.kafka.admin import (
    ANSWER_S,
    RetryingAdmin,
    call_with_retries,
    create_topics,
)
from rollstream.streams.kafka.cursors import Cursor, CursorPool, check_kept
from rollstream.streams.kafka.group import KafkaGroupReader
from rollstream.streams.kafka.prefetch import PrefetchConsumer
from rollstream.streams.kafka.producer import Appender, ByteSemaphore
from rollstream.streams.kafka.refusals import OffsetOutOfRange
from rollstream.streams.records import Fence, Position
from rollstream.streams.topics import Topic, partition_of

log = logging.getLogger(__name__)

CLOSE_S = 10.0  # `close` waits at most so long for appends in flight


class KafkaBus:
    """Threads may share it; after a fork a process opens its own. A request that the brokers do not
    answer is repeated for `answer_s`, the first one for `first_answer_s` at most, an append for two
    minutes.
    """

    def __init__(
        self,
        address: KafkaAddress,
        secrets: Secrets,
        clock: Callable[[], float] = time.time,
        *,
        lease_s: float = LEASE_S,
        answer_s: float = ANSWER_S,
        first_answer_s: float = inf,
    ) -> None:
        self._address = address
        self._clock = clock
        self._lease_s = lease_s
        self._answer_s = answer_s
        self._settings = client.base_settings(address, secrets)
        first_answer_s = min(answer_s, first_answer_s)
        reaching_ms = min(self._settings["bootstrap_timeout_ms"], int(first_answer_s * 1000))
        self._settings["bootstrap_timeout_ms"] = reaching_ms
        self._topics: dict[str, Topic] = {}
        self._read_retries = 0
        self._process = os.getpid()
        where = str(address)
        self._control = RetryingAdmin(
            where, lambda: client.Admin(self._settings), answer_s, first_answer_s
        )
        bound = ByteSemaphore(address.in_flight_bytes)
        self._appender = Appender(
            where,
            self._producer,
            bound,
            address.when_full,
            answer_s,
            lambda: self._control.advertised,
        )
        self._cursors = CursorPool(self._cursor)
        self._followed = PrefetchConsumer(self._consumer)

    def create(self, topics: Sequence[Topic]) -> None:
        """Creates topics; of one with more partitions than requested only the first ones are
        used.
        """
        existing = self._described([topic.name for topic in topics])
        missing = {
            self._address.topic(topic.name): (
                topic.partitions,
                topic_settings.configs_of(topic, self._address.min_isr),
            )
            for topic in topics
            if topic.name not in existing
        }
        if missing:
            copies = self._address.replication
            self._control.call("create topics", lambda admin: create_topics(admin, missing, copies))
            existing = self._described([topic.name for topic in topics])
        for topic in topics:
            settings = topic_settings.with_recorded_partitions(
                replace(existing[topic.name].topic, writer=topic.writer), topic.partitions
            )
            check_same_settings(settings, topic)
            self._topics[topic.name] = settings
        self._warn(topics, existing)

    def settings(self, topic: str) -> Topic:
        return self._topic(topic)

    def partitions(self, topic: str) -> int:
        return self._topic(topic).partitions

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        settings = self._topic(topic)
        check_entries(settings, entries)
        now_ms = int(self._clock() * 1000)
        records = [
            (
                partition_of(entry.key, settings.partitions)
                if entry.partition is None
                else entry.partition,
                entry.key,
                entry.value,
                now_ms if entry.timestamp_ms is None else entry.timestamp_ms,
            )
            for entry in entries
        ]
        return self._appender.append(self._address.topic(topic), records)

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
        settings = self._topic(topic)
        for partition in positions:
            if not 0 <= partition < settings.partitions:
                raise BusError(f"topic {topic!r} has no partition {partition}")
        if not positions:
            time.sleep(wait_s)
            return []

        if not exact:
            try:
                followed = self._followed.read(topic, positions, records_max, bytes_max, wait_s)
            except OffsetOutOfRange:
                check_kept(self, topic, positions)
                followed = None  # the position exists by now: a partition leader was behind
            if followed is not None:
                return followed

        def once() -> list[Message]:
            with self._cursors.borrowed(topic, positions) as cursor:
                answer_s = self._answer_s if exact else None
                return cursor.read(positions, records_max, bytes_max, wait_s, answer_s)

        what = f"read {topic!r} at {self._address}"
        return call_with_retries(what, self._answer_s, once, self._count_retry)

    def begin(self, topic: str) -> dict[int, int]:
        return self._offsets(topic, ends=False)

    def end(self, topic: str) -> dict[int, int]:
        return self._offsets(topic, ends=True)

    def commit(self, group: str, topic: str, positions: Mapping[int, Position]) -> None:
        offsets = {p: (at.offset, _format_fence(at.fence)) for p, at in positions.items()}
        names = self._group(group, topic), self._address.topic(topic)
        self._control.call(
            f"commit positions of {group!r} in {topic!r}",
            lambda admin: admin.commit(*names, offsets),
        )

    def committed(self, group: str, topic: str) -> dict[int, Position]:
        partitions = self.partitions(topic)
        names = self._group(group, topic), self._address.topic(topic)
        positions = self._control.call(
            f"look up positions of {group!r} in {topic!r}",
            lambda admin: admin.committed(*names, partitions),
        )
        return {p: Position(offset, _parse_fence(text)) for p, (offset, text) in positions.items()}

    def truncate(self, topic: str, before: Mapping[int, int]) -> None:
        if self._topic(topic).cleanup == "compact":
            raise BusError(f"topic {topic!r} is compacted; Kafka truncates no such topic")
        begins, ends = self.begin(topic), self.end(topic)
        due = {
            partition: min(offset, ends[partition] - 1)
            for partition, offset in before.items()
            if min(offset, ends[partition] - 1) > begins[partition]
        }
        if due:
            name = self._address.topic(topic)
            self._control.call(f"truncate {topic!r}", lambda admin: admin.delete_records(name, due))
            self._cursors.drop_topic(topic)

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        self._topic(topic)
        names = self._address.topic, self._group(group, topic), self._lease_s
        settings = self._settings | {"client_id": member}
        return KafkaGroupReader(
            self, group, topic, lambda: client.Consumer(settings, *names), self._answer_s
        )

    def metric_values(self) -> MetricValues:
        return {
            "bus_retries_total": self._control.retries + self._read_retries,
            "log_follow_restarts_total": self._followed.restarts,
            "log_follow_lost_total": self._followed.lost,
        }

    def close(self) -> None:
        if os.getpid() == self._process:
            self._appender.close(CLOSE_S)
            self._followed.close()
            self._cursors.close()
            self._control.close()

    def _count_retry(self, error: Exception) -> None:
        self._read_retries += 1

    def _producer(self) -> client.Producer:
        batch_bytes = min(self._address.batch_bytes, topic_settings.BATCH_ROOM_BYTES)
        return client.Producer(self._settings, self._address.linger_ms, batch_bytes)

    def _cursor(self, topic: str, spare: client.Consumer | None) -> Cursor:
        return Cursor(self, topic, spare or self._consumer())

    def _consumer(self, fetch_wait_ms: int = client.FETCH_WAIT_MS) -> client.Consumer:
        return client.Consumer(self._settings, self._address.topic, fetch_wait_ms=fetch_wait_ms)

    def _group(self, group: str, topic: str) -> str:
        # Kafka's groups span topics and ours do not, so each (group, topic) is a Kafka group.
        return self._address.topic(f"{group}.{topic}")

    def _offsets(self, topic: str, *, ends: bool) -> dict[int, int]:
        name, partitions = self._address.topic(topic), self.partitions(topic)
        return self._control.call(
            f"look up offsets of {topic!r}",
            lambda admin: admin.offsets(name, partitions, ends=ends),
        )

    def _topic(self, topic: str) -> Topic:
        if os.getpid() != self._process:
            raise BusError(f"{self._address} was opened before a fork; open it in this process")
        # Another process may have created it.
        if topic not in self._topics:
            described = self._described([topic])
            if topic not in described:
                raise missing_topic(topic, str(self._address))
            self._topics[topic] = topic_settings.with_recorded_partitions(described[topic].topic)
        return self._topics[topic]

    def _warn(
        self, topics: Sequence[Topic], broker_topics: Mapping[str, topic_settings.BrokerTopic]
    ) -> None:
        grown = [
            f"{topic.name} ({topic.partitions} of {broker_topics[topic.name].topic.partitions})"
            for topic in topics
            if broker_topics[topic.name].topic.partitions > topic.partitions
        ]
        if grown:
            log.warning(
                "%s: topics have more partitions than at the run's start; a key must keep its "
                "partition, so the added ones stay empty: %s",
                self._address,
                ", ".join(grown),
            )
        names = {topic: self._address.topic(topic) for topic in broker_topics}
        if bound := topic_settings.clock_bound_topics(broker_topics, names):
            log.warning("%s: %s", self._address, bound)
        # Only then ask how many there are.
        if topic_settings.unreplicated_topics(broker_topics, brokers=2):
            brokers = self._control.call("look up brokers", lambda admin: admin.brokers())
            if lacking := topic_settings.unreplicated_topics(broker_topics, brokers):
                log.warning("%s: %s", self._address, lacking)

    def _described(self, topics: Sequence[str]) -> dict[str, topic_settings.BrokerTopic]:
        names = {topic: self._address.topic(topic) for topic in topics}
        copies = self._control.call("look up topics", lambda a: a.copies(names.values()))
        present = {topic: name for topic, name in names.items() if name in copies}
        if not present:
            return {}
        configs = self._control.call("look up topics", lambda a: a.configs(present.values()))
        broker_topics: dict[str, topic_settings.BrokerTopic] = {}
        for topic, name in present.items():
            described = topic_settings.topic_of(topic, len(copies[name]), configs[name])
            topic_settings.check_unbounded(described, configs[name])
            broker_topics[topic] = topic_settings.BrokerTopic(
                described,
                min(copies[name]),
                int(configs[name]["min.insync.replicas"]),
                topic_settings.clock_s_of(configs[name]),
            )
        return broker_topics


def _format_fence(fence: Fence) -> str:
    # `presumed` is written only if it is set: release 0.1.0 reads two numbers.
    numbers = [fence.term, fence.sequence, *([True] if fence.presumed else [])]
    return json.dumps(numbers) if fence != Fence() else ""


def _parse_fence(text: str) -> Fence:
    try:
        term, sequence, *presumed = parse_json(text, list[int | bool])
        return Fence(int(term), int(sequence), presumed == [True])
    except ValueError:
        # Commits of foreign tools have other metadata.
        return Fence()
