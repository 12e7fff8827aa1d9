"""What one line of an audit says: counts, violations with their first places, what was not checked.

Everything is counted; of violations only the first few are kept with their places, so a log that is
wrong everywhere costs no more memory than one that is right.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from streams.records import Address

OFFENDERS_MAX = 10
UNCHECKED_MAX = 10

State = Literal["kept", "violated", "unchecked"]


@dataclass(frozen=True, slots=True)
class Offender:
    """One violation: where in a topic or under which key of the store, and what is wrong there."""

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
class Tally:
    """`number` is the invariant's in DESIGN.md; 0 is the line about what was read."""

    number: int
    title: str
    counts: Counter[str] = field(default_factory=Counter[str])
    violations: int = 0
    offenders: list[Offender] = field(default_factory=list[Offender])
    unchecked: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    """Worth knowing, and no violation."""
    stored: int = 0
    """Violations of objects of the store."""

    def offend(
        self, what: str, topic: str = "", at: Address | None = None, *, key: str = ""
    ) -> None:
        """One violation more."""
        self.violations += 1
        self.stored += bool(key)
        if len(self.offenders) < OFFENDERS_MAX:
            self.offenders.append(Offender(what, topic, at, key))

    def cannot(self, what: str) -> None:
        """Something that could not be checked; said once."""
        if what not in self.unchecked and len(self.unchecked) < UNCHECKED_MAX:
            self.unchecked.append(what)

    def withhold(self, why: str) -> None:
        """What the log seems to violate is not judged; objects of the store are as they are."""
        self.cannot(why)
        self.notes += [f"not judged: {o.where}: {o.what}" for o in self.offenders if not o.key]
        self.offenders = [offender for offender in self.offenders if offender.key]
        self.violations = self.stored

    @property
    def state(self) -> State:
        if self.violations:
            return "violated"
        return "unchecked" if self.unchecked else "kept"
