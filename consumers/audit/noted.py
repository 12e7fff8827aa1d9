"""Invariant 2, for annotations: the annotation that a take used is the first of its (trajectory,
name), at the address and with the hash that the ledger states.

An annotation without finite numbers and without a reason is ignored, as at the trainer's intake.
"""

from dataclasses import dataclass, field

import numpy as np

from rollstream.consumers.audit.seen import Coverage, AuditMessage
from rollstream.consumers.audit.folds import LedgerIndex
from rollstream.consumers.audit.tally import InvariantResult
from rollstream.streams.records import Annotation

AnnotationKey = tuple[str, str]


@dataclass(slots=True)
class AnnotationAudit:
    """Needs the ledger before `annotations`; shares its result with `Once`."""

    taken: LedgerIndex
    tally: InvariantResult
    _firsts: set[AnnotationKey] = field(default_factory=set[AnnotationKey])

    def apply(self, seen: AuditMessage) -> None:
        record = seen.record
        if seen.topic != "annotations" or not isinstance(record, Annotation):
            return
        key = (record.trajectory, record.name)
        used = self.taken.notes.get(key)
        if used is None or key in self._firsts or not is_counted_at_intake(record):
            return
        self._firsts.add(key)
        if (used.at, used.hash) != (seen.address, seen.hash):
            place = f"{used.at.partition}:{used.at.offset}"
            what = (
                f"a take used {record.name} of {record.trajectory} at {place}, not this first one"
            )
            self.tally.offend(what, seen.topic, seen.address)

    def finish(self, coverage: Coverage) -> None:
        self.tally.counts["annotations used"] = len(self.taken.notes)
        missing = self.taken.notes.keys() - self._firsts
        if missing and coverage["annotations"] == "whole":
            for key in sorted(missing):
                used = self.taken.notes[key]
                self.tally.offend(f"{key[1]} of {key[0]} is missing", "annotations", used.at)
        elif missing:
            self.tally.cannot(f"{len(missing)} annotations that takes name are missing")


def is_counted_at_intake(record: Annotation) -> bool:
    """Whether the annotation counts at the trainer's intake: finite numbers, or a reason for their
    absence.
    """
    if record.reason:
        return True
    return len(record.values) > 0 and bool(np.isfinite(record.values).all())
