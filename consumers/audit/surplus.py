"""Checks which completions of a group with redundancy count (invariants 1 and 2): the first that
end, in the order of their partition. Memory: a name per member of such groups, a number per group.
"""

from collections import Counter
from dataclasses import dataclass, field

from rollstream.consumers.audit import folds
from rollstream.consumers.audit.groups import GroupAudit
from rollstream.consumers.audit.source import TrajectoryRows
from rollstream.consumers.audit.trainer_reads import TrainerReads
from rollstream.streams.admissible import is_group_full
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Address


@dataclass(slots=True)
class SurplusAudit:
    """Checks that a take names no completion after the last one that its group needed. The caller
    applies the whole ledger before `trajectories`. The result is that of `ExactlyOnceAudit`.
    """

    groups: GroupAudit
    ledger: folds.LedgerIndex
    reads: TrainerReads
    result: folds.InvariantResult
    _members: set[str] = field(default_factory=set[str])
    """The counted members of groups with redundancy."""
    _living: Counter[int] = field(default_factory=Counter[int])
    _arrived: Counter[int] = field(default_factory=Counter[int])
    """Members by group: those that are not dead, and all."""
    _full: dict[int, int] = field(default_factory=dict[int, int])
    """Group → offset of the member that completed it."""

    def apply(self, message: folds.AuditMessage) -> None:
        record = message.record
        if message.void or message.topic != "trajectories" or not isinstance(record, Trajectory):
            return
        group, name, at = record.group, record.trajectory, message.address
        use = self.ledger.uses.get(name)
        if not self._needed(group) or use is None or use.at != at or name in self._members:
            return
        self._members.add(name)
        if group in self._full:
            needed = self._needed(group)
            what = f"a take names {name}, but {needed} living ones of its group came before it"
            self.result.add_violation(what, message.topic, at)
            return
        self._arrived[group] += 1
        self._living[group] += record.finish != "dead"
        samples = len(self.groups.admitted[group].names)
        counted = self._living[group], self._arrived[group]
        if is_group_full(samples, self._needed(group), *counted):
            self._full[group] = at.offset

    def apply_rows(self, rows: TrajectoryRows) -> None:
        for row, group in enumerate(rows.groups):
            if self._needed(group):
                self.apply(rows.message(row))

    def finish(self, coverage: folds.Coverage) -> None:
        """Nothing is left to check."""

    def is_surplus(self, group: int, at: Address) -> bool:
        # The group was complete before.
        return at.offset > self._full.get(group, at.offset)

    def _needed(self, group: int) -> int:
        admission = self.groups.admitted.get(group)
        # 0: all completions count.
        return 0 if admission is None or group not in self.reads.begun else admission.needed
