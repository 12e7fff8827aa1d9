"""One thread of many at a time, in an order drawn from a seed, under a clock that only this file
moves: the same seed gives the same run.

A task is a thread that holds the baton between two *points* (the calls of its bus and store, and
its waits). At a point the baton may go to another task that is ready; when none is, the clock jumps
to the next one's waking. A process is a few tasks that die together: a dead task raises `Crashed`
at its next point, before it can write anything.
"""

import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

SWITCHES_MAX = 400_000  # of one run: a run that never ends is a failure, not a hang
ANSWER_S = 300.0  # real seconds that a task may hold the baton: a busy machine is no fault


class Crashed(BaseException):
    """The process is gone; nothing of it may go on."""


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
    """A writer of the product holds a lock while it appends: others of its process would wait for
    it with the baton in their hand.
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
    """`switch` is the chance that a point passes the baton on. The thread that makes it is the
    first task.
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
        """Another task of the process; it runs when it gets the baton."""
        task = Task(process, self.now_s)
        process.tasks.append(task)
        self._tasks.append(task)
        threading.Thread(target=self._run, args=(task, work), daemon=True).start()

    def point(self) -> None:
        """The holder may be interrupted here."""
        if self.random.random() < self._switch:
            self._pass_on(self._held_by)
        self._check(self._held_by)

    def wait(self, seconds: float) -> None:
        """The holder does nothing for this long."""
        task = self._held_by
        task.wake_s = self.now_s + seconds
        self._pass_on(task)
        self._check(task)

    @contextmanager
    def appending(self) -> Generator[None]:
        """The holder's process does nothing else meanwhile; other processes do."""
        process = self._held_by.process
        process.appending = self._held_by
        try:
            yield
        finally:
            process.appending = None

    def kill(self, process: Process) -> None:
        """Its tasks raise `Crashed` when they get the baton next; the caller may be one of them."""
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
    """What a role's loop takes for its `threading.Event`; waiting passes the baton on."""

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
