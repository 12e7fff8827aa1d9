"""Checks invariant 1: every admitted group is open or ended exactly once, only the ledger ends
groups, and the counts in each `StepDone` agree with its other records. Memory holds the names of
each group's trajectories, and its ending.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from rollstream.consumers.audit.folds import (
    AuditMessage,
    Coverage,
    InvariantResult,
    LedgerIndex,
    starts_complete,
)
from rollstream.consumers.trainer.data.poisoned_takes import TakeAttempts
from rollstream.streams.records import Admitted, GroupClosed, StepDone, Superseded, Take
from rollstream.streams.values import Address, SettingsSince

ENDINGS = ("trained", "filtered", "expired", "dead")  # a group has one of these, or is open


class Admission(msgspec.Struct, frozen=True, gc=False):
    """The admission of a group, whose record is at `offset` of its partition; `names` are its
    trajectories.
    """

    names: tuple[str, ...]
    wave: int
    deadline_s: float
    prompt: Address
    offset: int
    needed: int = 0
    settings: SettingsSince | None = None


class GroupEnding(msgspec.Struct, frozen=True, gc=False):
    """One of `ENDINGS`, its step, and the address of its record."""

    ending: str
    step: int
    at: Address


@dataclass(slots=True)
class GroupAudit:
    """Checks that every admitted group ends at most once. `admissions` must be applied before the
    ledger.

    A group ends as trained with the take that begins it, or by a `GroupClosed`. Only `Superseded`
    can undo a trained ending: the learner cannot compute some takes of a step that is not done. Its
    `poisoned` groups, those with a trajectory in such a take, then end dead.
    """

    ledger: LedgerIndex
    """The takes and steps so far; the caller applies each record to it first."""
    result: InvariantResult = field(
        default_factory=lambda: InvariantResult(1, "every admitted group ends once")
    )
    admitted: dict[int, Admission] = field(default_factory=dict[int, Admission])
    ended: dict[int, GroupEnding] = field(default_factory=dict[int, GroupEnding])
    """Both by the group's number."""
    _unknown: list[tuple[int, str, Address]] = field(default_factory=list[tuple[int, str, Address]])
    """Groups that ended and were not admitted: number, ending and address."""
    _by_step: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    """Counts of the ledger's records by step and name, as a `StepDone` states them."""
    _done: list[tuple[StepDone, Address]] = field(default_factory=list[tuple[StepDone, Address]])
    _unfounded: list[tuple[str, Address]] = field(default_factory=list[tuple[str, Address]])
    """Takes that were superseded against the trainer's rule: description and address."""
    attempts: TakeAttempts = field(default_factory=TakeAttempts)
    """The failures of each take, counted as the trainer does."""
    _sizes: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])
    """Members of each take of a step that is not done; by step, update, micro-batch."""

    def apply(self, message: AuditMessage) -> None:
        if message.void:
            return
        record = message.record
        if record is not None and message.topic == "ledger":
            if isinstance(record, Superseded):
                self._supersede(record, message.address)
            self.attempts.apply(record)
        if isinstance(record, Take | GroupClosed | StepDone) and message.topic != "ledger":
            self.result.add_violation(
                "only the ledger may end a group", message.topic, message.address
            )
            return
        match record:
            case Admitted() if message.topic == "admissions":
                self._admit(record, message.address)
            case Take():
                self._take(record, message.address)
            case GroupClosed():
                self._by_step[record.step, record.reason] += 1
                self._end(record.group, record.reason, record.step, message.address)
            case StepDone():
                self._done.append((record, message.address))
                self._sizes = {key: n for key, n in self._sizes.items() if key[0] > record.step}
            case _:
                pass

    def finish(self, coverage: Coverage) -> None:
        """Run the checks that need all records; where `coverage` states that they are missing, a
        check is unchecked or left out.
        """
        self._count()
        for group, ending, at in self._unknown:
            if coverage["admissions"] == "whole":
                self.result.add_violation(
                    f"group {group}: {ending}, but never admitted", "ledger", at
                )
        if self._unknown and coverage["admissions"] != "whole":
            few = f"{len(self._unknown)} ended groups whose admission is missing"
            self.result.add_unchecked(few)
        for topic in ("admissions", "ledger"):
            if not starts_complete(coverage[topic]):
                is_missing = coverage[topic] == "absent"
                defect = "missing" if is_missing else "not kept from its first record to its last"
                self.result.add_unchecked(f"{topic} is {defect}")
        if starts_complete(coverage["ledger"]):
            for what, at in self._unfounded:
                self.result.add_violation(what, "ledger", at)
        self._check_trained()
        for done, at in self._done:
            if self.ledger.is_whole(done.step, ledger_whole=starts_complete(coverage["ledger"])):
                self._check_counts(done, at)

    def is_final(self, group: int) -> bool:
        """Whether the ledger ends the group in a way that no later record can undo."""
        end = self.ended.get(group)
        # The takes of a step that is not done may still be superseded.
        return end is not None and (end.ending != "trained" or end.step in self.ledger.versions)

    def _admit(self, record: Admitted, at: Address) -> None:
        if record.group in self.admitted:
            self.result.add_violation(
                f"group {record.group} is admitted a second time", "admissions", at
            )
        self.admitted.setdefault(
            record.group,
            Admission(
                record.trajectories,
                record.wave,
                record.deadline_s,
                record.prompt,
                at.offset,
                record.needed,
                record.settings,
            ),
        )

    def _take(self, take: Take, at: Address) -> None:
        self._by_step[take.step, "takes"] += 1
        self._by_step[take.step, "trained"] += len(take.members)
        self._sizes[take.step, take.update, take.micro_batch] = len(take.members)
        for begun in take.groups:
            self._by_step[take.step, "groups"] += 1
            self._end(begun.group, "trained", take.step, at)
            admission = self.admitted.get(begun.group)
            if admission is not None and admission.needed:
                self.result.counts["released"] += len(admission.names) - len(begun.members)
            for member in begun.members:
                if admission is not None and member.trajectory not in admission.names:
                    what = f"group {begun.group} was not admitted with {member.trajectory}"
                    self.result.add_violation(what, "ledger", at)

    def _supersede(self, record: Superseded, at: Address) -> None:
        step, update, voids = record.step, record.update, record.micro_batches
        # A trainer supersedes as it starts: a start can show a silent death.
        self.attempts.start()
        # Takes may be superseded only after enough failures, by the trainer's own rule.
        hopeless = self.attempts.takes_to_give_up()
        if not any((step, update) == tried[:2] and {*tried[2]} <= {*voids} for tried in hopeless):
            what = f"take {voids} of step {step} is superseded, but had not failed often enough"
            self._unfounded.append((what, at))
        for micro_batch in voids:
            size = self._sizes.pop((step, update, micro_batch), None)
            if size is None:
                what = f"take {micro_batch} of step {step} is superseded, but is not open"
                self._unfounded.append((what, at))
                continue
            self._by_step[step, "takes"] -= 1
            self._by_step[step, "trained"] -= size
        takes = ", ".join(map(str, voids))
        groups = ", ".join(map(str, record.poisoned))
        what = f"ledger {at.partition}:{at.offset}: step {step}, update {update}: take {takes}"
        what = f"{what} superseded, group {groups} poisoned: {record.detail}"
        self.result.add_note(what, "decisions to supersede")
        self.result.counts["takes superseded"] += len(voids)
        for group in record.poisoned:
            end = self.ended.get(group)
            if end is not None and end.ending == "trained":
                del self.ended[group]
                self._by_step[step, "groups"] -= 1

    def _end(self, group: int, ending: str, step: int, at: Address) -> None:
        before = self.ended.get(group)
        if before is not None:
            what = f"group {group}: {ending} in step {step}"
            what = f"{what}, but {before.ending} in step {before.step}"
            self.result.add_violation(f"{what} already", "ledger", at)
            return
        self.ended[group] = GroupEnding(ending, step, at)
        if group not in self.admitted:
            self._unknown.append((group, ending, at))

    def _count(self) -> None:
        endings = Counter(end.ending for end in self.ended.values())
        self.result.counts["admitted"] = len(self.admitted)
        for ending in ENDINGS:
            self.result.counts[ending] = endings[ending]
        self.result.counts["open"] = len(self.admitted.keys() - self.ended.keys())
        self.result.counts["steps"] = len({done.step for done, _ in self._done})

    def _check_trained(self) -> None:
        finished = {done.step for done, _ in self._done}
        for group, end in self.ended.items():
            is_done = end.ending == "trained" and end.step in finished
            # Of every group that a take began, a finished step trains at least one member.
            if is_done and not self.ledger.trained_of[group]:
                what = f"group {group} was begun in step {end.step}, but none of it was trained"
                self.result.add_violation(what, "ledger", end.at)

    def _check_counts(self, done: StepDone, at: Address) -> None:
        stated = {**{name: done.counts.get(name, 0) for name in ENDINGS}, "takes": done.takes}
        stated["groups"] = done.counts.get("groups", 0)
        for name, number in stated.items():
            ledger_count = self._by_step[done.step, name]
            if number != ledger_count:
                what = f"step {done.step} states {number} {name}, the ledger holds {ledger_count}"
                self.result.add_violation(what, "ledger", at)
