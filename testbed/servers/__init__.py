"""Real servers for tests and measurements, and a list of those that this session used.

Import it as `testbed.servers` everywhere: a second name would be a second list.
"""

import fcntl
import os
import random
import socket
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from testbed.repository import ROOT

CACHE = ROOT / ".servers"
PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to any client, and to a server that takes any port."""
_HELD = ExitStack()
_USED: dict[str, str] = {}


@contextmanager
def installing() -> Generator[None]:
    """Holds a lock under which one process at a time fetches or builds servers; those that waited
    find them.
    """
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns free consecutive ports, which other processes of tests on this machine, of whatever
    clone, cannot get until this one ends: a server may bind one seconds later, and again after a
    kill.
    """
    folder = Path(f"/tmp/rollstream-ports-{os.getuid()}")  # not TMPDIR: each session has its own
    folder.mkdir(exist_ok=True)
    drawn = random.SystemRandom()
    for _ in range(1000):
        base = drawn.randrange(PORTS.start, PORTS.stop - count)
        ports = [*range(base, base + count)]
        with ExitStack() as held:
            try:
                for port in ports:
                    lock = held.enter_context((folder / str(port)).open("w"))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    with socket.socket() as probe:
                        probe.bind((host, port))
            except OSError:  # held, or bound
                continue
            _HELD.push(held.pop_all())
            return ports
    raise RuntimeError(f"no {count} free ports from {PORTS.start} to {PORTS.stop}")


def install_packages(packages: Sequence[str]) -> None:
    """Installs Debian's packages, as root and while `installing` is held. Raises `RuntimeError`
    with what apt printed if that fails.
    """
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    for command in (["apt-get", "update"], install):
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = " ".join(packages)
        raise RuntimeError(f"`apt-get install {words}` failed:\n{done.stderr[-4000:]}")


def use(name: str, what: str) -> None:
    """Notes that the server `name` is used; `what` is its version and address."""
    _USED[name] = what


def used_elsewhere(there: Mapping[str, str]) -> None:
    """Notes the servers of another process of this session."""
    for name, what in there.items():
        known = _USED.get(name)
        _USED[name] = what if known in (None, what) else f"{known}, {what}"


def used() -> dict[str, str]:
    """The servers used so far, by name: printed at the end of a test session."""
    return dict(_USED)
