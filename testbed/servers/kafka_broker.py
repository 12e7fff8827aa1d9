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
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from testbed.servers import CACHE, free_ports, installing, use
from testbed.servers.guard import keep
from testbed.waiting import wait_for

VERSION = "4.3.0"
EXISTING = "BUS_TEST_KAFKA"
HERE = Path(__file__).parent
POM = HERE / "pom.xml"
JARS = CACHE / f"kafka-{VERSION}-{crc32(POM.read_bytes()):08x}"
CLUSTER = "cm9sbHN0cmVhbS10ZXN0cw"  # any 16 bytes in base64
CLASSES = JARS / "classes.jsa"
"""The loaded classes of a broker, which halve what a start costs: 1.9 s of CPU in place of 3.8."""
_BARE = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_QUIET = ("-Xlog:disable", "-Xlog:all=error:stderr")  # stdout has what a client read
SHORT_LIVED = (*_BARE, f"-XX:SharedArchiveFile={CLASSES}", *_QUIET)
"""JVM options of a test's broker: it ends before optimising would pay. A JVM that cannot use the
archive, for instance in a copied folder, ignores it.
"""
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


PATIENT = """
broker.session.timeout.ms=600000
broker.heartbeat.interval.ms=20000
metadata.max.idle.interval.ms=60000
"""


def jars() -> Path:
    """The folder of Kafka's jars, fetched by Maven the first time (50 MB), and of their archive."""
    if not CLASSES.exists():
        with installing():
            if not JARS.exists():
                _fetch_jars()
            if not CLASSES.exists():
                CLASSES.touch()  # and it stays empty where the JVM writes none
                _archive_classes()
    return JARS


def _archive_classes() -> None:
    """Runs a broker until it serves; it writes the archive when it ends."""
    with tempfile.TemporaryDirectory(dir=CACHE) as partial:
        archive, broker = Path(partial, "classes.jsa"), KafkaBroker()
        broker.start((*_BARE, f"-XX:ArchiveClassesAtExit={archive}"))
        with suppress(AssertionError):  # this JVM cannot do it
            broker.wait_ready()
            broker.stop()
        broker.close()
        if archive.exists():
            archive.rename(CLASSES)


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
    further lines of server.properties; `host` is the address of this machine on which it listens,
    `advertised` the address that it gives to clients in place of this one.
    """

    def __init__(
        self,
        node: int = 1,
        voters: Sequence[int] = (),
        more: str = "",
        secure: bool = False,
        format_more: Sequence[str] = (),
        host: str = "127.0.0.1",
        advertised: str = "",
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
            advertised=f"PLAINTEXT://{advertised}" if advertised else ",".join(listeners),
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

    def start(self, options: Sequence[str] = SHORT_LIVED) -> None:
        """Starts the process with these options of the JVM; `wait_ready` returns when it serves."""
        self._output = (self._folder / "broker.log").open("ab")
        self._process = subprocess.Popen(
            [
                *("java", "-Xmx512m", *options),
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
        wait_for(self._accepts, self._process, lambda: self.log()[-4000:])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ends it in order."""
        self._end(signal.SIGTERM)

    def close(self) -> None:
        """Stops the process and removes its data."""
        self.kill()
        shutil.rmtree(self._folder)

    def log(self) -> str:
        return (self._folder / "broker.log").read_text(errors="replace")

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.host, self.port)) == 0

    def _end(self, number: int) -> None:
        if self._process is not None:
            if self.is_running():
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
    broker = KafkaBroker(more=PATIENT)
    atexit.register(broker.close)
    broker.start()
    broker.wait_ready()
    keep(broker.pid)
    use("Apache Kafka", f"{VERSION} at {broker.server}")
    return broker.server


def new_url(options: str = "") -> str:
    """URL of a bus without topics on that broker."""
    return f"kafka://{server()}/{uuid.uuid4().hex[:12]}" + (f"?{options}" if options else "")
