"""Crash plans: every write of every process passes here, before it is made and again before it
returns.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from testbed.stepped.baton import Baton, Crashed, Process

Result = TypeVar("Result")
WRITE_S_MAX = 0.02  # duration of a write
Side = Literal["before", "after"]


class Plan:
    """Kills nothing; counts the boundaries of a run."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.writes = 0

    def passes(self, side: Side, process: Process, kind: str) -> None:
        """Raises `Crashed` here, or returns."""
        if side == "before":
            self.kinds[kind] += 1
            self.writes += 1


class AllAtOnce(Plan):
    """Every process dies at one side of one write, counted from 0."""

    def __init__(self, baton: Baton, processes: Callable[[], list[Process]]) -> None:
        super().__init__()
        self._baton, self._processes = baton, processes
        self.at, self.side = -1, "before"
        self.killed = ""

    def passes(self, side: Side, process: Process, kind: str) -> None:
        super().passes(side, process, kind)
        if (self.writes - 1, side) == (self.at, self.side) and not self.killed:
            self.killed = f"{process.name}: {kind}"
            for victim in self._processes():
                self._baton.kill(victim)
            raise Crashed


@dataclass
class Rates:
    """Probabilities per write."""

    kill: float
    freeze: float
    all_at_once: float


class Drawn(Plan):
    """The writing process is killed or frozen with these probabilities, at most `most` times a
    run.
    """

    def __init__(
        self, baton: Baton, processes: Callable[[], list[Process]], rates: Rates, most: int
    ) -> None:
        super().__init__()
        self._baton, self._processes, self._rates, self._left = baton, processes, rates, most
        self.happened: Counter[str] = Counter()

    def passes(self, side: Side, process: Process, kind: str) -> None:
        super().passes(side, process, kind)
        drawn, rates = self._baton.random.random() * 2, self._rates  # a write has two sides
        if self._left <= 0 or drawn >= rates.kill + rates.freeze + rates.all_at_once:
            return
        self._left -= 1
        if drawn < rates.kill:
            self.happened["killed"] += 1
            self._baton.kill(process)
            raise Crashed
        if drawn < rates.kill + rates.freeze:
            self.happened["frozen"] += 1
            process.frozen_s = self._baton.now_s + self._baton.random.uniform(0.5, 20.0)
            self._baton.wait(0.0)
            return
        self.happened["all killed"] += 1
        for victim in self._processes():
            self._baton.kill(victim)
        raise Crashed


class WriteGate(Protocol):
    """The methods that a store or a bus calls before a read, and to make a write."""

    def look(self) -> None: ...

    def write(self, kind: str, make: Callable[[], Result]) -> Result: ...


@dataclass
class Gate:
    """One process's gate to bus and store."""

    baton: Baton
    process: Process
    plan: Plan = field(default_factory=Plan)

    def look(self) -> None:
        """Called before a read: other tasks may run here."""
        self.baton.point()

    def write(self, kind: str, make: Callable[[], Result]) -> Result:
        """Makes the write unless the process dies before it; its result may be lost."""
        self.baton.wait(self.baton.random.uniform(0.0, WRITE_S_MAX))
        self.plan.passes("before", self.process, kind)
        made = make()
        self.plan.passes("after", self.process, kind)
        self.baton.point()
        return made
