"""Keeps a run's processes alive: starts each role, restarts dead ones, stops all together. Every
wait has a bound (`SupervisorLimits`), and no role survives `Supervisor.run`.
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
from typing import Any, Literal

from rollstream.contained_folder import ContainedFolder, check_regular
from rollstream.errors import ConfigurationError, LeaseHeld
from rollstream.foreign_json import parse_json
from rollstream.metric_values import MetricValues
from rollstream.os_failures import explain_os_error
from rollstream.run.supervisor import process
from rollstream.whole_file import whole_file

# Longest wait for the lock: the roles of a killed supervisor share it and die at once, their
# children a moment later.
LOCK_WAIT_S = 5.0
# Characters of a dead role's own error message in the view.
WORDS_SHOWN = 200


class RunLock:
    """The run lock of a run's folder, so that it has one supervisor. The constructor raises
    `LeaseHeld` if it is not free within `wait_s`, and `ConfigurationError` if the run was just
    deleted.

    An advisory lock (`flock`) on the open file `run.lock`, which every role inherits: it is free
    only once the supervisor *and* all its roles, the holders of leases, have ended. So the next
    supervisor may pass on their nonces (`nonces.json`).
    """

    def __init__(self, folder: Path, wait_s: float = LOCK_WAIT_S) -> None:
        self._folder, self._nonces = folder, folder / "nonces.json"
        # A received run may have a link to a key here.
        check_regular(folder / "run.lock", links=False)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self.descriptor = os.open(folder / "run.lock", flags, 0o666)
        deadline = time.monotonic() + wait_s
        while not self._taken():
            if time.monotonic() > deadline:
                holder = os.pread(self.descriptor, 32, 0).decode(errors="replace").strip()
                os.close(self.descriptor)
                raise LeaseHeld(_running(folder, holder))
            time.sleep(0.05)
        if os.fstat(self.descriptor).st_nlink == 0:
            os.close(self.descriptor)
            raise ConfigurationError(f"the run in {folder} was deleted while this command started")
        try:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{os.getpid()}\n".encode(), 0)
        # The number is for messages; the lock is held without it.
        except OSError as error:
            process.warn_unwritten(folder / "run.lock", error, "messages lack its process number")

    def lost_folder(self) -> str:
        """A message if the lock's file was moved, deleted or replaced; else ""."""
        try:
            there, locked = os.stat(self._folder / "run.lock"), os.fstat(self.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return f"the run's folder {self._folder} is gone (moved or deleted?)"
        # A network file system without its server, for the moment.
        except OSError:
            return ""
        return "" if os.path.samestat(there, locked) else f"{self._folder} has been replaced"

    def nonces(self) -> dict[str, str]:
        """Returns the nonces by role, of the last process that the former supervisor started."""
        try:
            content = ContainedFolder(self._nonces.parent).read(self._nonces.name)
            return parse_json(content, dict[str, str])
        # Torn by a kill, or no file: roles wait for their leases.
        except (OSError, ValueError):
            return {}

    def keep_nonces(self, nonces: Mapping[str, str]) -> None:
        """Keeps the nonces for the next supervisor. If that fails, its roles wait for leases to
        expire; older nonces do no harm, because no lease has them.
        """
        try:
            with whole_file(self._nonces) as partial:
                partial.write_text(json.dumps(dict(nonces)), encoding="utf-8")
        except OSError as error:
            process.warn_unwritten(self._nonces, error, "the next start waits for leases to expire")

    def close(self) -> None:
        """Roles that still run keep their share of the lock."""
        os.close(self.descriptor)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _running(folder: Path, holder: str) -> str:
    return (
        f"the run in {folder} is running already (supervisor: process {holder}); "
        "stop it first, or choose another folder with --run DIR"
    )


def running_message(folder: Path) -> str:
    """Returns that a supervisor or a role of it holds the lock of the run's folder; "" if none
    does. Nothing is made or changed.
    """
    path = folder / "run.lock"
    try:
        check_regular(path, links=False)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _running(folder, os.pread(descriptor, 32, 0).decode(errors="replace").strip())
    finally:
        os.close(descriptor)
    return ""


# Environment variables of a role: its own nonce, and that of its dead predecessor.
NONCE, HANDED_NONCE = "ROLLSTREAM_NONCE", "ROLLSTREAM_HANDED_NONCE"


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Bounds the supervisor's waits, in seconds."""

    tick_s: float = 0.1
    stop_s: float = 30.0
    """For roles to stop after SIGTERM; then they get SIGKILL."""
    finish_s: float = 180.0
    """Once the run is complete, for roles that still have work (evaluation)."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """`done` roles are not started again, and `note` describes a recent death."""

    name: str
    state: Literal["running", "restarting", "stopping", "done"]
    restarts: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """`message` is the reason of a failure, or the unfinished work."""

    kind: Literal["complete", "stopped", "failed"]
    message: str = ""


@dataclass(slots=True)
class _RoleProcess:
    """`child` is the running process, `nonce` that of the newest one; `deaths_s` and `due_s` (of
    the next start) are monotonic; `death` describes the last one.
    """

    seat: process.ProcessSpec
    child: process.ChildProcess | None = None
    nonce: str | None = None
    deaths_s: list[float] = field(default_factory=list[float])
    code: int | None = None
    due_s: float = 0.0
    done: bool = False
    death: str = ""


ShowStates = Callable[[Sequence[RoleState]], None]
RecordEvent = Callable[[Mapping[str, Any]], None]


class Supervisor:
    """Supervises the processes of `seats`, with logs in the folder `logs`. `record` gets each event
    (start, death, end), a line of `metrics/supervisor.jsonl`.
    """

    def __init__(
        self,
        seats: Sequence[process.ProcessSpec],
        logs: Path,
        lock: RunLock | None = None,
        record: RecordEvent = lambda event: None,
        policy: process.RestartPolicy | None = None,
        limits: SupervisorLimits | None = None,
    ) -> None:
        nonces = lock.nonces() if lock else {}
        self._posts = [_RoleProcess(seat, nonce=nonces.get(seat.name)) for seat in seats]
        self._logs, self._lock, self._record = logs, lock, record
        self._policy, self._limits = policy or process.RestartPolicy(), limits or SupervisorLimits()
        self._complete_s: float | None = None
        self._is_stopping = False

    def run(self, stop: threading.Event, hurry: threading.Event, show: ShowStates) -> RunOutcome:
        """Runs until the run is complete, `stop` is set, a role refuses to start, or has died too
        often; then stops all, at once if `hurry` is set. `show` is called with their states at each
        tick.
        """
        try:
            outcome = self._watch(stop, show)
            self._note({"event": outcome.kind, "note": outcome.message})
            # An orderly end writes: it would make the folder again.
            if self._lost_folder():
                self._kill_all()
        finally:
            self._stop_all(hurry, show)
        return outcome

    def states(self) -> list[RoleState]:
        return [self._state(post, time.monotonic()) for post in self._posts]

    def metric_values(self) -> MetricValues:
        """Returns the metric values by role; from any thread."""
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
            if lost := self._lost_folder():
                return RunOutcome("failed", f"{lost}; its processes are ended")
            for post in self._posts:
                failure = self._look(post, now)
                if failure:
                    return failure
            if self._complete_s is not None and self._has_finished(now):
                return RunOutcome("complete", self._unfinished())
            show(self.states())
        is_complete = self._complete_s is not None and not self._working()
        return RunOutcome("complete" if is_complete else "stopped")

    def _lost_folder(self) -> str:
        return self._lock.lost_folder() if self._lock else ""

    def _kill_all(self) -> None:
        for post in self._posts:
            if post.child:
                post.child.kill()

    def _look(self, post: _RoleProcess, now: float) -> RunOutcome | None:
        if post.done:
            return None
        if post.child is None:
            if now >= post.due_s:
                try:
                    self._start(post)
                # No process, thread, file or memory is left.
                except OSError as error:
                    return self._not_started(post, error, now)
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
        self, post: _RoleProcess, child: process.ChildProcess, code: int, now: float
    ) -> RunOutcome | None:
        name = post.seat.name
        post.deaths_s.append(now)
        recent = self._policy.recent(post.deaths_s, now)
        has_refused, post.code = process.is_final_exit(code, post.code), code
        delay = None if has_refused else self._policy.delay_s(post.deaths_s, now)
        event = {"event": "death", "role": name, "code": code, "delay_s": delay}
        self._note(event)
        # Only a failure has no next start: it shows the role's own message if it refused, else its
        # log.
        if delay is not None:
            post.due_s = now + delay
            words = " ".join(child.error_message().split())[:WORDS_SHOWN]
            cause = process.describe_exit(code) + (f": {words}" if words else "")
            post.death = f"died ({cause}), restart {len(post.deaths_s)}"
            return None
        if has_refused and (words := child.error_message()):
            return RunOutcome("failed", f"{name} refused to start: {words}\n(its log: {child.log})")
        last = process.describe_exit(code)
        often = f"died {recent} times within {self._policy.within_s:g} s, last with {last}"
        how = "refused to start" if has_refused else often
        quoted = "\n".join(f"  | {line}" for line in process.last_lines(child.log))
        return RunOutcome("failed", f"{name} {how}; the end of {child.log}:\n{quoted}")

    def _not_started(self, post: _RoleProcess, error: OSError, now: float) -> RunOutcome | None:
        post.deaths_s.append(now)
        delay = self._policy.delay_s(post.deaths_s, now)
        why = f"cannot be started: {explain_os_error(error)}"
        if delay is None:
            return RunOutcome("failed", f"{post.seat.name} {why}")
        post.due_s, post.death = now + delay, why
        return None

    def _start(self, post: _RoleProcess) -> None:
        handed, post.nonce = post.nonce, secrets.token_hex(16)
        environment = {NONCE: post.nonce}
        # The predecessor has ended, so its lease may be taken over.
        if handed is not None and post.seat.single_holder:
            environment[HANDED_NONCE] = handed
        # Before the start, so that no lease is held under an unrecorded nonce.
        if self._lock:
            self._lock.keep_nonces({p.seat.name: p.nonce for p in self._posts if p.nonce})
        log = self._logs / f"{post.seat.name}.log"
        lock = self._lock.descriptor if self._lock else None
        post.child = process.ChildProcess(post.seat, log, environment, lock)
        self._note(
            {
                "event": "start",
                "role": post.seat.name,
                "pid": post.child.pid,
                "restart": len(post.deaths_s),
            }
        )

    def _note(self, event: Mapping[str, Any]) -> None:
        try:
            self._record({"time_s": time.time(), **event})
        # A `StoreError` is one; a full disk must not end the roles.
        except OSError as error:
            process.warn_unwritten(self._logs, error, f"the event {event['event']!r} is lost")

    def _complete(self, now: float) -> None:
        self._complete_s = now
        for post in self._posts:
            # They would never end by themselves; roles with work left (evaluation) get the cores.
            if post.seat.ends == "never" and not post.seat.stops_last and not post.done:
                post.done = True
                if post.child:
                    post.child.terminate()

    def _has_finished(self, now: float) -> bool:
        assert self._complete_s is not None
        late = now - self._complete_s > self._limits.finish_s
        return late or all(post.done for post in self._posts if not post.seat.stops_last)

    def _working(self) -> list[str]:
        return [post.seat.name for post in self._posts if not (post.done or post.seat.stops_last)]

    def _unfinished(self) -> str:
        names = self._working()
        waited = f"{self._limits.finish_s:g} s after the last step"
        return f"{', '.join(names)} still had work {waited} and was stopped" if names else ""

    def _stop_all(self, hurry: threading.Event, show: ShowStates) -> None:
        self._is_stopping = True
        # Those that stop last read the records of the others.
        for last in (False, True):
            posts = [post for post in self._posts if post.seat.stops_last == last]
            self._stop([post.child for post in posts if post.child], hurry, show)

    def _stop(
        self, children: Sequence[process.ChildProcess], hurry: threading.Event, show: ShowStates
    ) -> None:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self._limits.stop_s
        while any(child.reap() is None for child in children):
            if hurry.wait(self._limits.tick_s) or time.monotonic() > deadline:
                break
            show(self.states())
        for child in children:
            if child.reap() is None:
                self._note({"event": "killed", "role": child.seat.name})
                child.kill()
