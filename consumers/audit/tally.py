"""The result of one line of an audit: counts, violations with the places of the first ones, and
what could not be checked.

Everything is counted, but only the first few violations keep their places, so a log full of
violations costs no more memory than a correct one.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from rollstream.streams.values import Address

OFFENDERS_MAX = 10
UNCHECKED_MAX = 10

ResultState = Literal["kept", "violated", "unchecked"]


@dataclass(frozen=True, slots=True)
class Offender:
    """One violation: its place in a topic or its key in the store, and a description."""

    what: str
    topic: str = ""
    at: Address | None = None
    key: str = ""

    @property
    def where(self) -> str:
        if self.at is None:
            return self.key or self.topic
        return f"{self.topic} {self.at.partition}:{self.at.offset}"


@dataclass(slots=True)
class InvariantResult:
    """`number` is the number of the invariant; 0 is the line on the completeness of the data."""

    number: int
    title: str
    counts: Counter[str] = field(default_factory=Counter[str])
    violations: int = 0
    offenders: list[Offender] = field(default_factory=list[Offender])
    unchecked: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    """Observations that are no violations."""
    stored: int = 0
    """Violations of objects in the store."""

    def offend(
        self, what: str, topic: str = "", at: Address | None = None, *, key: str = ""
    ) -> None:
        """Record one violation."""
        self.violations += 1
        self.stored += bool(key)
        if len(self.offenders) < OFFENDERS_MAX:
            self.offenders.append(Offender(what, topic, at, key))

    def cannot(self, what: str) -> None:
        """Record something that could not be checked; repeats are ignored."""
        if what not in self.unchecked and len(self.unchecked) < UNCHECKED_MAX:
            self.unchecked.append(what)

    def withhold(self, why: str) -> None:
        """Turn the violations in the log into notes; violations of objects in the store remain."""
        self.cannot(why)
        self.notes += [f"not judged: {o.where}: {o.what}" for o in self.offenders if not o.key]
        self.offenders = [offender for offender in self.offenders if offender.key]
        self.violations = self.stored

    @property
    def state(self) -> ResultState:
        if self.violations:
            return "violated"
        return "unchecked" if self.unchecked else "kept"
