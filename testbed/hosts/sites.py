"""Two sites (`two_sites`): the network of this process, with a broker and a bucket, is site A; the
hosts of site B share a router, which the link leads to.

    site A, 10.77.1.1 ──(200 Mbit/s, 20 ms each way, .01 % lost)── router ── b1 10.77.2.11, b2, b3
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.hosts.link import DEVICES, Link
from testbed.hosts.namespaces import (
    SETTINGS,
    NamespaceHost,
    command,
    congestion_control,
    entered_site,
    network_of,
    require_hosts,
)
from testbed.servers import use
from testbed.servers.kafka_broker import VERSION, KafkaBroker, jars
from testbed.servers.versity import BUCKET, VersityGW, program

SITE_A, NETWORK_B, GATEWAY_B = "10.77.1.1", "10.77.2.0/24", "10.77.2.1"
HOSTS = 3
QUEUE_PACKETS = 4000  # of a device on its way to the link's process, which may be late


@dataclass
class TwoSites:
    """What stands while `two_sites` runs. The bucket's keys are in this process's environment."""

    broker: KafkaBroker
    bucket: VersityGW
    link: Link
    router: NamespaceHost
    hosts: list[NamespaceHost]

    def bus_url(self, run: str) -> str:
        return f"kafka://{self.broker.server}/{run}"

    def store_url(self, run: str) -> str:
        options = f"endpoint={self.bucket.endpoint}&path_style=true&region=us-east-1"
        return f"s3://{BUCKET}/{run}?{options}"

    def vanish(self, host: NamespaceHost) -> None:
        """Take the host off its network; its processes are not told, and continue."""
        with network_of(self.router.pid):
            command("ip", "link", "set", host.name, "down")


@contextmanager
def two_sites(hidden: Sequence[Path] = ()) -> Generator[TwoSites]:
    """Both sites while the block runs; the calling thread is at site A. The folders `hidden` are
    empty on the hosts of site B. Raises `NoHosts` if this machine cannot have them.
    """
    require_hosts()
    jars()  # over this machine's network, as the other server
    program()
    for folder in hidden:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(entered_site(SITE_A))
        router = stack.enter_context(_host("site-b", GATEWAY_B))
        link = Link(router.pid)
        stack.callback(link.close)
        _join_sites(router)
        hosts: list[NamespaceHost] = []
        for number in range(1, HOSTS + 1):
            host = stack.enter_context(_host(f"b{number}", f"10.77.2.{10 + number}", hidden))
            _attach(router, host)
            hosts.append(host)
        broker = KafkaBroker(host=SITE_A)
        stack.callback(broker.close)
        broker.start()
        bucket = VersityGW(host=SITE_A)
        stack.callback(bucket.close)
        bucket.start()
        broker.wait_ready()
        bucket.set_credentials()
        bucket.make_bucket(BUCKET)
        servers = f"Kafka {VERSION} at {broker.server}, VersityGW at {bucket.endpoint}"
        use("two sites", f"{servers}, TCP with {congestion_control()}")
        yield TwoSites(broker, bucket, link, router, hosts)


@contextmanager
def _host(name: str, address: str, hidden: Sequence[Path] = ()) -> Generator[NamespaceHost]:
    host = NamespaceHost(name, address, hidden)
    try:
        yield host
    finally:
        host.close()


def _join_sites(router: NamespaceHost) -> None:
    """Give the link's ends their routes, and let site B's router forward to a bridge of hosts."""
    to_b, to_a = DEVICES[1], DEVICES[0]
    queue = ("txqueuelen", str(QUEUE_PACKETS))
    command("ip", "link", "set", to_b, "up", *queue)
    command("ip", "route", "add", NETWORK_B, "dev", to_b, "src", SITE_A)
    with network_of(router.pid):
        command("ip", "link", "set", to_a, "up", *queue)
        command("ip", "route", "add", f"{SITE_A}/32", "dev", to_a)
        command("ip", "link", "add", "bridge", "type", "bridge")
        command("ip", "address", "add", f"{GATEWAY_B}/24", "dev", "bridge")
        command("ip", "link", "set", "bridge", "up")
        (SETTINGS / "ip_forward").write_text("1")


def _attach(router: NamespaceHost, host: NamespaceHost) -> None:
    """Connect the host with the router's bridge."""
    with network_of(router.pid):
        inside = ("eth0", "netns", str(host.pid))
        command("ip", "link", "add", host.name, "type", "veth", "peer", "name", *inside)
        command("ip", "link", "set", host.name, "master", "bridge", "up")
    with network_of(host.pid):
        command("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        command("ip", "link", "set", "eth0", "up")
        command("ip", "route", "add", "default", "via", GATEWAY_B)
