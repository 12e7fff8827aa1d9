"""Keeps a run's processes alive: starts each role, restarts dead ones, stops all of them together.

It decides nothing about the run itself: a restarted role finds its state in the log and the store.
Every wait has a bound (`SupervisorLimits`), and no role survives `Supervisor.run`. A run's folder
has one supervisor (`RunLock`).
"""

import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from rollstream.errors import ConfigurationError, LeaseHeld
from rollstream.metric_values import MetricValues
from rollstream.supervisor.process import (
    ChildProcess,
    ProcessSpec,
    RestartPolicy,
    describe_exit,
    is_final_exit,
    last_lines,
)

LOCK_WAIT_S = 5.0  # roles of a killed supervisor die at once, their own children a moment later


class RunLock:
    """Locks a run's folder from construction until `close`, and until the last role that inherited
    the lock has ended, so that the folder has one supervisor. Raises `LeaseHeld` if another
    supervisor or one of its roles holds the lock, `ConfigurationError` if the run was just deleted.

    The lock is an advisory lock on an open file that every role inherits, so it is free only when
    the supervisor *and* all its roles have ended. The former holders of the leases are then dead,
    and the next supervisor may use their nonces (`nonces.json`) instead of waiting for the leases
    to expire.
    """

    def __init__(self, folder: Path, wait_s: float = LOCK_WAIT_S) -> None:
        self._nonces = folder / "nonces.json"
        self.descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + wait_s
        while not self._taken():
            if time.monotonic() > deadline:
                holder = os.pread(self.descriptor, 32, 0).decode(errors="replace").strip()
                os.close(self.descriptor)
                raise LeaseHeld(
                    f"the run in {folder} is running already (supervisor: process {holder}); "
                    "stop it first, or choose another folder with --run DIR"
                )
            time.sleep(0.05)
        if os.fstat(self.descriptor).st_nlink == 0:
            os.close(self.descriptor)
            raise ConfigurationError(f"the run in {folder} was deleted while this command started")
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{os.getpid()}\n".encode(), 0)

    def nonces(self) -> dict[str, str]:
        """Returns, by role, the nonce of the last process that the former supervisor started."""
        try:
            found = json.loads(self._nonces.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # torn by a kill: roles wait for their leases
            return {}
        return cast(dict[str, str], found) if isinstance(found, dict) else {}

    def keep_nonces(self, nonces: Mapping[str, str]) -> None:
        """Write these nonces for the next supervisor."""
        partial = self._nonces.with_suffix(".partial")
        partial.write_text(json.dumps(dict(nonces)), encoding="utf-8")
        os.replace(partial, self._nonces)

    def close(self) -> None:
        os.close(self.descriptor)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


NONCE, HANDED_NONCE = "ROLLSTREAM_NONCE", "ROLLSTREAM_HANDED_NONCE"


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Bounds the supervisor's waits, in seconds."""

    tick_s: float = 0.1
    """Between two checks of the processes."""
    stop_s: float = 30.0
    """For roles to stop after SIGTERM, before SIGKILL."""
    finish_s: float = 180.0
    """After the run is complete, for roles with work left (evaluation)."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """Shows the state of one process in the live view."""

    name: str
    state: Literal["running", "restarting", "stopping", "done"]
    restarts: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Reports how a run ended; `message` is the reason of a failure."""

    kind: Literal["complete", "stopped", "failed"]
    message: str = ""


@dataclass(slots=True)
class _RoleProcess:
    """Tracks a role: its process, None while none runs, and its deaths. `due_s` is the monotonic
    time of its next start; `death` describes its last death for the live view.
    """

    seat: ProcessSpec
    child: ChildProcess | None = None
    nonce: str | None = None
    deaths_s: list[float] = field(default_factory=list[float])
    code: int | None = None
    """Exit code of the last death."""
    due_s: float = 0.0
    done: bool = False
    death: str = ""


ShowStates = Callable[[Sequence[RoleState]], None]
RecordEvent = Callable[[Mapping[str, Any]], None]


class Supervisor:
    """Supervises one run's processes; `record` is called with each event, which becomes a line of
    `metrics/supervisor.jsonl`.
    """

    def __init__(
        self,
        seats: Sequence[ProcessSpec],
        logs: Path,
        lock: RunLock | None = None,
        record: RecordEvent = lambda event: None,
        policy: RestartPolicy | None = None,
        limits: SupervisorLimits | None = None,
    ) -> None:
        known = lock.nonces() if lock else {}
        self._posts = [_RoleProcess(seat, nonce=known.get(seat.name)) for seat in seats]
        self._logs, self._lock, self._record = logs, lock, record
        self._policy, self._limits = policy or RestartPolicy(), limits or SupervisorLimits()
        self._complete_s: float | None = None
        self._is_stopping = False

    def run(self, stop: threading.Event, hurry: threading.Event, show: ShowStates) -> RunOutcome:
        """Supervise until the run is complete, `stop` is set, a role refuses to start, or a role
        has died too often; then stop all roles. `hurry` kills them at once. `show` is called with
        the states at each tick.
        """
        try:
            outcome = self._watch(stop, show)
            self._record({"time_s": time.time(), "event": outcome.kind, "note": outcome.message})
        finally:
            self._stop_all(hurry, show)
        return outcome

    def states(self) -> list[RoleState]:
        """Returns the present state of each role."""
        return [self._state(post, time.monotonic()) for post in self._posts]

    def metric_values(self) -> MetricValues:
        """Returns metrics of each role; may be called from any thread."""
        return {
            "supervisor_restarts_total": {p.seat.name: len(p.deaths_s) for p in self._posts},
            "supervisor_process_up": {p.seat.name: p.child is not None for p in self._posts},
        }

    def _state(self, post: _RoleProcess, now: float) -> RoleState:
        deaths, is_alive = len(post.deaths_s), post.child is not None and post.child.reap() is None
        if self._is_stopping and is_alive:
            return RoleState(post.seat.name, "stopping", deaths, "is stopping")
        state = "done" if post.done else "running" if post.child else "restarting"
        is_recent = self._policy.recent(post.deaths_s, now) > 0
        return RoleState(post.seat.name, state, deaths, post.death if is_recent else "")

    def _watch(self, stop: threading.Event, show: ShowStates) -> RunOutcome:
        while not stop.wait(self._limits.tick_s):
            now = time.monotonic()
            for post in self._posts:
                failure = self._look(post, now)
                if failure:
                    return failure
            if self._complete_s is not None and self._has_finished(now):
                return RunOutcome("complete")
            show(self.states())
        return RunOutcome("complete" if self._complete_s is not None else "stopped")

    def _look(self, post: _RoleProcess, now: float) -> RunOutcome | None:
        """Start the process if it is due, reap it if it ended; returns the run's outcome if the run
        fails with it.
        """
        if post.done:
            return None
        if post.child is None:
            if now >= post.due_s:
                self._start(post)
            return None
        post.child.rotate_log()
        code = post.child.reap()
        if code is None:
            return None
        child, post.child = post.child, None
        if code == 0 and post.seat.ends != "never":
            post.done = True
            if post.seat.ends == "run":
                self._complete(now)
            return None
        return self._died(post, child, code, now)

    def _died(
        self, post: _RoleProcess, child: ChildProcess, code: int, now: float
    ) -> RunOutcome | None:
        """Record a death and plan the next start, or return the run's failure: a role that refuses
        to start ends the run with its own error message, a role that died too often with the end of
        its log.
        """
        name = post.seat.name
        post.deaths_s.append(now)
        recent = self._policy.recent(post.deaths_s, now)
        has_refused, post.code = is_final_exit(code, post.code), code
        delay = None if has_refused else self._policy.delay_s(post.deaths_s, now)
        event = {"event": "death", "role": name, "code": code, "delay_s": delay}
        self._record({"time_s": time.time(), **event})
        if delay is not None:
            post.due_s = now + delay
            post.death = f"died ({describe_exit(code)}), restart {len(post.deaths_s)}"
            return None
        if has_refused and (words := child.error_message()):
            return RunOutcome("failed", f"{name} refused to start: {words}\n(its log: {child.log})")
        last = describe_exit(code)
        often = f"died {recent} times within {self._policy.within_s:g} s, last with {last}"
        how = "refused to start" if has_refused else often
        quoted = "\n".join(f"  | {line}" for line in last_lines(child.log))
        return RunOutcome("failed", f"{name} {how}; the end of {child.log}:\n{quoted}")

    def _start(self, post: _RoleProcess) -> None:
        """Start the process with a new nonce, and with the nonce of its reaped predecessor."""
        handed, post.nonce = post.nonce, secrets.token_hex(16)
        environment = {NONCE: post.nonce}
        if handed is not None and post.seat.single_holder:
            environment[HANDED_NONCE] = handed
        if self._lock:  # before the start, so that no lease is held under an unrecorded nonce
            self._lock.keep_nonces({p.seat.name: p.nonce for p in self._posts if p.nonce})
        log = self._logs / f"{post.seat.name}.log"
        lock = self._lock.descriptor if self._lock else None
        post.child = ChildProcess(post.seat, log, environment, lock)
        self._record(
            {
                "time_s": time.time(),
                "event": "start",
                "role": post.seat.name,
                "pid": post.child.pid,
                "restart": len(post.deaths_s),
            }
        )

    def _complete(self, now: float) -> None:
        """Stop the roles that end only with the run, so that roles with work left (evaluation) get
        the cores.
        """
        self._complete_s = now
        for post in self._posts:
            if post.seat.ends == "never" and not post.seat.stops_last and not post.done:
                post.done = True
                if post.child:
                    post.child.terminate()

    def _has_finished(self, now: float) -> bool:
        assert self._complete_s is not None
        late = now - self._complete_s > self._limits.finish_s
        return late or all(post.done for post in self._posts if not post.seat.stops_last)

    def _stop_all(self, hurry: threading.Event, show: ShowStates) -> None:
        """Stop all roles, then those that stop last."""
        self._is_stopping = True
        for last in (False, True):
            posts = [post for post in self._posts if post.seat.stops_last == last]
            self._stop([post.child for post in posts if post.child], hurry, show)

    def _stop(
        self, children: Sequence[ChildProcess], hurry: threading.Event, show: ShowStates
    ) -> None:
        """1. Send SIGTERM. 2. Wait, at most `stop_s`. 3. Kill the remaining children by
        process id.
        """
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self._limits.stop_s
        while any(child.reap() is None for child in children):
            if hurry.wait(self._limits.tick_s) or time.monotonic() > deadline:
                break
            show(self.states())
        for child in children:
            if child.reap() is None:
                self._record({"time_s": time.time(), "event": "killed", "role": child.seat.name})
                child.kill()
