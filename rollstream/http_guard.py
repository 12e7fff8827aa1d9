"""Decides by Host and Origin whether an HTTP request may come from a web page of another user
(`HostRule`). Explorer, agents' endpoint, metrics, report and relay all ask it.

A browser lets any page send requests to any address, and a page can make its own name resolve to
this machine (DNS rebinding): then the request carries that name as its Host, and no Origin if it is
a GET. So a server answers only under names that no stranger can own: addresses, names of this
machine, and names that its user lists. A request with an Origin comes from a page: it is served
only to the server's own pages.
"""

import functools
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

HOSTS_VARIABLE = "ROLLSTREAM_ALLOWED_HOSTS"
"""The environment variable with further names under which programs reach the servers, separated by
commas. `.example.com` stands for all names below it; an entry with `://` is an origin whose pages
may send requests.
"""
PRIVATE_SUFFIXES = (
    ".localhost", ".local", ".internal", ".svc", ".home.arpa", ".lan", ".test",
)  # fmt: skip
"""Ends of names that no registry gives away: of containers, clusters and local networks. Names of
Kubernetes end in `.svc` or `.cluster.local`.
"""
_RESOLVER = Path("/etc/resolv.conf")


@dataclass(frozen=True, slots=True)
class HostRule:
    """States under which Host a server answers, and to which Origin. `hosts` are exact values, with
    their ports; `names` are host names without port, those that begin with a dot for all below.
    With `private_names` addresses, names without a dot and `PRIVATE_SUFFIXES` are served, too. With
    `any_host` the Host is not checked: another secret keeps pages out. `advice` ends the refusal of
    a Host; `{host}` in it stands for that Host.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    private_names: bool = False
    any_host: bool = False
    advice: str = (
        "use the URL that was printed, or an address; "
        f"or list the name in {HOSTS_VARIABLE} where the server starts"
    )

    def refusal(
        self, hosts: Sequence[str], origins: Sequence[str], fetch_site: str = "", mode: str = ""
    ) -> str:
        """Returns why a request with these headers is refused; "" if it may be served. `fetch_site`
        and `mode` are its Sec-Fetch-Site and Sec-Fetch-Mode.
        """
        if len(hosts) > 1 or not (hosts or self.private_names or self.any_host):
            return "a request has one Host"
        host = hosts[0].strip().lower() if hosts else ""
        if hosts and not self.serves(host):
            return f"Host {host[:80]!r} is not served: {self.advice.replace('{host}', host[:80])}"
        if origins and (len(origins) > 1 or not self._is_own(origins[0].strip().lower(), host)):
            return "this Origin is not served"
        if fetch_site in ("cross-site", "same-site") and mode != "navigate":
            return "pages of other sites may not read this server"
        return ""

    def serves(self, host: str) -> bool:
        """Whether requests with this Host, in lower case, are answered."""
        if host in self.hosts or self.any_host:
            return True
        name = host_name(host)
        if name in self.names or any(name.endswith(n) for n in self.names if n.startswith(".")):
            return True
        return self.private_names and is_private_name(name)

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether the origin is that of the server's own pages, under the Host of the request,
        which is served.
        """
        return origin in self.origins or (
            not self.any_host and bool(host) and origin == f"http://{host}"
        )


def program_rule(
    listens: str, named: Iterable[str] = (), environment: Mapping[str, str] = os.environ
) -> HostRule:
    """Returns the rule of a server for programs, which listens at the host `listens` and is reached
    under `named`, too.
    """
    given = environment.get(HOSTS_VARIABLE, "").lower().split(",")
    entries = {entry.strip().rstrip("/") for entry in given}
    names = {name.strip("[]").lower() for name in (listens, *named) if name} | machine_names()
    return HostRule(
        origins=frozenset(entry for entry in entries if "://" in entry),
        names=frozenset(names | {_entry_name(one) for one in entries - {""} if "://" not in one}),
        private_names=True,
    )


def _entry_name(entry: str) -> str:
    """Returns the name of an entry, which may have a port or begin with `*.` as a pattern does."""
    return host_name(entry.removeprefix("*"))


def host_name(host: str) -> str:
    """Returns the name or address in the value of a Host header, without port, brackets and the
    final dot of a full name.
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host.partition(":")[0] if host.count(":") < 2 else host
    return name.removesuffix(".")


def is_private_name(name: str) -> bool:
    """Whether no page of a stranger has this host name: it is an address, has one label, or ends as
    names of containers and local networks do.
    """
    if not name or name.startswith(".") or not name.isascii():
        return False
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return "." not in name or name.endswith(PRIVATE_SUFFIXES)
    return True


@functools.cache
def machine_names() -> frozenset[str]:
    """Returns the names of this machine: its host name, alone and in each domain in which the
    resolver searches. No name server is asked.
    """
    name = socket.gethostname().lower()
    try:
        lines = _RESOLVER.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    words = [line.split() for line in lines]
    domains = {one for line in words if line[:1] in (["search"], ["domain"]) for one in line[1:]}
    return frozenset({name, *(f"{name}.{domain.strip('.').lower()}" for domain in domains)} - {""})
