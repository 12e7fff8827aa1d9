"""Kafka's URL, its secrets, and the decisions made without a broker."""

import logging
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from kafka.errors import KafkaConnectionError, KafkaTimeoutError

from rollstream.errors import BusError, ConfigurationError
from rollstream.streams.connect import open_bus
from rollstream.streams.kafka.address import Secrets, client_settings, parse_kafka_url, read_secrets
from rollstream.streams.kafka.client import base_settings
from rollstream.streams.kafka.log_filter import RateLimitedHandler
from rollstream.streams.kafka.producer import ByteSemaphore, bounded_batches, record_cost_bytes
from rollstream.streams.kafka.topic_settings import configs_of, topic_of
from rollstream.streams.topics import Topic, announcement_topic, catalogue
from testbed.waiting import WAIT_S


def test_a_url_names_brokers_a_prefix_and_options() -> None:
    address = parse_kafka_url(
        "kafka://a:9092,b:9093/lab.run-7?security=sasl_ssl&mechanism=scram-sha-512"
    )
    assert address.servers == ("a:9092", "b:9093")
    assert address.topic("ledger") == "lab.run-7.ledger"
    assert parse_kafka_url("kafka://a:9092").topic("ledger") == "ledger"
    assert str(address) == "kafka://a:9092,b:9093/lab.run-7"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("kafka://", "HOST:PORT"),
        ("kafka://host", "host:port"),
        ("kafka://host:port", "host:port"),
        ("kafka://host:0", "host:port"),
        ("kafka://host:99999", "host:port"),
        ("kafka://h:1/a b", "cannot prefix topic names"),
        ("kafka://h:1/a/b", "cannot prefix topic names"),
        ("kafka://h:1?security=tls", "security must be one of plaintext, ssl"),
        ("kafka://h:1?linger_ms=soon", "linger_ms must be a number ≥ 0, got 'soon'"),
        ("kafka://h:1?batch_bytes=99999999", "batch_bytes must be ≤"),
        ("kafka://h:1?in_flight_bytes=5", "in_flight_bytes must be a number ≥ 16384"),
        ("kafka://h:1?cert=x&security=ssl", "give both cert and key"),
        ("kafka://h:1?ca=x", "need security=ssl"),
        ("kafka://h:1?replicas=3", "unknown option 'replicas'; known are security"),
        ("kafka://h:1?servers=h:2", "unknown option 'servers'"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        open_bus(url)


@pytest.mark.parametrize(
    "url", ["kafka://me:hunter2@h:1/p", "kafka://h:1?password=hunter2", "kafka://h:1?token=hunter2"]
)
def test_a_secret_in_a_url_is_not_repeated(url: str) -> None:
    if "token" in url:  # `token` names a function; a token itself has no colon
        url += "&security=sasl_ssl&mechanism=oauthbearer"
    with pytest.raises(ConfigurationError) as caught:
        open_bus(url)
    assert "hunter2" not in str(caught.value)


def test_secrets_come_from_the_environment_and_missing_ones_are_named() -> None:
    address = parse_kafka_url("kafka://h:1?security=sasl_ssl&mechanism=scram-sha-256")
    with pytest.raises(ConfigurationError, match="KAFKA_USER and KAFKA_PASSWORD"):
        read_secrets(address, {})
    secrets = read_secrets(address, {"KAFKA_USER": "me", "KAFKA_PASSWORD": "hunter2"})
    assert client_settings(address, secrets)["sasl_plain_password"] == "hunter2"
    assert "hunter2" not in repr(secrets)
    oauth = parse_kafka_url("kafka://h:1?security=sasl_ssl&mechanism=oauthbearer")
    with pytest.raises(ConfigurationError, match="KAFKA_TOKEN_FILE"):
        read_secrets(oauth, {})
    assert read_secrets(oauth, {"KAFKA_TOKEN_FILE": "/t"}).token_file == "/t"


def test_a_password_may_be_in_a_file(tmp_path: Path) -> None:
    """So it is in no list of processes and in no description of a container."""
    address = parse_kafka_url("kafka://h:1?security=sasl_ssl&mechanism=scram-sha-256")
    (tmp_path / "password").write_text("hunter2\n")
    given = {"KAFKA_USER": "me", "KAFKA_PASSWORD_FILE": str(tmp_path / "password")}
    assert read_secrets(address, given).password == "hunter2"
    assert read_secrets(address, {**given, "KAFKA_PASSWORD": "other"}).password == "other"
    with pytest.raises(ConfigurationError, match="KAFKA_PASSWORD_FILE cannot be read"):
        read_secrets(address, {**given, "KAFKA_PASSWORD_FILE": str(tmp_path / "none")})


def test_plaintext_needs_no_secret() -> None:
    assert read_secrets(parse_kafka_url("kafka://h:1"), {}) == Secrets()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("security=ssl&ca=/nowhere/ca.pem", "ca=/nowhere/ca.pem"),
        ("security=sasl_ssl&mechanism=oauthbearer&token=no_such_module:f", "no_such_module"),
    ],
)
def test_a_file_or_function_that_is_not_there_is_named_before_any_broker_is_asked(
    options: str, says: str
) -> None:
    address = parse_kafka_url(f"kafka://127.0.0.1:9/x?{options}")
    with pytest.raises(ConfigurationError, match=says):
        base_settings(address, Secrets())


def test_every_topic_of_a_run_survives_the_brokers_settings() -> None:
    for topic in (*catalogue(), announcement_topic("draft")):
        assert topic_of(topic.name, topic.partitions, configs_of(topic)) == topic


def test_safe_topics_are_never_truncated_by_time_or_size() -> None:
    configs = configs_of(Topic("ledger"))
    assert (configs["retention.ms"], configs["retention.bytes"]) == ("-1", "-1")
    assert configs["cleanup.policy"] == "delete"


@pytest.mark.parametrize(
    "topic",
    [
        Topic("t", retention_s=60.0),
        Topic("t", cleanup="time"),
        Topic("t", record_bytes_max=1 << 30),
    ],
)
def test_what_kafka_cannot_keep_is_refused(topic: Topic) -> None:
    with pytest.raises(BusError, match="on Kafka"):
        configs_of(topic)


@given(st.lists(st.integers(0, 5000), max_size=30), st.integers(4_000, 20_000))
def test_waves_cover_all_records_in_order_within_the_bound(sizes: list[int], limit: int) -> None:
    records = [(0, b"", bytes(size), 0) for size in sizes]
    covered = 0
    for start, stop, total in bounded_batches(records, limit):
        assert (start, total) == (covered, sum(map(record_cost_bytes, records[start:stop])))
        assert stop > start
        assert total <= limit or stop - start == 1
        covered = stop
    assert covered == len(records)


def test_the_byte_bound_makes_takers_wait_until_bytes_come_back() -> None:
    bound = ByteSemaphore(10)
    assert bound.take(6, 0)
    assert not bound.take(5, 0.01)
    threading.Timer(0.05, lambda: bound.give_back(6)).start()
    assert bound.take(10, WAIT_S)
    assert bound.taken == 10


def test_the_same_complaint_of_the_client_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    handler = RateLimitedHandler()
    for name in ("kafka.net", "kafka.net", "kafka.net", "kafka.producer"):
        record = logging.LogRecord(name, logging.ERROR, "", 0, "gone: %s", ("x",), None)
        handler.handle(record)
    assert [r.name for r in caplog.records] == ["kafka.net", "kafka.producer"]


def test_attempts_of_the_client_to_connect_again_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = RateLimitedHandler()
    for level, reason in (
        (logging.WARNING, ValueError("Bootstrap not ready")),
        (logging.ERROR, KafkaConnectionError("refused")),
        (logging.ERROR, KafkaTimeoutError("unable to bootstrap")),
        (logging.ERROR, ConnectionResetError("reset by peer")),
        (logging.ERROR, ValueError("authentication failed")),
    ):
        handler.handle(logging.LogRecord("kafka.net", level, "", 0, "%s", (reason,), None))
    assert [r.getMessage() for r in caplog.records] == ["authentication failed"]


def test_a_lost_connection_of_the_client_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    handler = RateLimitedHandler()
    lost = ConnectionResetError("reset by peer")
    text = "%s: Error receiving network data closing socket"
    raised = (ConnectionResetError, lost, None)
    handler.handle(logging.LogRecord("kafka.net", logging.ERROR, "", 0, text, ("tcp",), raised))
    text = "%s: socket disconnected"
    handler.handle(logging.LogRecord("kafka.net", logging.ERROR, "", 0, text, ("tcp",), None))
    assert not caplog.records


def test_without_the_client_the_extra_is_named() -> None:
    script = """
import sys
sys.modules["kafka"] = None
from rollstream.streams.connect import open_bus
try:
    open_bus("kafka://h:1")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install 'rollstream[cloud]'" in done.stdout, done.stderr


def test_an_embedded_run_does_not_load_the_client() -> None:
    script = """
import sys, tempfile
from rollstream.streams.connect import open_bus
open_bus(f"sqlite:{tempfile.mkdtemp()}")
print("kafka" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_connections_notice_a_cut_network_within_seconds():
    """The system's own pauses double; a test on a cut network is in tests/hosts."""
    address = parse_kafka_url("kafka://one:9092")
    with socket.socket() as probe:
        for option in client_settings(address, Secrets())["socket_options"]:
            probe.setsockopt(*option)
        assert probe.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
