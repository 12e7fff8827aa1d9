"""Takes that the learner cannot compute (invariant 12, last sentence): how often one was tried, and
when it is given up. Pure folds and plans over the ledger.

A take is durable before it is trained, so without a rule a restarted trainer repeats it and dies in
it for ever. `FAILED_MAX` recorded exceptions, or `SILENT_MAX` starts that each follow the marker of
the same take directly with no step done in between, end it: every take of the update that has a
member of the failing takes' groups is superseded and those groups end dead. A `kill -9` counts only
where it falls into the computation of a retried take, and a step that is done forgets it, so a run
whose trainer is killed at random trains all of its groups.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from streams.records import (
    Configured,
    GroupClosed,
    Record,
    StepDone,
    Superseded,
    Take,
    TakeFailed,
    TakeRetried,
)

FAILED_MAX, SILENT_MAX = 3, 10
ERROR_MAX = 500  # characters of an exception in the ledger
POISONED = "poisoned"
"""How the detail of such a group's end begins."""

Place = tuple[int, int]
"""Step and update."""
Tried = tuple[int, int, tuple[int, ...]]
"""Step, update and micro-batches of takes that were tried together."""


@dataclass(slots=True)
class TakeAttempts:
    """A fold over the ledger: recorded failures and silent deaths of each take, since where it was
    read from.
    """

    failed: Counter[Tried] = field(default_factory=Counter[Tried])
    silent: Counter[Tried] = field(default_factory=Counter[Tried])
    errors: dict[Tried, str] = field(default_factory=dict[Tried, str])
    _within: Tried | None = None

    def apply(self, record: Record) -> None:
        match record:
            case TakeRetried(step=step, update=update, micro_batch=one):
                self._within = None if one is None else (step, update, (one,))
            case TakeFailed():
                tried = (record.step, record.update, record.micro_batches)
                self.failed[tried] += 1
                self.errors[tried] = record.error
                self._within = None
            case Configured():
                self.start()
            case StepDone():  # the publisher's thread appends it beside the retried takes
                self.silent.clear()
            case Take() | GroupClosed() | Superseded():
                self._within = None
            case _:
                pass

    def start(self) -> None:
        """A trainer starts: the one before ended in silence if it had just marked a take."""
        if self._within is not None:
            self.silent[self._within] += 1
        self._within = None

    def hopeless(self) -> dict[Tried, str]:
        """Takes to give up, and why."""
        found = {
            tried: f"the learner failed {count} times on it: {self.errors[tried]}"
            for tried, count in self.failed.items()
            if count >= FAILED_MAX
        }
        for tried, count in self.silent.items():
            if count >= SILENT_MAX:
                found.setdefault(tried, f"the trainer ended {count} times within it")
        return found


@dataclass(slots=True)
class Voided:
    """What `Superseded` records say: takes that nobody trains, and groups that end with them."""

    takes: dict[Place, set[int]] = field(default_factory=dict[Place, set[int]])
    poisoned: dict[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    """By group: its step, and why."""

    def apply(self, record: Superseded) -> None:
        self.takes.setdefault((record.step, record.update), set()).update(record.micro_batches)
        for group in record.poisoned:
            self.poisoned.setdefault(group, (record.step, record.detail))

    def holds(self, take: Take) -> bool:
        """Whether the take is superseded."""
        return take.micro_batch in self.takes.get((take.step, take.update), ())

    def effective(self, take: Take) -> Take:
        """The take as trainer and replay repeat it: a superseded one trains nothing and begins the
        groups that are not poisoned, whose members later takes train.
        """
        if not self.holds(take):
            return take
        left = tuple(group for group in take.groups if group.group not in self.poisoned)
        return replace(take, members=(), groups=left)

    def closings(self, closed: Iterable[int]) -> list[GroupClosed]:
        """How the poisoned groups end that are not `closed` yet."""
        known = set(closed)
        return [
            GroupClosed(group, "dead", f"{POISONED}: {why}", step)
            for group, (step, why) in self.poisoned.items()
            if group not in known
        ]


def supersede(
    takes: Mapping[Place, Sequence[Take]],
    done: Iterable[int],
    voided: Voided,
    hopeless: Mapping[Tried, str],
) -> list[Superseded]:
    """What to append for hopeless takes. A step that is done stays: it was computed once and its
    version is believed, so what fails now is this machine.
    """
    found: list[Superseded] = []
    finished = set(done)
    for (step, update, failing), why in sorted(hopeless.items()):
        living = [take for take in takes.get((step, update), ()) if not voided.holds(take)]
        group_of = {
            member.trajectory: group.group
            for take in takes.get((step, update), ())
            for group in take.groups
            for member in group.members
        }
        groups_by_take = {
            take.micro_batch: {group_of[m.trajectory] for m in take.members} for take in living
        }
        poisoned = {g for one in failing for g in groups_by_take.get(one, ())}
        if step in finished or not poisoned:
            continue
        voids = tuple(one for one, groups in groups_by_take.items() if groups & poisoned)
        record = Superseded(step, update, voids, tuple(sorted(poisoned)), why)
        voided.apply(record)
        found.append(record)
    return found


def error_text(error: BaseException) -> str:
    """An exception as the ledger holds it."""
    return f"{type(error).__name__}: {error}"[:ERROR_MAX]
