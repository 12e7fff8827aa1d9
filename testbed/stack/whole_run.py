"""A run in a stack as tests and measurements see it: its newest step (`newest_step`), the death of
a container (`kill`), and its audit inside and outside of the containers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from testbed.repository import ROOT
from testbed.stack.compose import Container, Stack
from testbed.waiting import WAIT_S, let_pass, wait_for

REPORT, EXPLORER = "http://127.0.0.1:7462/", "http://127.0.0.1:7461/"
PROMETHEUS = "http://127.0.0.1:9090/"
KEYS = {"AWS_ACCESS_KEY_ID": "rollstream", "AWS_SECRET_ACCESS_KEY": "only-for-this-machine"}
"""As in the compose file."""
LOOK_S = 1.0  # between two looks, each of which starts a process
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


def newest_step(stack: Stack) -> int:
    """The newest step, as the report's service says: -1 before it answers, and more than any step
    once the run is complete.
    """
    page = fetched(stack, REPORT)
    if page.startswith(b"step "):
        return int(page.split()[1])
    return sys.maxsize if b"<html" in page else -1


def wait_for_step(stack: Stack, number: int) -> None:
    def is_there() -> bool:
        let_pass(LOOK_S)
        return newest_step(stack) >= number

    wait_for(is_there, None, stack.describe)


def wait_for_report(stack: Stack) -> None:
    def is_there() -> bool:
        let_pass(LOOK_S)
        return b"<html" in fetched(stack, REPORT)

    wait_for(is_there, None, stack.describe)


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


def kill(stack: Stack, container: Container) -> None:
    """Kills its first process, unless its work is done, and waits until it is started again."""
    if container.status == "exited":
        assert container.exit_code == 0, stack.logs(container)
        return
    stack.kill_first_process(container)

    def is_back() -> bool:
        let_pass(LOOK_S / 4)
        (now,) = [one for one in stack.containers(container.service) if one.id == container.id]
        return now.restarts > container.restarts and now.status == "running"

    wait_for(is_back, None, lambda: f"{container.service} was killed\n{stack.describe()}")


def audit_inside(stack: Stack) -> None:
    """Raises `RuntimeError`, with what the audit prints in a container, unless all invariants
    hold.
    """
    stack.run("report", "rollstream", "audit", "/run/rollstream")


def replay_inside(stack: Stack, bound_s: float) -> None:
    """Trains all recorded steps again in a container. Raises `RuntimeError`, with what the replay
    prints, unless every step ends with the hash that the ledger has.
    """
    line = ("rollstream", "replay", "/run/rollstream", "--from-step", "0", "--out", "/tmp/again")
    stack.run("report", *line, timeout_s=bound_s)


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
