"""Wraps kafka-python, which no other file imports. Every method may raise `KafkaError`."""

import os
import ssl
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import kafka
from kafka import errors
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.errors import KafkaError
from kafka.net.sasl.oauth import AbstractTokenProvider
from kafka.structs import OffsetAndMetadata, TopicPartition

from rollstream.deadline import Deadline
from rollstream.errors import ConfigurationError
from rollstream.streams.bus import Message
from rollstream.streams.kafka.address import (
    KEY_PASSWORD,
    KafkaAddress,
    Secrets,
    client_settings,
)
from rollstream.streams.kafka.log_filter import limit_kafka_log
from rollstream.streams.kafka.refusals import NoCommittedPosition, OffsetOutOfRange, open_client
from rollstream.streams.kafka.tokens import token_source
from rollstream.streams.kafka.topic_settings import BATCH_ROOM_BYTES, RECORD_BYTES_LIMIT

DELIVERY_S = 120.0  # kafka-python repeats a batch for this long; then it may be appended or not
FETCH_BYTES = 8 << 20  # of one response, or one larger record; a `Cursor` holds two responses
PARTITION_BYTES = 4 << 20  # of one partition in a response
FETCH_WAIT_MS = 250  # an idle broker answers after this; a reader that seeks waits for the answer
HEARTBEAT_S = 0.02  # of polling in `heartbeat`
SETTLE_S = 1.0  # that a poll waits for the end of a rebalance
POLL_EVERY_S = 300.0  # a group member that works longer on one poll's records loses its partitions

_LOST = "CommitFailed FencedInstanceId IllegalGeneration RebalanceInProgress UnknownMemberId"
LOST_MEMBERSHIP = tuple(getattr(errors, f"{name}Error") for name in _LOST.split())
"""By these a broker refuses a member that has lost its partitions or its group."""
_GONE = (errors.OffsetOutOfRangeError, errors.LogTruncationError)
Offsets = dict[int, tuple[int, str]]  # by partition, with the text stored beside the offset


def base_settings(address: KafkaAddress, secrets: Secrets) -> dict[str, Any]:
    """Returns the settings of all clients; limits kafka-python's log, too. Raises
    `ConfigurationError` for a missing file or function of the address.
    """
    limit_kafka_log()
    # kafka-python would ask the brokers again and again.
    _check_certificates(address, secrets)
    settings: dict[str, Any] = client_settings(address, secrets)
    if settings.get("sasl_mechanism") == "OAUTHBEARER":
        settings["sasl_oauth_token_provider"] = _TokenProvider(token_source(address, secrets))
    return settings


def _check_certificates(address: KafkaAddress, secrets: Secrets) -> None:
    for name in ("ca", "cert", "key"):
        file = getattr(address, name)
        if file and not os.access(file, os.R_OK):
            raise ConfigurationError(f"{name}={file} of the log's URL: no file that can be read")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if address.ca:
            context.load_verify_locations(address.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            f"ca={address.ca} of the log's URL holds no certificate in PEM form: {error}"
        ) from None
    try:
        if address.cert:
            context.load_cert_chain(address.cert, address.key, secrets.key_password)
    except (ssl.SSLError, OSError) as error:
        pair = f"cert={address.cert} and key={address.key} of the log's URL"
        fault = f"{pair} are no certificate and its key in PEM form: {error}"
        if b"ENCRYPTED" in Path(address.key).read_bytes():
            remedy = "does not open it" if secrets.key_password else "must hold its password"
            fault = f"key={address.key} of the log's URL is encrypted: {KEY_PASSWORD} {remedy}"
        raise ConfigurationError(fault) from None


class _TokenProvider(AbstractTokenProvider):
    def __init__(self, source: Callable[[], str]) -> None:
        super().__init__()
        self._source = source

    def token(self) -> Any:
        return self._source()


class Admin:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._client = open_client(kafka.KafkaAdminClient, settings)
        self._settings = settings
        self._offsets: Any = None

    def copies(self, names: Collection[str]) -> dict[str, list[int]]:
        descriptions = self._client.describe_topics(list(names))
        return {
            t["name"]: [len(partition["replica_nodes"]) for partition in t["partitions"]]
            for t in descriptions
            if t["error_code"] == 0
        }

    def brokers(self) -> int:
        return len(self._client.describe_cluster()["brokers"])

    def configs(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        topic_configs = self._client.describe_configs(resources, config_filter="all")["topic"]
        return {
            name: {key: config["value"] for key, config in configs.items()}
            for name, configs in topic_configs.items()
        }

    def create(
        self, topics: Mapping[str, tuple[int, Mapping[str, str]]], replication: int
    ) -> dict[str, KafkaError]:
        """Creates topics by name, with partitions and settings; returns the errors of topics that
        are not there now. Returns the errors of topics that are not there now.
        """
        copies = {"replication_factor": replication}
        requested = {
            name: {"num_partitions": partitions, "configs": dict(configs), **copies}
            for name, (partitions, configs) in topics.items()
        }
        answers = self._client.create_topics(requested, raise_errors=False)["topics"]
        for_code: Any = vars(errors)["for_code"]
        refused: dict[str, KafkaError] = {}
        for topic in answers:
            error = for_code(topic["error_code"])(topic["error_message"])
            # Another process may be first.
            if not isinstance(error, errors.NoError | errors.TopicAlreadyExistsError):
                refused[topic["name"]] = error
        self._client.wait_for_topics([name for name in topics if name not in refused])
        return refused

    def advertised(self) -> list[tuple[str, int]]:
        return [(at.host, at.port) for at in self._client._manager.cluster.brokers()]

    def offsets(self, topic: str, partitions: int, *, ends: bool) -> dict[int, int]:
        """Returns the first kept offset, or with `ends` that of the next record."""
        # A consumer caches the partition leaders; kafka-python's admin client looks them up before
        # each such request.
        if self._offsets is None:
            make: Any = kafka.KafkaConsumer
            self._offsets = make(
                **self._settings, group_id=None, enable_auto_commit=False, metrics_enabled=False
            )
        ask = self._offsets.end_offsets if ends else self._offsets.beginning_offsets
        offsets = ask([TopicPartition(topic, p) for p in range(partitions)])
        return {at.partition: offset for at, offset in offsets.items()}

    def topic_names(self) -> list[str]:
        return list(self._client.list_topics())

    def group_names(self) -> list[str]:
        return [group["group_id"] for group in self._client.list_groups()]

    def members(self, groups: Collection[str]) -> dict[str, int]:
        descriptions: dict[str, Any] = self._client.describe_groups(list(groups)) if groups else {}
        return {name: len(group["members"]) for name, group in descriptions.items()}

    def log_bytes(self, topics: Collection[str]) -> dict[str, int]:
        sizes = dict.fromkeys(topics, 0)
        brokers = self._client.describe_log_dirs(list(topics))
        for topic in (t for b in brokers for folder in b["log_dirs"] for t in folder["topics"]):
            if topic["name"] in sizes:
                sizes[topic["name"]] += sum(p["partition_size"] for p in topic["partitions"])
        return sizes

    def delete_topics(self, names: Collection[str]) -> None:
        """Delete topics; a missing one is not an error."""
        for name in names:
            with suppress(errors.UnknownTopicOrPartitionError):
                self._client.delete_topics([name])

    def delete_groups(self, names: Collection[str]) -> dict[str, str]:
        """Deletes groups; returns those that were not deleted, each with the broker's reason. A
        missing one is no error.
        """
        answers: dict[str, str] = self._client.delete_groups(list(names)) if names else {}
        return {n: why for n, why in answers.items() if why not in ("OK", "GroupIdNotFoundError")}

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        self._client.delete_records({TopicPartition(topic, p): o for p, o in before.items()})

    def commit(self, group: str, topic: str, positions: Offsets) -> None:
        """Store positions of a group without being its member; refused while it has members."""
        offsets = {
            TopicPartition(topic, p): OffsetAndMetadata(offset, text, -1)
            for p, (offset, text) in positions.items()
        }
        for error in self._client.alter_group_offsets(group, offsets).values():
            if error is not errors.NoError:
                raise error()

    def committed(self, group: str, topic: str, partitions: int) -> Offsets:
        requested = {group: [TopicPartition(topic, p) for p in range(partitions)]}
        offsets = self._client.list_group_offsets(requested)[group]
        return {
            at.partition: (o.offset, o.metadata or "") for at, o in offsets.items() if o.offset >= 0
        }

    def close(self) -> None:
        self._client.close()
        if self._offsets is not None:
            self._offsets.close(autocommit=False, timeout_ms=1_000)


class Producer:
    """A batch that kafka-python repeats is stored once; a record is acknowledged when all in-sync
    replicas have it.
    """

    def __init__(self, settings: Mapping[str, Any], linger_ms: int, batch_bytes: int) -> None:
        make: Any = kafka.KafkaProducer
        self._producer = make(
            **settings,
            acks="all",
            enable_idempotence=True,
            linger_ms=linger_ms,
            batch_size=batch_bytes,
            max_request_size=RECORD_BYTES_LIMIT + BATCH_ROOM_BYTES,
            max_block_ms=20_000,
            delivery_timeout_ms=int(DELIVERY_S * 1000),
            allow_auto_create_topics=False,
            metrics_enabled=False,
        )

    def send(
        self,
        at: tuple[str, int],
        record: tuple[bytes, bytes | None],
        timestamp_ms: int,
        acknowledged: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Hands over one record: `acknowledged` gets the offset or `failed` the error, in
        kafka-python's sending thread before that thread sends anything more to the partition.
        """
        (topic, partition), (key, value) = at, record
        future = self._producer.send(topic, value, key, None, partition, timestamp_ms)
        future.add_callback(lambda metadata: acknowledged(metadata.offset))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType, reportUnknownMemberType]
        future.add_errback(failed)

    def abort(self) -> None:
        """Fails all waiting records. For any thread, also in a callback of `send`."""
        # `close(timeout=0)` would wait for a flush first, from within the thread that flushes.
        self._producer._sender.force_close()
        self._producer._closed = True

    def close(self, wait_s: float) -> None:
        self._producer.close(timeout=wait_s)


PartitionId = tuple[str, int]
"""A topic by its name in the run, and a partition."""


class Consumer:
    """Reads at explicit positions, or as a member of `group` from its committed ones.
    `cluster_name` maps a topic of the run to its name on the cluster. A member that sends no
    heartbeat for `lease_s` loses its partitions.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        cluster_name: Callable[[str], str],
        group: str = "",
        lease_s: float = 10,
        fetch_wait_ms: int = FETCH_WAIT_MS,
    ) -> None:
        self._cluster_name, self._is_member, self._topic = cluster_name, bool(group), ""
        self._topic_by_cluster_name: dict[str, str] = {}
        make: Any = kafka.KafkaConsumer
        self._consumer = make(
            **settings,
            group_id=group or None,
            auto_offset_reset="none",
            enable_auto_commit=False,
            fetch_max_bytes=FETCH_BYTES,
            fetch_max_wait_ms=fetch_wait_ms,
            max_partition_fetch_bytes=PARTITION_BYTES,
            session_timeout_ms=int(lease_s * 1000),
            heartbeat_interval_ms=int(lease_s * 1000 / 10),
            max_poll_interval_ms=int(POLL_EVERY_S * 1000),
            partition_assignment_strategy=[CooperativeStickyAssignor],
            allow_auto_create_topics=False,
            metrics_enabled=False,
        )

    def assign(self, places: Collection[PartitionId]) -> None:
        """Read these partitions from now on; those already assigned keep their positions."""
        self._topic_by_cluster_name |= {self._cluster_name(topic): topic for topic, _ in places}
        self._consumer.assign([TopicPartition(self._cluster_name(t), p) for t, p in places])

    def subscribe(self, topic: str, on_revoked: Callable[[Collection[int]], None]) -> None:
        """Joins the group; `on_revoked` gets, in another thread, the partitions that were taken
        away.
        """
        self._topic = self._cluster_name(topic)
        self._topic_by_cluster_name[self._topic] = topic
        self._consumer.subscribe([self._topic], listener=_RebalanceListener(on_revoked))
        # A group leader that joins before it has the topic's metadata assigns no partitions, and
        # may never repeat the assignment; so the metadata is fetched first.
        self._consumer.end_offsets([TopicPartition(self._topic, 0)])

    def assignment(self) -> list[int]:
        return [at.partition for at in self._consumer.assignment()]

    def seek(self, place: PartitionId, offset: int) -> None:
        self._consumer.seek(TopicPartition(self._cluster_name(place[0]), place[1]), offset)

    def poll(self, wait_s: float, records_max: int) -> list[Message]:
        """Raises `OffsetOutOfRange` or `NoCommittedPosition` if a partition has no valid
        position.
        """
        try:
            rows_by_partition = self._poll(wait_s, records_max)
        except _GONE as error:
            raise OffsetOutOfRange(str(error), self._partitions_of(error)) from error
        except errors.NoOffsetForPartitionError as error:
            raise NoCommittedPosition(str(error)) from error
        return [
            Message(topic, row.partition, row.offset, row.timestamp, row.key or b"", row.value)
            for at, rows in rows_by_partition.items()
            for topic in (self._topic_by_cluster_name[at.topic],)
            for row in rows
        ]

    def _partitions_of(self, error: Exception) -> list[PartitionId]:
        # Both errors carry a mapping by partition.
        partitions: Any = error.args[0] if error.args else ()
        return [
            (self._topic_by_cluster_name[at.topic], at.partition)
            for at in partitions
            if at.topic in self._topic_by_cluster_name
        ]

    def _poll(self, wait_s: float, records_max: int) -> Any:
        rows, deadline = self._consumer.poll(int(wait_s * 1000), records_max), Deadline(SETTLE_S)
        coordinator = self._consumer._coordinator
        # kafka-python drops the result of a rebalance that ends between two polls and may then wait
        # for ever: poll until it ends, and join again.
        while not rows and self._is_member and not coordinator.generation_if_stable():
            task = coordinator._join_task
            if task is not None and task.is_done:
                coordinator.request_rejoin()
            if deadline.passed():
                break
            rows = self._consumer.poll(100, records_max)
        return rows

    def heartbeat(self) -> None:
        """Poll so that the member stays in its group, without moving any position."""
        assigned = self._consumer.assignment()
        self._consumer.pause(*assigned)
        try:
            for at, rows in self._poll(HEARTBEAT_S, 1).items():
                # This partition was assigned just now, so it was not paused.
                self._consumer.seek(at, rows[0].offset)
        except (*_GONE, errors.NoOffsetForPartitionError):
            pass  # the next poll raises it again
        finally:
            self._consumer.resume(*(self._consumer.assignment() & assigned))

    def commit(self, positions: Mapping[int, int], wait_s: float) -> None:
        offsets = {
            TopicPartition(self._topic, p): OffsetAndMetadata(offset, "", -1)
            for p, offset in positions.items()
        }
        self._consumer.commit(offsets, timeout_ms=int(wait_s * 1000))

    def close(self) -> None:
        self._consumer.close(autocommit=False, timeout_ms=5_000)


class _RebalanceListener(kafka.ConsumerRebalanceListener):
    def __init__(self, on_revoked: Callable[[Collection[int]], None]) -> None:
        self._on_revoked = on_revoked

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._on_revoked([at.partition for at in revoked])

    def on_partitions_assigned(self, assigned: Any) -> None:
        """Do nothing: reading begins at the group's committed positions."""
