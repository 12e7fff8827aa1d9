"""Decides by Host and Origin whether a request may come from a web page of another user.

Any page can send requests to any address, and resolve its own name to this machine (DNS rebinding):
the Host is then that name, without an Origin for a GET. So a server answers only under names that
no stranger can own, and an Origin only of its own pages.
"""

import functools
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

# Further names under which programs reach the servers, separated by commas. `.example.com` stands
# for all names below it; an entry with `://` is an origin whose pages may send requests.
HOSTS_VARIABLE = "ROLLSTREAM_ALLOWED_HOSTS"
# Ends of names that no registry assigns: of containers, clusters (`.svc`, `.cluster.local`) and
# local networks.
PRIVATE_SUFFIXES = (
    ".localhost", ".local", ".internal", ".svc", ".home.arpa", ".lan", ".test",
)  # fmt: skip
_RESOLVER = Path("/etc/resolv.conf")


@dataclass(frozen=True, slots=True)
class HostRule:
    """`hosts` are exact values with their ports; `names` are host names without port, or with a
    first dot for all below. `private_names` adds addresses, names without a dot and
    `PRIVATE_SUFFIXES`; with `any_host` another secret keeps pages out. `advice` ends the refusal of
    `{host}`.
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
        """ "" if the request may be served. `fetch_site` and `mode` are its Sec-Fetch-Site and
        Sec-Fetch-Mode.
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
        """The Host is in lower case."""
        if host in self.hosts or self.any_host:
            return True
        name = host_name(host)
        if name in self.names or any(name.endswith(n) for n in self.names if n.startswith(".")):
            return True
        return self.private_names and is_private_name(name)

    def _is_own(self, origin: str, host: str) -> bool:
        return origin in self.origins or (
            not self.any_host and bool(host) and origin == f"http://{host}"
        )


def program_rule(
    listens: str, extra_names: Iterable[str] = (), environment: Mapping[str, str] = os.environ
) -> HostRule:
    """Returns the rule for a server that listens at the host `listens` and is reached under
    `extra_names`, too.
    """
    listed = environment.get(HOSTS_VARIABLE, "").lower().split(",")
    entries = {entry.strip().rstrip("/") for entry in listed}
    names = {name.strip("[]").lower() for name in (listens, *extra_names) if name} | machine_names()
    return HostRule(
        origins=frozenset(entry for entry in entries if "://" in entry),
        names=frozenset(
            names | {_entry_name(entry) for entry in entries - {""} if "://" not in entry}
        ),
        private_names=True,
    )


def _entry_name(entry: str) -> str:
    # An entry may have a port, or begin with `*.` as a pattern.
    return host_name(entry.removeprefix("*"))


def host_name(host: str) -> str:
    """Returns the host name without port, brackets and the final dot of a full name."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host.partition(":")[0] if host.count(":") < 2 else host
    return name.removesuffix(".")


def is_private_name(name: str) -> bool:
    """Whether no page of a stranger has it: an address, one label, or one of `PRIVATE_SUFFIXES`."""
    if not name or name.startswith(".") or not name.isascii():
        return False
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return "." not in name or name.endswith(PRIVATE_SUFFIXES)
    return True


@functools.cache
def machine_names() -> frozenset[str]:
    """This machine's name, alone and in each domain in which the resolver searches. No name server
    is asked.
    """
    name = socket.gethostname().lower()
    try:
        lines = _RESOLVER.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    words = [line.split() for line in lines]
    domains = {
        domain for line in words if line[:1] in (["search"], ["domain"]) for domain in line[1:]
    }
    return frozenset({name, *(f"{name}.{domain.strip('.').lower()}" for domain in domains)} - {""})
