"""Network namespaces as hosts: this process enters one (`entered_site`), and others are held open
by a process each (`NamespaceHost`). Nothing has a name in the system, so nothing stays once they
end.

A `NamespaceHost` has a network, a name and a `/dev/shm` of its own, and sees the same files as this
process but those that it hides. It needs root, iproute2 and util-linux.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from testbed.waiting import WAIT_S, wait_for

CLONE_NEWNET = 0x40000000
SETTINGS = Path("/proc/sys/net/ipv4")  # of the network of the reading thread
SITE_PORTS, HOST_PORTS = (20_000, 39_999), (40_000, 60_999)
"""Chosen by the system at site A, where servers of tests take free ports, and on hosts: a server's
port is the lower one of a connection.
"""
PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
TUN = Path("/dev/net/tun")
_libc = ctypes.CDLL(None, use_errno=True)


class NoHosts(RuntimeError):
    """No namespaces can be made on this machine; the message says why and what to do."""


def require_hosts() -> None:
    """Raise `NoHosts` unless this process may make the namespaces and has the programs for it."""
    if os.geteuid() != 0:
        raise NoHosts("the tests of hosts make network namespaces, which needs root: run as root")
    lacking = sorted({package for name, package in PROGRAMS.items() if shutil.which(name) is None})
    if lacking:
        raise NoHosts(f"the tests of hosts need `apt-get install {' '.join(lacking)}` (Debian)")
    if not TUN.exists():
        raise NoHosts(f"the tests of hosts carry packets through {TUN}: `modprobe tun`")


def command(*words: str) -> None:
    """Run it; raises `RuntimeError` with its errors if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed ({done.returncode}): {done.stderr.strip()}")


@contextmanager
def entered_site(address: str) -> Generator[None]:
    """Give the calling thread, and the processes and threads that it starts, a network of their own
    with this address, while the block runs.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(CLONE_NEWNET):
            raise NoHosts(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
        set_up_network(SITE_PORTS)
        command("ip", "address", "add", f"{address}/32", "dev", "lo")
        yield
    finally:
        enter_network(before)
        os.close(before)


def set_up_network(free_ports: tuple[int, int]) -> None:
    """Set up the network that this thread has entered: its loopback, and the ports that the system
    chooses. It has this machine's congestion control; another one may not be chosen in it.
    """
    command("ip", "link", "set", "lo", "up")
    (SETTINGS / "ip_local_port_range").write_text("{} {}".format(*free_ports))


def congestion_control() -> str:
    """The congestion control of TCP on this machine."""
    return (SETTINGS / "tcp_congestion_control").read_text().strip()


def enter_network(descriptor: int) -> None:
    """Let the calling thread use the network namespace of this open file."""
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise NoHosts(f"setns: {os.strerror(ctypes.get_errno())}")


@contextmanager
def network_of(pid: int) -> Generator[None]:
    """Let the calling thread use the network of a process while the block runs."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_network(there)
        yield
    finally:
        enter_network(before)
        os.close(there)
        os.close(before)


@dataclass
class NamespaceHost:
    """One host. Its folders `hidden` are empty there."""

    name: str
    address: str
    hidden: Sequence[Path] = ()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def __post_init__(self) -> None:
        steps = ["set -e", f"hostname {self.name}", "mount -t tmpfs tmpfs /dev/shm"]
        steps += [f"mount -t tmpfs tmpfs '{folder}'" for folder in self.hidden]
        steps += ["echo ready", "exec sleep infinity"]
        words = ["unshare", "--net", "--mount", "--uts", *DIES_WITH_US, "sh", "-c"]
        self._holder = subprocess.Popen([*words, "\n".join(steps)], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise NoHosts(f"host {self.name}: its namespaces cannot be made (see stderr)")
        with network_of(self.pid):
            set_up_network(HOST_PORTS)

    @property
    def pid(self) -> int:
        """The process that holds its namespaces."""
        return self._holder.pid

    def start(
        self, line: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host, which dies with this process; `log` gets its output."""
        spaces = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--"]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*spaces, *DIES_WITH_US, *line],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.processes.append(process)
        return process

    def close(self) -> None:
        """Kill all its processes (`kill -9`); its namespaces end with them."""
        for process in (*self.processes, self._holder):
            if process.poll() is None:
                process.kill()
        for process in (*self.processes, self._holder):
            wait_for(lambda process=process: process.poll() is not None)
        if self._holder.stdout is not None:
            self._holder.stdout.close()


DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
