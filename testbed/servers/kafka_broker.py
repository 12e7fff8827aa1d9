"""A real Apache Kafka for tests and measurements: one KRaft process per broker on free ports of
127.0.0.1, its logs in a temporary folder, stopped by its own process id.

Maven fetches the jars once (`pom.xml` beside this file) into `.servers/` of the repository. Where
Java or Maven is missing the error names the package to install. Compaction is eager, so that tests
see it.
"""

import atexit
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from testbed.servers import CACHE, free_ports, installing, use
from testbed.waiting import WAIT_S

VERSION = "4.3.0"
EXISTING = "BUS_TEST_KAFKA"
HERE = Path(__file__).parent
POM = HERE / "pom.xml"
JARS = CACHE / f"kafka-{VERSION}-{crc32(POM.read_bytes()):08x}"
CLUSTER = "cm9sbHN0cmVhbS10ZXN0cw"  # any 16 bytes in base64
SHORT_LIVED = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""JVM options of a test's broker: it ends before optimising would pay."""
LOG4J = """
status=warn
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d %p %c %m%n
rootLogger.level=info
rootLogger.appenderRef.out.ref=out
"""
SETTINGS = """
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners={listeners}
advertised.listeners={advertised}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}/data
log.index.size.max.bytes=65536
offsets.topic.replication.factor={copies}
offsets.topic.num.partitions=1
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor={copies}
share.coordinator.state.topic.min.isr=1
default.replication.factor={copies}
min.insync.replicas={insync}
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
message.max.bytes=8388608
auto.create.topics.enable=false
log.cleaner.backoff.ms=200
log.initial.task.delay.ms=500
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
"""


def jars() -> Path:
    """The folder of Kafka's jars, fetched by Maven the first time (50 MB)."""
    with installing():
        if not JARS.exists():
            _fetch_jars()
    return JARS


def _fetch_jars() -> None:
    for program, package in (("java", "openjdk-17-jre-headless"), ("mvn", "maven")):
        if shutil.which(program) is None:
            raise RuntimeError(
                f"the tests start a real Kafka and {program!r} is missing: install it (Debian: apt "
                f"install {package}), or name a running broker in {EXISTING}=host:port"
            )
    with tempfile.TemporaryDirectory(dir=CACHE) as partial:
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={partial}/jars"]
        command = ["mvn", "-q", "-B", "-f", str(POM), *goal, "-DincludeScope=runtime"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"Maven could not fetch Kafka's jars:\n{done.stdout}{done.stderr}")
        Path(partial, "jars").rename(JARS)


class KafkaBroker:
    """One broker; `start` and `kill` may alternate, and its data stay until `close`. `more` are
    further lines of server.properties; `host` is the address of this machine on which it listens.
    """

    def __init__(
        self,
        node: int = 1,
        voters: Sequence[int] = (),
        more: str = "",
        secure: bool = False,
        format_more: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        ports = [*free_ports(2, host), *([*voters] or free_ports(1))]
        self.host, (self.port, self.secure_port) = host, ports[:2]
        controllers = ports[2:]
        self.server = f"{host}:{self.port}"
        self._folder = Path(tempfile.mkdtemp(prefix="rollstream-kafka-"))
        self._process: subprocess.Popen[bytes] | None = None
        listeners = [f"PLAINTEXT://{self.server}"]
        listeners += [f"SECURE://{host}:{self.secure_port}"] if secure else []
        control = f"CONTROLLER://127.0.0.1:{controllers[node - 1]}"
        copies = len(controllers)
        text = SETTINGS.format(
            node=node,
            voters=",".join(f"{n}@127.0.0.1:{port}" for n, port in enumerate(controllers, 1)),
            listeners=",".join([*listeners, control]),
            advertised=",".join(listeners),
            folder=self._folder,
            copies=copies,
            insync=min(2, copies),
        )
        self._settings = self._folder / "server.properties"
        self._settings.write_text(text + more)
        (self._folder / "log4j2.properties").write_text(LOG4J)
        self._java(
            "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", self._settings, *format_more
        )

    def start(self) -> None:
        """Starts the process; `wait_ready` returns when it serves."""
        self._output = (self._folder / "broker.log").open("ab")
        self._process = subprocess.Popen(
            [
                *("java", "-Xmx512m", *SHORT_LIVED),
                f"-Dlog4j2.configurationFile={self._folder}/log4j2.properties",
                *("-cp", f"{jars()}/*", "kafka.Kafka", str(self._settings)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def wait_ready(self) -> None:
        """Waits until the broker accepts connections; an error shows the end of its log."""
        assert self._process is not None
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((self.host, self.port)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"Kafka did not start:\n{self.log()[-4000:]}")

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Stops the process and removes its data."""
        if self._process is not None:
            self._end(signal.SIGKILL)
        shutil.rmtree(self._folder)

    def log(self) -> str:
        return (self._folder / "broker.log").read_text(errors="replace")

    def _end(self, number: int) -> None:
        if self._process is not None:
            self.signal(number)
            self._process.wait(60)
            self._process = None
            self._output.close()

    def _java(self, main: str, *arguments: object) -> None:
        command = ["java", *SHORT_LIVED, "-cp", f"{jars()}/*", main, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{main} failed:\n{done.stdout}{done.stderr}")


def start_three() -> list[KafkaBroker]:
    """Three brokers of one cluster, ready: replication 3, `min.insync.replicas` 2."""
    voters = free_ports(3)
    brokers = [KafkaBroker(node, voters) for node in (1, 2, 3)]
    for broker in brokers:
        broker.start()
    for broker in brokers:
        broker.wait_ready()
    return brokers


@functools.cache
def server() -> str:
    """`host:port` of the one broker of this process, started at the first call and stopped with the
    process; or of the one that BUS_TEST_KAFKA names.
    """
    existing = os.environ.get(EXISTING)
    if existing is not None:
        use(EXISTING, existing)
        return existing
    # No machine is so busy that its one broker, which nobody kills, counts as lost.
    broker = KafkaBroker(more="broker.session.timeout.ms=600000\n")
    atexit.register(broker.close)
    broker.start()
    broker.wait_ready()
    use("Apache Kafka", f"{VERSION} at {broker.server}")
    return broker.server


def new_url(options: str = "") -> str:
    """URL of a bus without topics on that broker."""
    return f"kafka://{server()}/{uuid.uuid4().hex[:12]}" + (f"?{options}" if options else "")
