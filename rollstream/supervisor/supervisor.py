"""Keeps a run's processes alive (`Supervisor`): starts each role, restarts dead ones, stops all of
them together.

It decides nothing about the run itself: a restarted role finds its state in the log and the store.
Every wait has a bound (`SupervisorLimits`), and no role survives `Supervisor.run`. A run's folder
has one supervisor (`RunLock`). A restarted role is given the nonce of its dead predecessor (a
random text in the lease), with which it takes over the lease without waiting.
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
from rollstream.supervisor import process
from rollstream.whole_file import whole_file

# Longest wait for the lock: the roles of a killed supervisor, which have the lock too, die at once,
# and their own children a moment later.
LOCK_WAIT_S = 5.0
WORDS_SHOWN = 200  # characters of a dead role's own error message in the view


class RunLock:
    """Locks a run's folder, so that it has one supervisor. The constructor takes the lock; it
    raises `LeaseHeld` if another supervisor or one of its roles still has it after `wait_s`, and
    `ConfigurationError` if the run was just deleted.

    It is an advisory lock (`flock`) on the open file `run.lock`, which every role inherits. So the
    lock is free only once the supervisor has closed the file *and* all its roles have ended. Then
    all processes that held leases are dead, and the next supervisor may pass on their nonces
    (`nonces.json`): its roles need not wait for the leases to expire.
    """

    def __init__(self, folder: Path, wait_s: float = LOCK_WAIT_S) -> None:
        self._folder, self._nonces = folder, folder / "nonces.json"
        check_regular(folder / "run.lock", links=False)  # a received run may have one to a key
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
        except OSError as error:  # the number is for messages; the lock is held without it
            process.warn_unwritten(folder / "run.lock", error, "messages lack its process number")

    def lost_folder(self) -> str:
        """Returns a message if another file than this lock, or none, is in the run's folder: it was
        moved, deleted or replaced. "" if the lock is in its place.
        """
        try:
            there, own = os.stat(self._folder / "run.lock"), os.fstat(self.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return f"the run's folder {self._folder} is gone (moved or deleted?)"
        except OSError:  # a network file system without its server, for the moment
            return ""
        return "" if os.path.samestat(there, own) else f"{self._folder} has been replaced"

    def nonces(self) -> dict[str, str]:
        """Returns, by role, the nonce of the last process that the former supervisor started; {} if
        it left none.
        """
        try:
            content = ContainedFolder(self._nonces.parent).read(self._nonces.name)
            return parse_json(content, dict[str, str])
        except (OSError, ValueError):  # torn by a kill, or no file: roles wait for their leases
            return {}

    def keep_nonces(self, nonces: Mapping[str, str]) -> None:
        """Write these nonces for the next supervisor. If they cannot be written (a full disk), a
        warning is printed: the next supervisor's roles then wait for the leases of their
        predecessors to expire, as after a crash of the machine. Older nonces do no harm: no lease
        has them.
        """
        try:
            with whole_file(self._nonces) as partial:
                partial.write_text(json.dumps(dict(nonces)), encoding="utf-8")
        except OSError as error:
            process.warn_unwritten(self._nonces, error, "the next start waits for leases to expire")

    def close(self) -> None:
        """Give up this process's share of the lock; roles that still run keep theirs."""
        os.close(self.descriptor)

    def _taken(self) -> bool:
        """Try to take the lock, without waiting; returns whether this process has it now."""
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


NONCE, HANDED_NONCE = "ROLLSTREAM_NONCE", "ROLLSTREAM_HANDED_NONCE"
"""Environment variables of a role: its own nonce, and that of its dead predecessor."""


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Bounds the supervisor's waits, in seconds."""

    tick_s: float = 0.1
    """Pause between two checks of the processes."""
    stop_s: float = 30.0
    """Longest wait for roles to stop after SIGTERM; then they get SIGKILL."""
    finish_s: float = 180.0
    """Longest wait, once the run is complete, for roles that still have work (evaluation)."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """Describes one role's process for the live view. `done`: it ended and is not started again;
    `note` describes a recent death.
    """

    name: str
    state: Literal["running", "restarting", "stopping", "done"]
    restarts: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Reports how a run ended; `message` is the reason of a failure, or what is not done."""

    kind: Literal["complete", "stopped", "failed"]
    message: str = ""


@dataclass(slots=True)
class _RoleProcess:
    """Tracks one role. `seat` describes its process; `child` is the running one, None while none
    runs; `nonce` is that of the newest process. `deaths_s` and `due_s` are monotonic times: of the
    deaths, and of the next start. `death` describes the last death for the live view. A role that
    is `done` is not started again.
    """

    seat: process.ProcessSpec
    child: process.ChildProcess | None = None
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
    """Supervises one run's processes, which `seats` describe. Their logs are written to the folder
    `logs`. `record` is called with each event (start, death, end), which becomes a line of
    `metrics/supervisor.jsonl`.
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
        known = lock.nonces() if lock else {}
        self._posts = [_RoleProcess(seat, nonce=known.get(seat.name)) for seat in seats]
        self._logs, self._lock, self._record = logs, lock, record
        self._policy, self._limits = policy or process.RestartPolicy(), limits or SupervisorLimits()
        self._complete_s: float | None = None
        self._is_stopping = False

    def run(self, stop: threading.Event, hurry: threading.Event, show: ShowStates) -> RunOutcome:
        """Start all roles and supervise them until the run is complete, `stop` is set, a role
        refuses to start, or a role has died too often. Then stop all roles; if `hurry` is set, they
        are killed at once. `show` is called with their states at each tick.
        """
        try:
            outcome = self._watch(stop, show)
            self._note({"event": outcome.kind, "note": outcome.message})
            if self._lost_folder():  # an orderly end writes: it would make the folder again
                self._kill_all()
        finally:
            self._stop_all(hurry, show)
        return outcome

    def states(self) -> list[RoleState]:
        """Returns the present state of each role."""
        return [self._state(post, time.monotonic()) for post in self._posts]

    def metric_values(self) -> MetricValues:
        """Returns the supervisor's metrics, by role; may be called from any thread."""
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
        """Check all processes at each tick, until the run has an outcome."""
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
        """Start the role's process if it is due, or handle its end. Returns the run's outcome if
        that end fails the run, else None.
        """
        if post.done:
            return None
        if post.child is None:
            if now >= post.due_s:
                try:
                    self._start(post)
                except OSError as error:  # no process, thread, file or memory is left
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
        """Record a death and plan the next start. If there must be none, return the run's failure:
        for a role that refused to start with its own error message, for one that died too often
        with the end of its log.
        """
        name = post.seat.name
        post.deaths_s.append(now)
        recent = self._policy.recent(post.deaths_s, now)
        has_refused, post.code = process.is_final_exit(code, post.code), code
        delay = None if has_refused else self._policy.delay_s(post.deaths_s, now)
        event = {"event": "death", "role": name, "code": code, "delay_s": delay}
        self._note(event)
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
        """Plan the next start of a process that the machine did not start, as after a death."""
        post.deaths_s.append(now)
        delay = self._policy.delay_s(post.deaths_s, now)
        why = f"cannot be started: {explain_os_error(error)}"
        if delay is None:
            return RunOutcome("failed", f"{post.seat.name} {why}")
        post.due_s, post.death = now + delay, why
        return None

    def _start(self, post: _RoleProcess) -> None:
        """Start the process with a new nonce. If its role holds a lease, pass it the nonce of its
        predecessor too, which has ended.
        """
        handed, post.nonce = post.nonce, secrets.token_hex(16)
        environment = {NONCE: post.nonce}
        if handed is not None and post.seat.single_holder:
            environment[HANDED_NONCE] = handed
        if self._lock:  # before the start, so that no lease is held under an unrecorded nonce
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
        """Record an event with its time. An event that cannot be written (a full disk) is lost,
        with a warning: it must not end the roles.
        """
        try:
            self._record({"time_s": time.time(), **event})
        except OSError as error:  # a `StoreError` is one
            process.warn_unwritten(self._logs, error, f"the event {event['event']!r} is lost")

    def _complete(self, now: float) -> None:
        """Note that the run is complete, and stop the roles that would never end by themselves. So
        roles that still have work (evaluation) get the cores.
        """
        self._complete_s = now
        for post in self._posts:
            if post.seat.ends == "never" and not post.seat.stops_last and not post.done:
                post.done = True
                if post.child:
                    post.child.terminate()

    def _has_finished(self, now: float) -> bool:
        """Returns whether no role of the complete run has work left, or `finish_s` is over."""
        assert self._complete_s is not None
        late = now - self._complete_s > self._limits.finish_s
        return late or all(post.done for post in self._posts if not post.seat.stops_last)

    def _working(self) -> list[str]:
        """Returns the roles that a complete run still waits for, such as its last evaluation."""
        return [post.seat.name for post in self._posts if not (post.done or post.seat.stops_last)]

    def _unfinished(self) -> str:
        """Returns which roles of the complete run still had work; "" if none had."""
        names = self._working()
        waited = f"{self._limits.finish_s:g} s after the last step"
        return f"{', '.join(names)} still had work {waited} and was stopped" if names else ""

    def _stop_all(self, hurry: threading.Event, show: ShowStates) -> None:
        """Stop all roles but those that stop last (they read the records of the others), then
        these.
        """
        self._is_stopping = True
        for last in (False, True):
            posts = [post for post in self._posts if post.seat.stops_last == last]
            self._stop([post.child for post in posts if post.child], hurry, show)

    def _stop(
        self, children: Sequence[process.ChildProcess], hurry: threading.Event, show: ShowStates
    ) -> None:
        """Stop these processes: send SIGTERM, wait until they end, at most `stop_s` or until
        `hurry` is set, and kill the remaining ones.
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
                self._note({"event": "killed", "role": child.seat.name})
                child.kill()
