"""Invariant 1, for open groups: the trainer skips none of them silently.

At each take the trainer has considered every group whose completions and annotations were all read,
or whose deadline has passed. By its rule it closes such a group before the take, or it may train
it, and then `oldest` takes it before groups of newer versions. A group is overdue at the last take
if the steps of that term, from after the first take that began a group admitted no earlier to
before the last take, took longer than its deadline. Their own durations are added up; no clocks are
compared.

Rules of choice other than `oldest` may let a group wait; a group above `max_lag` is closed in any
case.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rollstream.consumers.audit.folds import LedgerIndex
from rollstream.consumers.audit.groups import Admission, GroupAudit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.audit.trainer_reads import ReadBounds, TakeRead, TrainerReads, is_within
from rollstream.consumers.trainer.data.prepare import PreparedGroup, prepare_group
from rollstream.consumers.trainer.data.sample import is_annotated
from rollstream.streams.records import Annotation, Trajectory
from rollstream.streams.values import Address

RECENT_STEPS = 3  # a group that is skipped for ever is skipped in the last steps too


@dataclass(slots=True)
class GroupRecords:
    """A group's first completions and annotations, as far as the audit has read them."""

    names: tuple[str, ...]
    arrived: dict[str, tuple[Trajectory, Address]] = field(
        default_factory=dict[str, tuple[Trajectory, Address]]
    )
    noted: dict[tuple[str, str], tuple[Annotation, Address]] = field(
        default_factory=dict[tuple[str, str], tuple[Annotation, Address]]
    )

    def before(self, trajectories: ReadBounds, annotations: ReadBounds) -> "GroupRecords":
        """The records within the bounds that a trainer had read."""
        arrived = {n: one for n, one in self.arrived.items() if _was_read(trajectories, one[1])}
        noted = {k: one for k, one in self.noted.items() if _was_read(annotations, one[1])}
        return GroupRecords(self.names, arrived, noted)

    def records(self) -> list[Trajectory]:
        return [record for record, _ in self.arrived.values()]

    def notes(self) -> dict[tuple[str, str], Annotation]:
        """By (trajectory, name), of the completions that were read."""
        return {key: note for key, (note, _) in self.noted.items() if key[0] in self.arrived}

    def is_complete(self, names: tuple[str, ...]) -> bool:
        """Whether all completions were read, and for each living one all needed annotations."""
        return len(self.arrived) == len(self.names) and all(
            is_annotated(record, names, self.noted) for record in self.records()
        )


@dataclass(slots=True)
class OpenGroupCheck:
    """Checks the open groups; `oldest` has the smallest version of each group that a recent take
    began.
    """

    groups: GroupAudit
    reads: TrainerReads
    policy: AuditPolicy
    oldest: Mapping[int, int]
    ledger: LedgerIndex

    def check(self, held: Mapping[int, GroupRecords]) -> None:
        """Check these groups, which the ledger does not end."""
        takes = self.reads.last_term()
        if not takes or self.policy.rule is None:
            return
        for group, one in held.items():
            admission = self.groups.admitted.get(group)
            wrong = "" if admission is None else self._wrong(group, admission, one, takes)
            if wrong and admission is not None:
                at = Address(0, admission.offset)
                self.groups.tally.add_violation(f"group {group} is open: {wrong}", "admissions", at)

    def _wrong(
        self, group: int, admission: Admission, held: GroupRecords, takes: list[TakeRead]
    ) -> str:
        last = takes[-1]
        looked = self._looked_at(admission, held, takes, last)
        if looked is None:
            return ""
        if looked.ending:
            return f"step {last.step} was trained after the rule made the group {looked.ending}"
        if self.policy.choose != "oldest":
            return ""
        key = _choice_key(group, looked)
        for taken in recent_takes(takes):
            for later in (g for g, i in self.reads.begun.items() if self.reads.takes[i] is taken):
                version = self.oldest.get(later)
                if version is None or (version, later) <= key:
                    continue
                if self._looked_at(admission, held, takes, taken) is not None:
                    return f"step {taken.step} took group {later} of version {version} first"
        return ""

    def _looked_at(
        self, admission: Admission, held: GroupRecords, takes: list[TakeRead], take: TakeRead
    ) -> PreparedGroup | None:
        """The rule's decision on the group at this take; None if the group waited, or may have
        waited.
        """
        rule = self.policy.rule
        assert rule is not None
        had = held.before(take.trajectories, take.annotations)
        if not had.is_complete(rule.names):
            is_known = take.exact or not held.arrived
            if not is_known or not self._is_overdue(admission, takes, take):
                return None
        group = admission.prompt.offset  # any number: only the decision is used
        believed = self.ledger.believed.up_to(take.believed)
        return prepare_group(group, had.records(), had.notes(), rule, take.step - 1, believed)

    def _is_overdue(self, admission: Admission, takes: list[TakeRead], take: TakeRead) -> bool:
        since = next((one for one in takes if one.admission >= admission.offset), None)
        if since is None:
            return False
        steps = range(since.step + 1, take.step)
        passed_s = sum(self.reads.seconds.get((take.term, step), 0.0) for step in steps)
        return passed_s >= admission.deadline_s


def recent_takes(takes: list[TakeRead]) -> Iterator[TakeRead]:
    """The takes of the last steps, the newest first."""
    for take in reversed(takes):
        if take.step <= takes[-1].step - RECENT_STEPS:
            return
        yield take


def _was_read(bounds: ReadBounds, at: Address) -> bool:
    return is_within(bounds, at.partition, at.offset)


def _choice_key(group: int, prepared: PreparedGroup) -> tuple[int, int]:
    """The key by which `oldest` orders it."""
    versions = [span.version.number for one in prepared.samples for span in one.spans]
    return min(versions), group
