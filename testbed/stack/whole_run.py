"""A run in a stack as tests and measurements see it (`StackRun`), its audit outside of the
containers, and what they cost.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from testbed.repository import ROOT
from testbed.run_driver import RunDriver
from testbed.stack.compose import Stack
from testbed.waiting import WAIT_S, let_pass

REPORT, EXPLORER = "http://127.0.0.1:7462/", "http://127.0.0.1:7461/"
PROMETHEUS = "http://127.0.0.1:9090/"
KEYS = {"AWS_ACCESS_KEY_ID": "rollstream", "AWS_SECRET_ACCESS_KEY": "only-for-this-machine"}
"""As in the compose file."""
LOOK_S = 1.0
Value = TypeVar("Value")
FETCH = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1])
if sys.argv[2]:
    request.add_header("Authorization", f"Bearer {sys.argv[2]}")
try:
    answer = urllib.request.urlopen(request, timeout=30)
except urllib.error.HTTPError as error:
    answer = error
sys.stdout.buffer.write(answer.read())
"""


def fetched(stack: Stack, url: str, token: str = "") -> bytes:
    """What a program on the daemon's machine gets, whatever its status; empty while no server
    answers.
    """
    line = [*stack.daemon.inside("--net"), sys.executable, "-c", FETCH, url, token]
    return subprocess.run(line, capture_output=True, check=False, timeout=WAIT_S).stdout


class StackRun(RunDriver):
    """The run of a stack: its processes are in containers, which the daemon starts again, and its
    folder is a volume.
    """

    def __init__(self, stack: Stack) -> None:
        super().__init__(Path("/run/rollstream"))
        self.stack = stack

    def step(self) -> int:
        """The newest step, as the report's service says: -1 before it answers, and more than any
        step once the run is complete.
        """
        page = fetched(self.stack, REPORT)
        if page.startswith(b"step "):
            return int(page.split()[1])
        return sys.maxsize if b"<html" in page else -1

    def wait_for(self, condition: Callable[[], Value | None], bound_s: float = WAIT_S) -> Value:
        """Looks once a second, since a look starts a process."""

        def looked() -> Value | None:
            let_pass(LOOK_S)
            return condition()

        return super().wait_for(looked, bound_s)

    def wait_for_report(self) -> None:
        self.wait_for_step(sys.maxsize)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kills the first process of the container of this service, unless its work is done, and
        waits until it is started again.
        """
        (container,) = self.stack.containers(name)
        if container.status == "exited":
            assert container.exit_code == 0, self.stack.logs(container)
            return
        self.stack.kill_first_process(container, number)

        def is_back() -> bool:
            (now,) = self.stack.containers(name)
            return now.restarts > container.restarts and now.status == "running"

        self.wait_for(is_back)

    def audit(self, *words: str, bound_s: float = WAIT_S) -> dict[str, Any]:
        """The report of the audit in a container. Raises `RuntimeError`, with what it prints,
        unless all invariants hold.
        """
        line = ("rollstream", "audit", str(self.folder), "--json", *words)
        printed = self.stack.run("report", *line, timeout_s=bound_s)
        return json.loads(printed[printed.index("{") :])

    def replay(self, bound_s: float) -> None:
        """Trains all recorded steps again in a container. Raises `RuntimeError`, with what the
        replay prints, unless every step ends with the hash that the ledger has.
        """
        line = ("rollstream", "replay", str(self.folder), "--from-step", "0", "--out", "/tmp/again")
        self.stack.run("report", *line, timeout_s=bound_s)

    def describe(self) -> str:
        return self.stack.describe()

    def close(self) -> None:
        self.stack.down(with_data=True)


def queried(stack: Stack, expression: str) -> dict[str, float]:
    """The value of each role's series of an instant vector of the stack's Prometheus, as the sum
    over its containers.
    """
    url = f"{PROMETHEUS}api/v1/query?{urlencode({'query': expression})}"
    page = fetched(stack, url)
    series: list[Mapping[str, Any]]
    series = json.loads(page)["data"]["result"] if page else []
    values: dict[str, float] = {}
    for one in series:
        role = one["metric"].get("role", "")
        values[role] = values.get(role, 0.0) + float(one["value"][1])
    return values


def audit_outside(stack: Stack, to: Path) -> Path:
    """Audits the run with this checkout over the published ports, in no container; returns a copy
    of the run's folder. Fails with what the audit prints unless all invariants hold.
    """
    (report,) = stack.containers("report")
    stack.copy_out(report, "/run/rollstream", to / "run")
    file = to / "run" / "config.json"
    text = file.read_text().replace("kafka:19092", "localhost:9092")
    file.write_text(text.replace("http://object-store:7070", "http://127.0.0.1:7070"))
    line = [*stack.daemon.inside("--net"), sys.executable, "-m", "rollstream", "audit"]
    done = subprocess.run(
        [*line, str(to / "run")],
        env={**os.environ, **KEYS},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return to / "run"


def cpu_seconds(stack: Stack) -> dict[str, float]:
    """The CPU seconds of each running service's containers since their start, as their cgroups have
    counted them; the commands of health checks are in them.
    """
    used: dict[str, float] = {}
    for container in stack.containers():
        if container.status == "running":
            used[container.service] = used.get(container.service, 0.0) + _cgroup_s(container.id)
    return used


def _cgroup_s(identity: str) -> float:
    first = Path(f"/sys/fs/cgroup/cpuacct/docker/{identity}/cpuacct.usage")
    if first.exists():
        return int(first.read_text()) / 1e9
    second = Path(f"/sys/fs/cgroup/docker/{identity}/cpu.stat")
    counts = dict(line.split() for line in second.read_text().splitlines())
    return int(counts["usage_usec"]) / 1e6
