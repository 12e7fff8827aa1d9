"""Checks invariant 2: a trajectory is trained at most once, on its first completion (its first
`Trajectory` record), and an annotation that a take used is the first of its (trajectory, name).

A restarted trainer repeats recorded takes without appending them again, and the takes of a fenced
trainer are void, so a trajectory appears in one valid take. Memory holds the name of each completed
trajectory.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rollstream.consumers.audit import folds
from rollstream.consumers.audit.source import TrajectoryRows
from rollstream.streams.admissible import is_usable_annotation
from rollstream.streams.records import Annotation, Take, Trajectory
from rollstream.streams.values import Address


@dataclass(slots=True)
class ExactlyOnceAudit:
    """Checks each completion that a take names against the record at that address. The caller
    applies the whole ledger before `trajectories`, and each of its records first to `ledger`, then
    here.
    """

    ledger: folds.LedgerIndex
    """The completions that takes name."""
    result: folds.InvariantResult = field(
        default_factory=lambda: folds.InvariantResult(
            2, "a trajectory is trained once, on its first completion"
        )
    )
    _firsts: set[str] = field(default_factory=set[str])
    """The trajectories of which a completion was read."""
    _ends: dict[int, int] = field(default_factory=dict[int, int])
    """The offset up to which each partition of `trajectories` was read."""
    _strangers: list[tuple[str, Address]] = field(default_factory=list[tuple[str, Address]])
    """Trajectories that a take trains although no take lists them as members of a group."""

    def apply(self, message: folds.AuditMessage) -> None:
        if message.void:
            return
        if isinstance(message.record, Take) and message.topic == "ledger":
            self._take(message.record, message.address)
        elif isinstance(message.record, Trajectory) and message.topic == "trajectories":
            self._complete(message.record, message)

    def apply_rows(self, rows: TrajectoryRows) -> None:
        """Check archived rows together; every row that may violate the invariant is applied as a
        record.
        """
        uses, names = rows.uses(self.ledger), set(rows.names)
        is_dead = np.array([finish == "dead" for finish in rows.plain("finish")], np.bool_)
        # A first completion that no take names, or that is the record that the take names, is
        # correct.
        is_plain = ~uses.is_named | (uses.is_same & ~is_dead)
        if len(names) < len(rows) or not self._firsts.isdisjoint(names) or not is_plain.all():
            for row, name in enumerate(rows.names):
                if is_plain[row] and name not in self._firsts:
                    self._firsts.add(name)
                else:
                    self.apply(rows.message(row))
        self._firsts |= names
        self._read_to(rows.partition, rows.first + len(rows))

    def finish(self, coverage: folds.Coverage) -> None:
        """Report the completions that takes name and that were not read: unchecked where `coverage`
        states that records are missing.
        """
        counts, completeness = self.result.counts, coverage["trajectories"]
        counts["trained"] = sum(self.ledger.trained.values())
        counts["completed"] = len(self._firsts)
        gone = 0
        for name, use in self.ledger.uses.items():
            if name in self._firsts:
                continue
            within = use.at.offset < self._ends.get(use.at.partition, 0)
            if completeness == "whole" or (completeness == "archived" and within):
                what = f"{_describe_use(name, use)}, but there is no completion"
                self.result.add_violation(what, "trajectories", use.at)
            else:
                gone += 1
        if gone:
            self.result.add_unchecked(f"{gone} completions that takes name are missing")
        for topic in ("trajectories", "ledger"):
            if coverage[topic] == "absent":
                self.result.add_unchecked(f"{topic} is missing")
        if coverage["ledger"] == "part":
            self.result.add_unchecked("the takes before the ledger's first kept record")
        for name, at in self._strangers:
            if folds.starts_complete(coverage["ledger"]):
                self.result.add_violation(
                    f"{name} was trained, but no take began its group", "ledger", at
                )

    def _take(self, take: Take, at: Address) -> None:
        if len({member.trajectory for member in take.members}) < len(take.members):
            names = Counter(member.trajectory for member in take.members)
            for name in (name for name, count in names.items() if count > 1):
                self.result.add_violation(f"{name} appears twice in one take", "ledger", at)
        for member in take.members:
            use = self.ledger.uses.get(member.trajectory)
            if use is None:
                self._strangers.append((member.trajectory, at))
                continue
            if use.take is not at and use.take != at:
                what = f"{member.trajectory} is trained in steps {use.step} and {take.step}"
                self.result.add_violation(what, "ledger", at)
            elif (member.at, member.hash) != (use.at, use.hash):
                what = f"{member.trajectory} is not the completion that its group began with"
                self.result.add_violation(what, "ledger", at)

    def _read_to(self, partition: int, end: int) -> None:
        # Records of open groups may come again after later records.
        self._ends[partition] = max(end, self._ends.get(partition, 0))

    def _complete(self, record: Trajectory, message: folds.AuditMessage) -> None:
        name = record.trajectory
        self._read_to(message.address.partition, message.address.offset + 1)
        if name in self._firsts:
            self.result.counts["duplicates"] += 1
            return
        self._firsts.add(name)
        use = self.ledger.uses.get(name)
        if use is None:
            return
        if use.at != message.address:
            what = f"{_describe_use(name, use)}; its first completion is this one"
            self.result.add_violation(what, message.topic, message.address)
        elif use.hash != message.hash:
            what = f"{_describe_use(name, use)} with hash {use.hash}"
            what += f"; its bytes have hash {message.hash}"
            self.result.add_violation(what, message.topic, message.address)
        elif record.group != use.group:
            what = f"{name} is of group {record.group}, but was taken for group {use.group}"
            self.result.add_violation(what, message.topic, message.address)
        elif use.step and record.finish == "dead":
            what = f"{name} is dead ({record.reason}), but was trained in step {use.step}"
            self.result.add_violation(what, message.topic, message.address)


def _describe_use(name: str, use: folds.NamedCompletion) -> str:
    verb = f"step {use.step} trained" if use.step else "a take names"
    return f"{verb} {name} at {use.at.partition}:{use.at.offset}"


AnnotationKey = tuple[str, str]
"""A trajectory, and the name of an annotation of it."""


@dataclass(slots=True)
class AnnotationAudit:
    """Checks each used annotation by address and hash. The caller applies the whole ledger before
    `annotations`. The result is that of `ExactlyOnceAudit`.
    """

    ledger: folds.LedgerIndex
    result: folds.InvariantResult
    _firsts: set[AnnotationKey] = field(default_factory=set[AnnotationKey])

    def apply(self, message: folds.AuditMessage) -> None:
        record = message.record
        if message.topic != "annotations" or not isinstance(record, Annotation):
            return
        key = (record.trajectory, record.name)
        # Annotations that the trainer refuses are ignored.
        used = self.ledger.notes.get(key)
        if used is None or key in self._firsts or not is_usable_annotation(record):
            return
        self._firsts.add(key)
        if (used.at, used.hash) != (message.address, message.hash):
            place = f"{used.at.partition}:{used.at.offset}"
            what = (
                f"a take used {record.name} of {record.trajectory} at {place}, not this first one"
            )
            self.result.add_violation(what, message.topic, message.address)

    def finish(self, coverage: folds.Coverage) -> None:
        self.result.counts["annotations used"] = len(self.ledger.notes)
        missing = self.ledger.notes.keys() - self._firsts
        if missing and coverage["annotations"] == "whole":
            for key in sorted(missing):
                used = self.ledger.notes[key]
                self.result.add_violation(
                    f"{key[1]} of {key[0]} is missing", "annotations", used.at
                )
        elif missing:
            self.result.add_unchecked(f"{len(missing)} annotations that takes name are missing")
