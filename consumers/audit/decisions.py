"""Checks the trainer's decisions about groups (invariants 1 and 2): the reason of each closing, and
which members were trained, by the trainer's own function, `prepare_group`. Memory holds the
completions of closed, open and partly trained groups until each is checked.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from rollstream.consumers.audit import folds
from rollstream.consumers.audit.groups import GroupAudit
from rollstream.consumers.audit.source import TrajectoryRows
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.audit.surplus import SurplusAudit
from rollstream.consumers.audit.trainer_reads import (
    GroupRecords,
    OpenGroupCheck,
    TrainerReads,
    is_within,
    recent_takes,
)
from rollstream.consumers.trainer.data.prepare import PreparedGroup, prepare_group
from rollstream.consumers.trainer.data.sample import REWARD, is_annotated
from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.streams.admissible import BelievedVersions, is_usable_annotation
from rollstream.streams.records import Annotation, Configured, GroupClosed, Superseded, Trajectory
from rollstream.streams.values import Address, Version

_DEADLINE_DETAIL = re.compile(r"deadline of (\S+) s passed, (\d+) of (\d+) finished")


@dataclass(slots=True)
class GroupClosing:
    """A `GroupClosed` that waits to be checked, with the ledger's statements before it:
    configuration hash, the trainer's term and the highest believed version.
    """

    record: GroupClosed
    at: Address
    configured: str
    takes: int
    """Number of earlier takes that begin a group."""
    term: int
    believed: Version | None


@dataclass(slots=True)
class DecisionAudit:
    """Checks each group against the trainer's rule:
    * A closed group must have the rule's reason.
    * Of a trained group, exactly the members that the rule leaves out must be untrained. Trained
      members must have all needed annotations; no completion or annotation that the trainer had
      read may be missing; with `filter_equal_rewards` the rewards must differ.
    * `OpenGroupCheck` checks open groups.

    `apply` must receive the ledger first, then `annotations`, then `trajectories`.
    """

    groups: GroupAudit
    ledger: folds.LedgerIndex
    reads: TrainerReads
    policy: AuditPolicy
    once: folds.InvariantResult
    """The result of invariant 2; `result` is that of invariant 1."""
    surplus: SurplusAudit
    """Is applied to each record before this fold."""
    result: folds.InvariantResult = field(init=False)
    _configured: str = ""
    _changed_at: int = 0
    """The number of takes before the present configuration."""
    _closings: dict[int, GroupClosing] = field(default_factory=dict[int, GroupClosing])
    _held: dict[int, GroupRecords] = field(default_factory=dict[int, GroupRecords])
    """The records of the groups to check."""
    _equal: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    """Group → number of its trained completions so far, and their common reward."""
    _oldest: dict[int, int] = field(default_factory=dict[int, int])
    """Group of one of the last takes → the smallest version of its trained samples."""
    _decided: set[int] = field(default_factory=set[int])
    """Groups that were checked and removed from `_held`."""
    _known: BelievedVersions = field(
        default_factory=lambda: BelievedVersions(-1), metadata={folds.DERIVED: True}
    )
    """The published versions with their terms."""
    _poisoned: set[int] = field(default_factory=set[int])
    """Groups of takes that the learner could not compute: they end dead, whatever the rule decides.
    """
    _is_begun: bool = field(default=False, metadata={folds.DERIVED: True})
    _other: int = 0
    """Closings under an earlier configuration that the present configuration would not give."""

    def __post_init__(self) -> None:
        self.result = self.groups.result

    @property
    def rule(self) -> TrainingRule | None:
        """The trainer's rule; None if the run's settings are not available."""
        return self.policy.rule

    def apply(self, message: folds.AuditMessage) -> None:
        if message.void:
            return
        if message.topic in ("annotations", "trajectories") and not self._is_begun:
            self._begin()
        match message.record:
            case Configured() as configured if message.topic == "ledger":
                if configured.configuration_hash != self._configured:
                    self._changed_at = len(self.reads.takes)
                self._configured = configured.configuration_hash
            case Superseded() as superseded if message.topic == "ledger":
                self._poisoned.update(superseded.poisoned)
            case GroupClosed() as closed if message.topic == "ledger":
                self._close(closed, message.address)
            case Annotation() as note if message.topic == "annotations":
                self._note(note, message)
            case Trajectory() as record if message.topic == "trajectories":
                self._arrive(record, message)
            case _:
                pass

    def _begin(self) -> None:
        self._is_begun, self._known = True, self.ledger.believed
        if self.rule is None:
            return
        for group, admission in self.groups.admitted.items():
            if group in self._poisoned or group in self._decided:
                continue
            if group not in self.groups.ended or group in self._closings:
                # Groups that were restored from a verdict keep their records.
                self._held.setdefault(group, GroupRecords(admission.names, needed=admission.needed))
        partly: dict[int, list[str]] = {
            u.group: [] for u in self.ledger.uses.values() if not u.step
        }
        for name, use in self.ledger.uses.items() if partly else ():
            if use.group in partly:
                partly[use.group].append(name)
        for group, names in partly.items():
            if group not in self._poisoned and group not in self._decided:
                self._held.setdefault(group, GroupRecords(tuple(names)))
        recent = {id(take) for take in recent_takes(self.reads.last_term())}
        takes = self.reads.takes
        begun = (g for g, i in self.reads.begun.items() if id(takes[i]) in recent)
        self._oldest = {group: self._oldest.get(group, 1 << 62) for group in begun}

    def apply_rows(self, rows: TrajectoryRows) -> None:
        rule = self.rule
        if rule is None:
            return
        if not self._is_begun:
            self._begin()
        for row in self._wanted_rows(rows, rule):
            self.apply(rows.message(row))

    def finish(self, coverage: folds.Coverage) -> None:
        if self.rule is None:
            if self.groups.ended:
                why = "without the trainer's settings"
                if self.policy.refused:
                    why = (
                        f"whose rule is code of the run ({', '.join(self.policy.refused)}): it is "
                        "not imported, because you did not begin the run on this machine; --trust "
                        "imports it"
                    )
                self.result.add_unchecked(f"the reasons of closed groups, {why}")
            return
        if not self._is_begun:
            self._begin()
        for group in [g for g in self._held if g in self._closings]:
            self._incomplete(group, self._closings[group], self._held[group], coverage)
        if self._other:
            what = f"{self._other} closings under an earlier configuration, which is not kept"
            self.result.add_unchecked(what)
        if folds.starts_complete(coverage["trajectories"]):
            open_groups = {g: h for g, h in self._held.items() if g not in self.groups.ended}
            OpenGroupCheck(self.groups, self.reads, self.policy, self._oldest, self.ledger).check(
                open_groups
            )

    def _close(self, closed: GroupClosed, at: Address) -> None:
        end = self.groups.ended.get(closed.group)
        if closed.group in self._poisoned and closed.reason == "dead":
            return
        if end is not None and end.at == at:  # otherwise `GroupAudit` has recorded the violation
            takes = len(self.reads.takes)
            term = self.reads.term
            self._closings[closed.group] = GroupClosing(
                closed, at, self._configured, takes, term, self.reads.believed
            )

    def _note(self, note: Annotation, message: folds.AuditMessage) -> None:
        if self.rule is None or note.name not in self.rule.names or not is_usable_annotation(note):
            return
        key = (note.trajectory, note.name)
        records = self._held.get(note.group)
        if records is not None and note.trajectory in records.names and key not in records.noted:
            records.noted[key] = (note, message.address)
        begun = self.reads.of_group(note.group)
        if begun is None or key in self.ledger.notes:
            return
        use = self.ledger.uses.get(note.trajectory)
        at = message.address
        if use is not None and is_within(begun.annotations, at.partition, at.offset):
            what = f"step {begun.step} trained {note.trajectory} without its {note.name}, "
            what += "which it had read"
            self.once.add_violation(what, message.topic, at)

    def _wanted_rows(self, rows: TrajectoryRows, rule: TrainingRule) -> list[int]:
        uses, oldest = rows.uses(self.ledger), self._oldest
        groups = set(rows.groups)
        needed_rows: set[int] = set()
        if not groups.isdisjoint(self._held):
            needed_rows |= {row for row, group in enumerate(rows.groups) if group in self._held}
        if not groups.isdisjoint(oldest):
            for row in [row for row, group in enumerate(rows.groups) if group in oldest]:
                use = uses.found[row]
                if use is not None and use.step:
                    numbers = rows.spans.number[rows.spans.row == row].tolist()
                    oldest[use.group] = min(oldest[use.group], *numbers)
        unscored = np.isnan(rows.rewards)
        if rule.names != (REWARD,) or rule.filter_equal_rewards:
            unscored[:] = True
        needed_rows.update(np.flatnonzero(unscored).tolist())
        unnamed = np.flatnonzero(~uses.is_named).tolist()
        needed_rows.update(row for row in unnamed if rows.groups[row] in self.reads.begun)
        return sorted(needed_rows)

    def _arrive(self, record: Trajectory, message: folds.AuditMessage) -> None:
        group, name, at = record.group, record.trajectory, message.address
        if self.rule is None:
            return
        records = self._held.get(group)
        is_new = records is not None and name in records.names and name not in records.arrived
        if records is not None and is_new and not records.is_full():
            records.arrived[name] = (
                # The check of a deadline needs no tokens.
                _without_tokens(record) if self._is_overdue(group) else record,
                at,
            )
            if records.is_full():
                self._decide(group, records)
        use = self.ledger.uses.get(name)
        if use is not None:
            if use.at == at and use.step:
                self._check_trained(record, message, self.rule)
                if group in self._oldest:
                    numbers = (span.version.number for span in record.spans)
                    self._oldest[group] = min(self._oldest[group], *numbers)
            return
        begun = self.reads.of_group(group)
        admission = self.groups.admitted.get(group)
        if begun is None or admission is None or name not in admission.names:
            return
        is_read = is_within(begun.trajectories, at.partition, at.offset)
        if is_read and not self.surplus.is_surplus(group, at):
            what = f"step {begun.step} began group {group} without {name}, which it had read"
            self.once.add_violation(what, message.topic, at)

    def _check_trained(
        self, record: Trajectory, message: folds.AuditMessage, rule: TrainingRule
    ) -> None:
        group = record.group
        # Groups that were taken under an earlier configuration are not compared.
        if self.reads.begun.get(group, self._changed_at) < self._changed_at:
            return
        if not is_annotated(record, rule.names, self.ledger.notes):
            what = f"{record.trajectory} was trained without all of {', '.join(rule.names)}"
            self.result.add_violation(what, message.topic, message.address)
        is_plain = rule.names == (REWARD,) and (record.trajectory, REWARD) not in self.ledger.notes
        # `_check_members` compares the groups of which a take left members out.
        is_compared = group in self._held or group in self._decided
        if not rule.filter_equal_rewards or is_compared or not is_plain:
            return
        count, before = self._equal.get(group, (0, record.reward))
        if record.reward is None or record.reward != before:
            self._equal[group] = (-1 << 40, float("nan"))  # they differ: no violation follows
            return
        self._equal[group] = (count + 1, record.reward)
        if count + 1 == self.ledger.trained_of[group]:
            what = f"group {group} was trained, and all its rewards are {record.reward:g}"
            self.result.add_violation(what, message.topic, message.address)

    def _decide(self, group: int, records: GroupRecords) -> None:
        closing, end = self._closings.get(group), self.groups.ended.get(group)
        if closing is not None and self._is_overdue(group):
            return
        if closing is not None:
            self._check_closing(group, closing, records)
        elif end is not None and end.step in self.ledger.versions:
            self._check_members(group, end.step, records)
        else:
            return
        del self._held[group]
        self._decided.add(group)

    def _check_closing(self, group: int, closing: GroupClosing, records: GroupRecords) -> None:
        stated, version = closing.record.reason, closing.record.step - 1
        decisions = [
            self._prepared(group, records, notes, version, believed)
            for notes in records.annotation_variants()
            for believed in self._believed_about(closing)
        ]
        if any(prepared.ending == stated for prepared in decisions):
            return
        if closing.configured != self._configured:
            self._other += 1
            return
        by_rule = decisions[0].ending or "trained"
        detail = f" ({decisions[0].detail})" if decisions[0].detail else ""
        what = f"group {group} is closed as {stated}, the rule gives {by_rule}{detail}"
        self.result.add_violation(what, "ledger", closing.at)

    def _check_members(self, group: int, step: int, records: GroupRecords) -> None:
        notes = {key: note for key, (note, _) in records.noted.items() if key in self.ledger.notes}
        begun = self.reads.of_group(group)
        believed = self._known.up_to(None if begun is None else begun.believed)
        prepared = self._prepared(group, records, notes, step - 1, believed)
        trainable = {sample.trajectory for sample in prepared.samples}
        trained = {name for name in records.names if self.ledger.uses[name].step}
        take = self.groups.ended[group].at
        if not trained:  # `GroupAudit` records this violation
            return
        for name in sorted(trainable - trained):
            what = f"group {group} was trained without {name}, which the rule trains"
            self.once.add_violation(what, "ledger", take)
        if trained - trainable:
            few = ", ".join(sorted(trained - trainable)[:4])
            what = f"group {group} was trained with {few}, which the rule leaves out"
            self.result.add_violation(
                f"{what}: {prepared.detail or prepared.ending}", "ledger", take
            )

    def _is_overdue(self, group: int) -> bool:
        closing = self._closings.get(group)
        return closing is not None and bool(_DEADLINE_DETAIL.match(closing.record.detail))

    def _incomplete(
        self, group: int, closing: GroupClosing, records: GroupRecords, coverage: folds.Coverage
    ) -> None:
        if not folds.starts_complete(coverage["trajectories"]):
            self.result.add_unchecked("the closings of groups whose completions are missing")
            return
        wrong = self._wrong_overdue(group, closing, records)
        if not wrong:
            return
        if coverage["trajectories"] == "archived":  # the archive may end before the ledger does
            self.result.add_unchecked("the closings of groups whose completions are not archived")
            return
        what = f"group {group} is closed as {closing.record.reason}, but {wrong}"
        self.result.add_violation(what, "ledger", closing.at)

    def _wrong_overdue(self, group: int, closing: GroupClosing, records: GroupRecords) -> str:
        deadline_match = _DEADLINE_DETAIL.match(closing.record.detail)
        if deadline_match is None:
            return f"{len(records.arrived)} of its {len(records.names)} completions are in the log"
        deadline, finished, members = deadline_match.groups()
        admission = self.groups.admitted[group]
        if closing.record.reason != "expired" or deadline != f"{admission.deadline_s:g}":
            return f"a passed deadline of {admission.deadline_s:g} s closes it as expired"
        if int(members) != len(records.names) or int(finished) > len(records.arrived):
            few = f"{len(records.arrived)} of its {len(records.names)} completions are in the log"
            return f"{few}, not {finished} of {members}"
        last = self.reads.takes[closing.takes - 1] if closing.takes else None
        if last is None or last.term != closing.term or self.rule is None:
            return ""
        seen = records.before(last.trajectories, last.annotations)
        return "all its records had been read by then" if seen.is_complete(self.rule.names) else ""

    def _prepared(
        self,
        group: int,
        records: GroupRecords,
        notes: Mapping[tuple[str, str], Annotation],
        version: int,
        believed: BelievedVersions | None,
    ) -> PreparedGroup:
        assert self.rule is not None
        return prepare_group(group, records.records(), notes, self.rule, version, believed)

    def _believed_about(self, closing: GroupClosing) -> Iterator[BelievedVersions | None]:
        """Yields the sets of believed versions that the trainer may have known when it closed the
        group.
        """
        # The closing itself states none: the set before it, and that of the next take.
        yield self._known.up_to(closing.believed)
        for take in self.reads.takes[closing.takes : closing.takes + 1]:
            yield self._known.up_to(take.believed)


def _without_tokens(record: Trajectory) -> Trajectory:
    none = record.tokens[:0]
    return replace(
        record, tokens=none, sources=record.sources[:0], logprobs=record.logprobs[:0], spans=(),
        arrays=(), array_bytes=None,
    )  # fmt: skip
