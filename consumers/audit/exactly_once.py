"""Checks invariant 2: a trajectory is trained at most once, on its first completion; an annotation
that a take used is the first of its (trajectory, name).

A restarted trainer repeats recorded takes without appending them again. So among the valid takes
(those of a fenced trainer are void) a trajectory appears once, whichever process was killed. Memory
grows with the run: it holds the name of each completed trajectory.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rollstream.consumers.audit.folds import (
    AuditMessage,
    Coverage,
    InvariantResult,
    LedgerIndex,
    NamedCompletion,
    starts_complete,
)
from rollstream.consumers.audit.source import TrajectoryRows
from rollstream.streams.admissible import is_usable_annotation
from rollstream.streams.records import Annotation, Take, Trajectory
from rollstream.streams.values import Address


@dataclass(slots=True)
class ExactlyOnceAudit:
    """Checks that each trajectory is trained once, on its first completion, and compares each
    completion that a take names with the record at that address. It must receive the ledger before
    `trajectories`, and each record of the ledger after the index `ledger` has received it.
    """

    ledger: LedgerIndex
    result: InvariantResult = field(
        default_factory=lambda: InvariantResult(
            2, "a trajectory is trained once, on its first completion"
        )
    )
    _firsts: set[str] = field(default_factory=set[str])
    _ends: dict[int, int] = field(default_factory=dict[int, int])
    """The end of the read part of each partition of `trajectories`."""
    _strangers: list[tuple[str, Address]] = field(default_factory=list[tuple[str, Address]])
    """Members of takes whose group no take began, and the address of the take."""

    def apply(self, message: AuditMessage) -> None:
        if message.void:
            return
        if isinstance(message.record, Take) and message.topic == "ledger":
            self._take(message.record, message.address)
        elif isinstance(message.record, Trajectory) and message.topic == "trajectories":
            self._complete(message.record, message)

    def apply_rows(self, rows: TrajectoryRows) -> None:
        """Check rows. A new row that matches its take, or that no take names, only adds its name to
        the completed ones; every other row is checked as a record.
        """
        uses, names = rows.uses(self.ledger), set(rows.names)
        is_dead = np.array([finish == "dead" for finish in rows.plain("finish")], np.bool_)
        is_plain = ~uses.is_named | (uses.is_same & ~is_dead)
        if len(names) < len(rows) or not self._firsts.isdisjoint(names) or not is_plain.all():
            for row, name in enumerate(rows.names):
                if is_plain[row] and name not in self._firsts:
                    self._firsts.add(name)
                else:
                    self.apply(rows.message(row))
        self._firsts |= names
        self._read_to(rows.partition, rows.first + len(rows))

    def finish(self, coverage: Coverage) -> None:
        counts, kept = self.result.counts, coverage["trajectories"]
        counts["trained"] = sum(self.ledger.trained.values())
        counts["completed"] = len(self._firsts)
        gone = 0
        for name, use in self.ledger.uses.items():
            if name in self._firsts:
                continue
            within = use.at.offset < self._ends.get(use.at.partition, 0)
            if kept == "whole" or (kept == "archived" and within):
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
            if starts_complete(coverage["ledger"]):
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
        """Advance the end of the read part. It never moves back, although records of open groups
        are received after later ones.
        """
        self._ends[partition] = max(end, self._ends.get(partition, 0))

    def _complete(self, record: Trajectory, message: AuditMessage) -> None:
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


def _describe_use(name: str, use: NamedCompletion) -> str:
    verb = f"step {use.step} trained" if use.step else "a take names"
    return f"{verb} {name} at {use.at.partition}:{use.at.offset}"


AnnotationKey = tuple[str, str]


@dataclass(slots=True)
class AnnotationAudit:
    """Checks that the annotation used by a take is the first one, at the address and with the hash
    that the ledger states. An annotation that the trainer's intake refuses is ignored. Needs the
    ledger before `annotations`; shares its result with `ExactlyOnceAudit`.
    """

    ledger: LedgerIndex
    result: InvariantResult
    _firsts: set[AnnotationKey] = field(default_factory=set[AnnotationKey])

    def apply(self, message: AuditMessage) -> None:
        record = message.record
        if message.topic != "annotations" or not isinstance(record, Annotation):
            return
        key = (record.trajectory, record.name)
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

    def finish(self, coverage: Coverage) -> None:
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
