"""Pages of strangers reach no HTTP server of this program, programs do: one rule for all servers,
tried on the agents' endpoint, the metrics endpoint and a relay.
"""

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.http_guard import HOSTS_VARIABLE, is_private_name, machine_names, program_rule
from rollstream.producers.agents.directory import RolloutDirectory
from rollstream.producers.agents.front import EndpointFront
from rollstream.producers.agents.keys import SessionKeys
from rollstream.producers.agents.serving import EndpointThread
from rollstream.run.config.sources import ENVIRONMENT_PREFIX, RESERVED_VARIABLES
from rollstream.run.metrics.endpoint import TEXT, serve_pages
from rollstream.storage.relay.cache import RelayCache
from rollstream.storage.relay.client import BandwidthLimiter
from rollstream.storage.relay.server import RelayServer
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus

SERVED_HOSTS = [
    "127.0.0.1:{port}", "localhost:{port}", "127.0.0.1", "[::1]:{port}", "10.1.2.3:9000",
    "rollout-1:8700", "endpoint", "rollouts.training.svc.cluster.local:80",
    "host.docker.internal:8700", "LOCALHOST.:{port}", socket.gethostname(),
]  # fmt: skip
REFUSED_HOSTS = [
    "evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "evil.example.",
    "localhost.evil.example", "a.b.c.example:80", "127.0.0.1@evil.example", "evil.svc.example", ".",
    "é.com",
]  # fmt: skip


@pytest.fixture(params=["agents", "metrics", "relay"])
def server(request, tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A port, and a path that is answered there."""
    if request.param == "agents":
        endpoint = agents_endpoint()
        yield endpoint.port, "/health"
        endpoint.close()
    elif request.param == "metrics":
        pages = serve_pages("127.0.0.1", 0, {"/metrics": lambda accept: (200, TEXT, b"m\n")})
        yield pages.port, "/metrics"
        pages.end()
    else:
        cache = RelayCache(tmp_path / "relay", versions_max=2, bytes_max=1 << 20)
        relay = RelayServer(("127.0.0.1", 0), cache, BandwidthLimiter(), 8, lambda: {"r": 1})
        yield relay.port, "/status"
        relay.end()
        cache.close()


def agents_endpoint() -> EndpointThread:
    bus = MemoryBus()
    bus.create(catalogue())
    front = EndpointFront(RolloutDirectory(bus), SessionKeys(b"0" * 16), 1 << 20)
    endpoint = EndpointThread(front.app(), "127.0.0.1:0")
    endpoint.start()
    return endpoint


def status(port: int, method: str, path: str, host: str, *lines: str) -> int:
    """Returns the status of a request with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", host.format(port=port).encode())
        for line in lines:
            name, _, value = line.partition(": ")
            connection.putheader(name, value.format(port=port))
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def test_names_that_a_stranger_may_own_are_refused_and_others_served(server):
    port, path = server
    served = {host: status(port, "GET", path, host) for host in SERVED_HOSTS}
    assert served == dict.fromkeys(SERVED_HOSTS, 200)
    refused = {host: status(port, "GET", path, host) for host in REFUSED_HOSTS}
    assert set(refused.values()) <= {400, 403}, refused


@pytest.mark.parametrize(
    "line",
    ["Origin: http://evil.example", "Origin: null", "Origin: http://127.0.0.1:1",
     "Origin: https://localhost:{port}", "Sec-Fetch-Site: cross-site"],
)  # fmt: skip
def test_pages_of_others_are_refused_whatever_the_host(server, line):
    port, path = server
    assert status(port, "GET", path, "127.0.0.1:{port}", line) == 403
    assert status(port, "GET", path, "evil.example:{port}", line) == 403


def test_no_page_opens_a_session_or_sets_a_reward():
    endpoint = agents_endpoint()
    own = "127.0.0.1:{port}"
    try:
        for method, path in (
            ("POST", "/sessions"), ("POST", "/sessions/0.0/reward"), ("DELETE", "/sessions/0.0"),
            ("POST", "/v1/chat/completions"),
        ):  # fmt: skip
            evil = "Origin: http://evil.example"
            assert status(endpoint.port, method, path, own, evil) == 403
            rebound = "Origin: http://evil.example:{port}"
            assert status(endpoint.port, method, path, "evil.example:{port}", rebound) == 403
            assert status(endpoint.port, method, path, own) != 403
    finally:
        endpoint.close()


def test_two_hosts_or_origins_are_refused():
    rule = program_rule("127.0.0.1")
    assert rule.refusal(["127.0.0.1", "127.0.0.1"], [])
    assert rule.refusal(["127.0.0.1"], ["http://127.0.0.1", "http://127.0.0.1"])


def test_the_user_lists_further_names_and_origins():
    listed = "agents.corp.example, .nodes.corp.example, https://page.example"
    rule = program_rule("0.0.0.0", ["gpu7.lab.example"], {HOSTS_VARIABLE: listed})
    for host in ("agents.corp.example:8700", "n1.nodes.corp.example", "gpu7.lab.example:1"):
        assert rule.refusal([host], []) == ""
    for host in ("corp.example", "evilnodes.corp.example", "page.example", ""):
        assert HOSTS_VARIABLE in rule.refusal([host], [])
    assert rule.refusal(["127.0.0.1:1"], ["https://page.example"]) == ""
    assert rule.refusal(["127.0.0.1:1"], ["https://other.example"])


def test_the_variable_of_names_is_no_setting_of_a_run():
    assert HOSTS_VARIABLE.removeprefix(ENVIRONMENT_PREFIX) in RESERVED_VARIABLES


def test_a_program_without_a_host_is_served():
    assert program_rule("127.0.0.1").refusal([], []) == ""


def test_names_of_this_machine_are_served():
    assert socket.gethostname().lower() in machine_names()
    assert not is_private_name("")
