"""Runs one thread of many at a time, in an order drawn from a seed, under a clock that only this
module moves: the same seed gives the same run.

A task is a thread that holds the baton between two *points* (the calls of its bus and store, and
its waits). At a point the baton may pass to another ready task; when none is ready, the clock jumps
to the earliest wake-up time. A process is a group of tasks that die together: a dead task raises
`Crashed` at its next point, before it can write anything.
"""

import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

SWITCHES_MAX = 400_000  # of one run: a run that never ends fails in place of hanging
ANSWER_S = 300.0  # real seconds that a task may hold the baton: a busy machine is no fault


class Crashed(BaseException):
    """The process was killed; none of its tasks may continue."""


class Stuck(Exception):
    """The run did not end within its bound."""


@dataclass(eq=False)
class Process:
    """`frozen_s` is the time until which it gets no turn (SIGSTOP)."""

    name: str
    term: int = 0
    dead: bool = False
    frozen_s: float = 0.0
    tasks: list["Task"] = field(default_factory=list["Task"])
    error: BaseException | None = None
    appending: "Task | None" = None
    """Holds the baton through a block. A writer of the product holds a lock while it appends;
    others of its process that wait for the lock would hold the baton.
    """

    @property
    def ended(self) -> bool:
        return all(task.ended for task in self.tasks)


@dataclass(eq=False)
class Task:
    process: Process
    wake_s: float = 0.0
    ended: bool = False
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Baton:
    """`switch` is the probability that a point passes the baton on. The thread that creates it is
    the first task.
    """

    def __init__(self, seed: int, switch: float = 0.2) -> None:
        self.random = random.Random(seed)
        self.now_s = 1.0
        self._switch = switch
        self._switches = 0
        self._first = Task(Process("supervisor"))
        self._tasks = [self._first]
        self._held_by = self._first

    def clock(self) -> float:
        return self.now_s

    def start(self, process: Process, work: Callable[[], None]) -> None:
        """Adds a task of the process; it runs when it gets the baton."""
        task = Task(process, self.now_s)
        process.tasks.append(task)
        self._tasks.append(task)
        threading.Thread(target=self._run, args=(task, work), daemon=True).start()

    def point(self) -> None:
        """A point: the holder may be interrupted here."""
        if self.random.random() < self._switch:
            self._pass_on(self._held_by)
        self._check(self._held_by)

    def wait(self, seconds: float) -> None:
        """The holder sleeps for so long."""
        task = self._held_by
        task.wake_s = self.now_s + seconds
        self._pass_on(task)
        self._check(task)

    @contextmanager
    def appending(self) -> Generator[None]:
        """The holder's whole process sleeps meanwhile; other processes run."""
        process = self._held_by.process
        process.appending = self._held_by
        try:
            yield
        finally:
            process.appending = None

    def kill(self, process: Process) -> None:
        """Kills a process: its tasks raise `Crashed` when they next get the baton; the caller may
        be one of them.
        """
        process.dead, process.frozen_s = True, 0.0
        for task in process.tasks:
            task.wake_s = 0.0

    def _run(self, task: Task, work: Callable[[], None]) -> None:
        task.go.acquire()
        try:
            self._check(task)
            work()
        except Crashed:
            pass
        except BaseException as error:  # noqa: BLE001  the supervisor looks at it
            task.process.error = task.process.error or error
        task.ended = True
        self._tasks.remove(task)
        self._give(self._next())

    def _pass_on(self, task: Task) -> None:
        chosen = self._next()
        if chosen is not task:
            self._give(chosen)
            if not task.go.acquire(timeout=ANSWER_S if task is self._first else None):
                raise Stuck(f"{self._held_by.process.name} kept the baton for {ANSWER_S:g} s")

    def _give(self, task: Task) -> None:
        self._held_by = task
        task.go.release()

    def _next(self) -> Task:
        self._switches += 1
        if self._switches > SWITCHES_MAX:
            return self._first
        free = [t for t in self._tasks if t.process.appending in (None, t)]
        wakes = [max(t.wake_s, t.process.frozen_s) for t in free]
        self.now_s = max(self.now_s, min(wakes))
        ready = [t for t, at in zip(free, wakes, strict=True) if at <= self.now_s]
        return ready[int(self.random.random() * len(ready))]

    def _check(self, task: Task) -> None:
        if task.process.dead:
            raise Crashed
        if task is self._first and self._switches > SWITCHES_MAX:
            raise Stuck(f"not done after {SWITCHES_MAX:,} turns, at {self.now_s:.1f} s")


class Stop:
    """Stands in for a role's `threading.Event`; waiting passes the baton on."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._baton.wait(timeout or 0.0)
        return self._set
