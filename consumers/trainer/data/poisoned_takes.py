"""Decides when a take that the learner cannot compute is given up: a `Superseded` record excludes
it and ends its groups (invariant 12); otherwise each restarted trainer would die in it
(docs/explanation/exactly-once.md). Without I/O.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from rollstream.errors import RollstreamError
from rollstream.streams import records

FAILED_MAX, SILENT_MAX = 3, 10  # exceptions, and silent deaths, after which a take is given up
ERROR_MAX = 500  # characters of an exception in the ledger
POISONED = "poisoned"
"""First word of the detail in a poisoned group's `GroupClosed`."""

UpdateKey = tuple[int, int]
"""Step and update."""
TakeKey = tuple[int, int, tuple[int, ...]]
TakeNumber = tuple[int, int, int]
"""Step, update and micro-batch of one take."""


def number_of(take: records.Take) -> TakeNumber:
    return take.step, take.update, take.micro_batch


@dataclass(slots=True)
class TakeAttempts:
    """A fold over the ledger. A death is silent if the start after it directly follows the marker
    of the take (`TakeRetried`), so a `kill -9` counts only within the computation of a retried
    take.
    """

    failed: Counter[TakeKey] = field(default_factory=Counter[TakeKey])
    silent: Counter[TakeKey] = field(default_factory=Counter[TakeKey])
    errors: dict[TakeKey, str] = field(default_factory=dict[TakeKey, str])
    out_of_memory: Counter[TakeNumber] = field(default_factory=Counter[TakeNumber])
    """Of each take's failures: ranks repeat it in parts (`sharded/learner.py`)."""
    _computing: TakeKey | None = None

    def apply(self, record: records.Record) -> None:
        match record:
            case records.TakeRetried(step=step, update=update, micro_batch=micro_batch):
                self._computing = None if micro_batch is None else (step, update, (micro_batch,))
            case records.TakeFailed():
                tried = (record.step, record.update, record.micro_batches)
                self.failed[tried] += 1
                self.errors[tried] = record.error
                if record.out_of_memory:
                    self.out_of_memory.update(
                        (*tried[:2], number) for number in record.micro_batches
                    )
                self._computing = None
            case records.Configured():
                self.start()
            case records.StepDone():  # the publisher's thread appends it beside the retried takes
                # So a run whose trainer is killed at random trains all its groups.
                self.silent.clear()
            case records.Take() | records.GroupClosed() | records.Superseded():
                self._computing = None
            case _:
                pass

    def start(self) -> None:
        """The predecessor died silently if the last record is the marker of a take."""
        if self._computing is not None:
            self.silent[self._computing] += 1
        self._computing = None

    def takes_to_give_up(self) -> dict[TakeKey, str]:
        """Returns the takes to give up with reasons: `FAILED_MAX` recorded exceptions, or
        `SILENT_MAX` silent deaths without a step done in between.
        """
        reasons = {
            tried: f"the learner failed {count} times on it: {self.errors[tried]}"
            for tried, count in self.failed.items()
            if count >= FAILED_MAX
        }
        for tried, count in self.silent.items():
            if count >= SILENT_MAX:
                reasons.setdefault(tried, f"the trainer ended {count} times within it")
        return reasons


@dataclass(slots=True)
class SupersededTakes:
    """A fold over the `Superseded` records: takes that are not trained, and the groups that end
    with them.
    """

    takes: dict[UpdateKey, set[int]] = field(default_factory=dict[UpdateKey, set[int]])
    poisoned: dict[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    """Group → its step and the reason."""

    def apply(self, record: records.Superseded) -> None:
        self.takes.setdefault((record.step, record.update), set()).update(record.micro_batches)
        for group in record.poisoned:
            self.poisoned.setdefault(group, (record.step, record.detail))

    def is_superseded(self, take: records.Take) -> bool:
        return take.micro_batch in self.takes.get((take.step, take.update), ())

    def effective(self, take: records.Take) -> records.Take:
        """The take as trainer and replay repeat it: a superseded one trains no sample."""
        if not self.is_superseded(take):
            return take
        # It still begins its groups that are not poisoned: later takes train their members.
        living_groups = tuple(group for group in take.groups if group.group not in self.poisoned)
        return replace(take, members=(), groups=living_groups)

    def closings(self, closed: Iterable[int]) -> list[records.GroupClosed]:
        """Returns records that close the poisoned groups that are not in `closed`."""
        closed_groups = set(closed)
        return [
            records.GroupClosed(group, "dead", f"{POISONED}: {why}", step)
            for group, (step, why) in self.poisoned.items()
            if group not in closed_groups
        ]


def plan_superseded(
    takes: Mapping[UpdateKey, Sequence[records.Take]],
    done: Iterable[int],
    superseded: SupersededTakes,
    hopeless: Mapping[TakeKey, str],
) -> list[records.Superseded]:
    """Returns the records for hopeless takes, and applies them to `superseded`: all groups with a
    member in a failing take end dead, and every take of the update with a member of these groups is
    superseded.
    """
    new_records: list[records.Superseded] = []
    finished = set(done)
    for (step, update, failing), why in sorted(hopeless.items()):
        living = [
            take for take in takes.get((step, update), ()) if not superseded.is_superseded(take)
        ]
        group_of = {
            member.trajectory: group.group
            for take in takes.get((step, update), ())
            for group in take.groups
            for member in group.members
        }
        groups_by_take = {
            take.micro_batch: {group_of[m.trajectory] for m in take.members} for take in living
        }
        poisoned = {g for micro_batch in failing for g in groups_by_take.get(micro_batch, ())}
        # A finished step was computed once and its version is believed, so this machine causes the
        # failures.
        if step in finished or not poisoned:
            continue
        voids = tuple(
            micro_batch for micro_batch, groups in groups_by_take.items() if groups & poisoned
        )
        record = records.Superseded(step, update, voids, tuple(sorted(poisoned)), why)
        superseded.apply(record)
        new_records.append(record)
    return new_records


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_MAX]


class ComputeFailed(RollstreamError, RuntimeError):
    """The learner failed on `micro_batches`, counted from 0 within the step in the order of
    submission; several where they are computed together.
    """

    def __init__(self, micro_batches: tuple[int, ...], cause: BaseException) -> None:
        numbers = ", ".join(map(str, micro_batches))
        super().__init__(
            f"micro-batch {numbers} of the step cannot be computed: {type(cause).__name__}: {cause}"
        )
        self.micro_batches = micro_batches
