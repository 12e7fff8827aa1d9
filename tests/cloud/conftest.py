"""Shared by the cloud tests: a broker that a test may kill, a proxy before the store."""

import signal
from collections.abc import Iterator

import pytest

from testbed.servers import use, versity
from testbed.servers.fault_proxy import FaultProxy
from testbed.servers.kafka_broker import VERSION, KafkaBroker


@pytest.fixture(scope="module")
def own_broker() -> Iterator[KafkaBroker]:
    broker = KafkaBroker()
    broker.start()
    try:
        broker.wait_ready()
        use("Apache Kafka, killed and paused", f"{VERSION} at {broker.server}")
        yield broker
    finally:
        broker.close()


@pytest.fixture
def broker(own_broker: KafkaBroker) -> Iterator[KafkaBroker]:
    """A broker that a test may kill and pause; it must run again at the end of the test."""
    yield own_broker
    own_broker.signal(signal.SIGCONT)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """A proxy in front of the real S3 server."""
    with FaultProxy(versity.server().endpoint) as started:
        yield started
