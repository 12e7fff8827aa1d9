"""A Docker daemon of its own, in namespaces of its own (`StackDaemon`).

Its processes, mounts, bridges and firewall rules are in namespaces that end with it, so nothing of
it stays on this machine but the folder with its layers. Ports that a container publishes are
reached from inside (`StackDaemon.inside`). It needs root and Debian's package `docker.io`, which is
installed once where apt is.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testbed.servers import install_packages, installing, use
from testbed.servers.docker_daemon import wait_until_ready
from testbed.waiting import WAIT_S

FOLDER = Path(tempfile.gettempdir()) / "rollstream-stack"
"""Holds the layers of the images (about 12 GB) from one use to the next."""
STOP_S = 60.0


class NoDaemon(RuntimeError):
    """No Docker daemon can be started on this machine; the message says why and what to do."""


def require(programs: Sequence[tuple[str, str]]) -> None:
    """Install Debian's packages of the missing programs, given as (program, package). Raises
    `NoDaemon` with what to install if that is impossible.
    """
    lacking = sorted({package for program, package in programs if shutil.which(program) is None})
    if not lacking:
        return
    words = f"apt-get install {' '.join(lacking)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NoDaemon(f"the stack's tests need a Docker daemon: as root run `{words}` (Debian)")
    with installing():
        try:
            install_packages(lacking)
        except RuntimeError as error:
            raise NoDaemon(str(error)) from error


class StackDaemon:
    """One daemon; `start` and `stop` may alternate, and its images stay in `folder`. One process
    uses the folder at a time. Its socket is `address`, also for child processes (`environment`).
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        if os.geteuid() != 0:
            raise NoDaemon("the stack's tests start a Docker daemon, which needs root: run as root")
        require([("dockerd", "docker.io"), ("docker", "docker.io"), ("ip", "iproute2")])
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NoDaemon(f"another process uses the daemon in {folder}") from None
        self.address = f"unix://{folder / 'docker.sock'}"
        self.environment = {**os.environ, "DOCKER_HOST": self.address, "DOCKER_BUILDKIT": "0"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, is_isolated: bool) -> None:
        """Start it with a network of its own, for containers, or on this machine's network, for
        builds that fetch packages (`--network host`). Raises `NoDaemon` if it does not start.
        """
        assert self._process is None
        for old in (self.folder / "exec", self.folder / "pid", self.folder / "docker.sock"):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        words = [
            *("dockerd", "--data-root", self.folder / "data", "--exec-root", self.folder / "exec"),
            *("--pidfile", self.folder / "pid", "--host", self.address),
        ]
        words += [] if is_isolated else ["--bridge", "none", "--iptables=false"]
        words += ["--ip6tables=false", "--storage-driver", "overlay2"]
        spaces = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        spaces += ["--net"] if is_isolated else []
        up = "ip link set lo up && " if is_isolated else ""
        line = ["unshare", *spaces, "sh", "-c", f'{up}exec "$0" "$@"', *map(str, words)]
        with (self.folder / "daemon.log").open("wb") as log:
            self._process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._wait_ready()
        version = subprocess.run(["dockerd", "--version"], capture_output=True, text=True)
        use("Docker", f"{version.stdout.strip()} at {self.address}")

    def stop(self) -> None:
        """Stop it and all its containers; what is left of its namespaces dies with it."""
        process, self._process = self._process, None
        if process is None:
            return
        first = _child_of(process.pid)
        if first is not None:
            os.kill(first, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # `unshare --kill-child` takes the daemon along
            process.wait(STOP_S)

    def close(self) -> None:
        """Stop it and let another process use the folder."""
        self.stop()
        self._lock.close()

    def docker(self, *words: str, timeout_s: float = WAIT_S) -> str:
        """Returns what `docker WORDS` prints. Raises `RuntimeError` with its errors if it fails."""
        return run_command(["docker", *words], self.environment, timeout_s)

    def inside(self, *spaces: str) -> list[str]:
        """Returns the words before a command that runs in these namespaces of the daemon: `--net`
        for the published ports, `--pid` for the ids that `docker inspect` prints.
        """
        assert self._process is not None
        first = _child_of(self._process.pid)
        assert first is not None, "the daemon has ended"
        return ["nsenter", "--target", str(first), *spaces, "--"]

    def _wait_ready(self) -> None:
        assert self._process is not None
        if not wait_until_ready(self._process, self.environment):
            text = (self.folder / "daemon.log").read_text(errors="replace")
            self.stop()
            raise NoDaemon(f"dockerd did not start on this machine:\n{text[-4000:]}")


def run_command(words: Sequence[str], environment: dict[str, str], timeout_s: float) -> str:
    """Returns the command's output. Raises `RuntimeError` with the end of all that it printed if it
    fails or takes longer than `timeout_s`.
    """
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(words)}: not done within {timeout_s:g} s") from None
    if done.returncode:
        text = f"{done.stdout}{done.stderr}"[-6000:]
        raise RuntimeError(f"{' '.join(words)} failed ({done.returncode}):\n{text}")
    return done.stdout


def _child_of(pid: int) -> int | None:
    """Returns the first child of a process, which is the daemon below `unshare`."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None
