"""Runs one call on one scene, and lists the harm (`attempt`): files changed outside the run, files
changed inside it by looking, modules imported and functions called by name, secrets that a foreign
host or an output got, processes that do not end, and tracebacks.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from rollstream.http_proxies import open_direct
from rollstream.run.supervisor.process import PARENT_VARIABLE, end_with_parent
from testbed.hostile_runs.calls import ROUTES, Call
from testbed.hostile_runs.foreign_host import ForeignHost
from testbed.hostile_runs.scene import PLANTED, Scene, Snapshot, differences, snapshot
from testbed.waiting import let_pass

TIMEOUT_S = 60.0
BUSY_SHARE, ROUNDS_MAX = 0.02, 5
"""A process that used this share of `TIMEOUT_S` is not waiting, but starved by others: it gets the
same time again, so often. `RLIMIT_CPU` ends one that computes for ever.
"""
MEMORY_BYTES = 3 << 30
"""Private memory of a command: one that reads /dev/zero must not take the machine's."""
FILE_BYTES = 256 << 20
OUTPUT_BYTES = 1 << 20
SERVED_S = 6.0
"""For how long the explorer's index and answers are waited for."""
HARMS = ("outside", "imported", "secret")
"""The kinds of harm that no command may do: the goal of `edges_files`."""
FAULTS = (*HARMS, "inside", "copied", "hang", "traceback", "left")
"""All kinds: `copied` is a secret of the user's in an output, `left` a temporary file."""


class Child(Protocol):
    """A process that runs a command."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...


class Runner(Protocol):
    """Starts commands."""

    def start(self, words: list[str], scene: Scene, output: Path) -> Child: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that a command did; `kind` is one of `FAULTS`."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one call on one case."""

    call: str
    code: int | None
    seconds: float
    faults: tuple[Fault, ...]
    output: str

    def has(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.faults)


def bound_resources(parent: int) -> None:
    """Bounds memory, CPU time and files of the calling process, and its life by that of the process
    `parent`, whatever ends that: a command that serves would stay.
    """
    end_with_parent({PARENT_VARIABLE: str(parent)})
    cpu_s = int(TIMEOUT_S) + 5
    for kind, most in (
        (resource.RLIMIT_DATA, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


class RealProcesses:
    """Starts each command as the console script does: the working directory is not on the path."""

    def start(self, words: list[str], scene: Scene, output: Path) -> Child:
        with output.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "rollstream", *words],
                cwd=working_folder(scene),
                env=scene.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(bound_resources, os.getpid()),
            )


def working_folder(scene: Scene) -> Path:
    """Returns where the user stands: in the received folder (`cd RUN`), if it is one."""
    received = scene.received
    is_own = received.is_dir() and not received.is_symlink()
    return received if is_own else scene.project


@dataclass(slots=True)
class Watched:
    """Holds what was in a scene before a call."""

    scene: Scene
    outside: Snapshot
    inside: Snapshot

    @classmethod
    def of(cls, scene: Scene) -> "Watched":
        received = scene.received
        outside = snapshot(scene.root / "user", received)
        return cls(scene, outside, snapshot(received))

    def faults(self, call: Call) -> Iterable[Fault]:
        now = Watched.of(self.scene)
        # A received folder that is a link itself: what the command writes there is what was asked.
        named = {f"project/{path}" for path in call.writes if self.scene.received.is_symlink()}
        looked_at = "runs/own/" if "{own}" in " ".join(call.words) else None
        for line in differences(self.outside, now.outside):
            is_looked_at = looked_at is not None and looked_at in line
            if line.partition(" ")[2] in named:
                continue
            yield Fault("inside" if is_looked_at else "outside", line)
        for line in differences(self.inside, now.inside):
            path = line.partition(" ")[2]
            if not any(not own or (path + "/").startswith(own + "/") for own in call.writes):
                yield Fault("inside", line)
        for path in sorted(self.scene.temporary.iterdir()):
            yield Fault("left", path.name)


def attempt(
    scene: Scene,
    call: Call,
    runner: Runner,
    hosts: Iterable[ForeignHost],
    timeout_s: float = TIMEOUT_S,
) -> Attempt:
    """Runs the call, and returns what it did. The scene is used up if it has faults."""
    hosts = tuple(hosts)
    for host in hosts:
        host.forget()
    scene.marked()
    before, output, started = Watched.of(scene), scene.root / "output.txt", time.monotonic()
    child = runner.start(call.line(scene), scene, output)
    if call.serves:
        _browse(child, output, started + timeout_s)
    code = _wait(child, timeout_s)
    seconds = time.monotonic() - started
    for host in hosts:
        host.settle()
    text = output.read_bytes()[:OUTPUT_BYTES].decode(errors="replace")
    faults = list(before.faults(call))
    faults += [Fault("imported", name) for name in sorted(set(scene.marked()))]
    faults += [
        Fault("secret", secret) for secret in PLANTED if any(h.seen([secret]) for h in hosts)
    ]
    faults += [Fault("copied", found) for found in _copied(scene, text)]
    if code is None or code in (-signal.SIGXCPU, -signal.SIGKILL):
        faults.append(Fault("hang", f"{seconds:.0f} s"))
    if "Traceback (most recent call last)" in text or (code is not None and code < 0):
        faults.append(Fault("traceback", text.strip().rpartition("\n")[2][:200]))
    return Attempt(call.name, code, seconds, tuple(faults), text)


def _wait(child: Child, timeout_s: float) -> int | None:
    """Returns the exit code; None if the process waited for `timeout_s`, and was killed."""
    for _ in range(ROUNDS_MAX):
        used_s, until, pause_s = _cpu_s(child), time.monotonic() + timeout_s, 0.002
        while time.monotonic() < until:
            if (code := child.poll()) is not None:
                return code
            let_pass(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        if _cpu_s(child) - used_s < BUSY_SHARE * timeout_s:
            break
    child.kill()
    while child.poll() is None:
        let_pass(0.01)
    return None


def _cpu_s(child: Child) -> float:
    """Returns the CPU time that the process has used; 0 if it has ended."""
    try:
        times = psutil.Process(child.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def _browse(child: Child, output: Path, until: float) -> None:
    """Asks the served page for each kind of answer, and ends the server."""
    url = ""
    while not url and child.poll() is None and time.monotonic() < until:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        url = next((x.split()[1] for x in lines if x.startswith("explorer: ") and "\n" in x), "")
        let_pass(0.02)
    if not url:
        return
    served_until = min(until, time.monotonic() + SERVED_S)
    while time.monotonic() < served_until and not _is_complete(url):
        let_pass(0.05)
    for route in ROUTES:
        _get(url.rstrip("/") + route)
    child.terminate()


def _is_complete(url: str) -> bool:
    """Returns whether the index of the only run is complete."""
    try:
        runs = json.loads(_get(f"{url}api/runs"))["runs"]
    except (ValueError, KeyError):
        return False
    return all(run["trouble"] or run["index"]["complete"] for run in runs)


def _get(url: str) -> bytes:
    try:
        with open_direct(url, 10) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError, ValueError):
        return b""


def _copied(scene: Scene, text: str) -> list[str]:
    """Returns where a secret of the user's files or environment is in what the command wrote."""
    places = ["printed"] if any(secret in text for secret in PLANTED) else []
    for path in sorted(scene.out.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                if any(secret.encode() in data for secret in PLANTED):
                    places.append(path.relative_to(scene.out).as_posix())
    return places
