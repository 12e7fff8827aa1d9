"""Audits invariants 3 and 4, one fold each: every generated token belongs to one span; under
`keep_version` a trajectory has one span.

Only a trained completion can violate them: the trainer refuses malformed ones, which any program
may append (invariant 12). Whether the engine named the right version is not in the log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.audit.folds import (
    AuditMessage,
    Coverage,
    InvariantResult,
    LedgerIndex,
    starts_complete,
)
from rollstream.consumers.audit.groups import Admission
from rollstream.consumers.audit.source import Integers, TrajectoryRows
from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.streams.records import GENERATED, Assignment, Trajectory
from rollstream.streams.token_arrays import arrays_problem, heads_problem


@dataclass(frozen=True, slots=True)
class AuditPolicy:
    """The settings of the run that the audit's checks need."""

    max_lag: int | None = None
    """Largest lag of a trained token; None: no such bound."""
    keep_version: bool = False
    """Whether `rollouts.on_update` is `keep_version`."""
    known: bool = True
    """Whether a configuration of the run is available; else the other fields mean nothing."""
    rule: TrainingRule | None = None
    """The trainer's rule for training and closing groups; None if its settings are not available.
    """
    refused: tuple[str, ...] = ()
    """Import paths of a rule that the audit may not import; `rule` is None then."""
    choose: str = "oldest"
    """The trainer's rule for choosing among complete groups (`trainer.choose`)."""
    checkpoint_every: int = 0
    """Steps between checkpoints, 0 if unknown."""
    epochs: int = 0
    """How often a step trains its takes (`trainer.epochs`), 0 if unknown."""
    max_lags: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    """`max_lag` of every configuration that the run had, by its hash."""


@dataclass(frozen=True, slots=True)
class ForeignCompletions:
    """Finds foreign completions, those of trajectories that dispatch never admitted."""

    admitted: Mapping[int, Admission]
    coverage: Coverage
    ledger: LedgerIndex

    def has(self, record: Trajectory) -> bool:
        """Whether the completion is foreign; False if not all admissions are available."""
        return self._lacks(record.group, record.trajectory)

    def among(self, rows: TrajectoryRows) -> list[int]:
        # Members of admitted groups are in the ledger once a take began their group.
        others = np.flatnonzero(~rows.uses(self.ledger).is_named).tolist()
        return [row for row in others if self._lacks(rows.groups[row], rows.names[row])]

    def _lacks(self, number: int, trajectory: str) -> bool:
        if not starts_complete(self.coverage["admissions"]):
            return False
        group = self.admitted.get(number)
        return group is None or trajectory not in group.names


@dataclass(slots=True)
class SpanAudit:
    """Audits invariant 3: the spans of a completion follow each other without gap or overlap, from
    its first generated token to its last. Must receive the ledger before `trajectories`.
    """

    foreign: ForeignCompletions
    result: InvariantResult = field(
        default_factory=lambda: InvariantResult(3, "every generated token belongs to one span")
    )

    def apply(self, message: AuditMessage) -> None:
        record = message.record
        if message.topic != "trajectories" or not isinstance(record, Trajectory):
            return
        if self.foreign.has(record):
            self.result.counts["foreign completions"] += 1
            return
        self.result.counts["trajectories"] += 1
        self.result.counts["spans"] += len(record.spans)
        generated = int(np.count_nonzero(record.sources == GENERATED))
        self.result.counts["tokens"] += generated
        wrong = _span_problem(record, generated)
        if wrong and not self.foreign.ledger.is_trained(record.trajectory, message.address):
            self.result.counts["malformed and not trained"] += 1
        elif wrong:
            self.result.add_violation(
                f"{record.trajectory}: {wrong}", message.topic, message.address
            )

    def apply_rows(self, rows: TrajectoryRows) -> None:
        right = _well_formed(rows)
        right[self.foreign.among(rows)] = False
        self.result.counts["trajectories"] += int(np.count_nonzero(right))
        self.result.counts["spans"] += int(rows.spans.count[right].sum())
        self.result.counts["tokens"] += int(rows.generated[right].sum())
        for row in np.flatnonzero(~right).tolist():
            self.apply(rows.message(row))

    def finish(self, coverage: Coverage) -> None:
        _report_missing(self.result, coverage)


@dataclass(slots=True)
class OneVersionAudit:
    """Audits invariant 4. `keep_version` is None if the run's settings are unknown. Must receive
    the ledger before `trajectories`.
    """

    keep_version: bool | None
    foreign: ForeignCompletions
    result: InvariantResult = field(
        default_factory=lambda: InvariantResult(4, "under keep_version, one span each")
    )

    def apply(self, message: AuditMessage) -> None:
        record = message.record
        if isinstance(record, Assignment) and self.keep_version and not message.void:
            self._count_outcome(record)
        if message.topic != "trajectories" or not isinstance(record, Trajectory):
            return
        several = len(record.spans) > 1
        self.result.counts["trajectories of one span"] += not several
        self.result.counts["of several"] += several
        is_trained = self.foreign.ledger.is_trained(record.trajectory, message.address)
        if several and self.keep_version and is_trained:
            names = ", ".join(str(span.version) for span in record.spans[:4])
            what = f"{record.trajectory} has {len(record.spans)} spans ({names})"
            self.result.add_violation(what, message.topic, message.address)

    def _count_outcome(self, assignment: Assignment) -> None:
        # How trajectories whose version no rollout held were continued; assignments may be
        # truncated, so these counts cover only the remaining ones.
        if assignment.from_history:
            self.result.counts["loaded from history"] += 1
        elif assignment.kind == "start" and assignment.attempt > 1:
            self.result.counts["started again"] += 1

    def apply_rows(self, rows: TrajectoryRows) -> None:
        several = rows.spans.count > 1
        self.result.counts["trajectories of one span"] += int(np.count_nonzero(~several))
        if self.keep_version:
            for row in np.flatnonzero(several).tolist():
                self.apply(rows.message(row))
        else:
            self.result.counts["of several"] += int(np.count_nonzero(several))

    def finish(self, coverage: Coverage) -> None:
        if self.keep_version is False:
            self.result.notes.append("the run's policy lets versions change within a trajectory")
            return
        _report_missing(self.result, coverage)
        if self.keep_version is None and self.result.counts["of several"]:
            self.result.add_unchecked(
                "rollouts.on_update is not known without the run's config.json"
            )


def _span_problem(record: Trajectory, generated: int) -> str:
    """Returns the fault of the spans, sources, log-probabilities or named arrays; "" if there is
    none.
    """
    if len(record.sources) != len(record.tokens):
        return f"{len(record.tokens)} tokens but {len(record.sources)} sources"
    if len(record.logprobs) != generated:
        return f"{generated} generated tokens but {len(record.logprobs)} log-probabilities"
    end = 0
    for span in record.spans:
        if span.start != end or span.end <= span.start:
            return f"span [{span.start}, {span.end}) instead of one that starts at {end}"
        end = span.end
    if end != generated:
        return f"its spans end at {end} of {generated} generated tokens"
    return heads_problem(record, len(record.tokens)) or arrays_problem(record)


def _well_formed(rows: TrajectoryRows) -> NDArray[np.bool_]:
    """Returns True for each row without arrays for which `_span_problem` would return ""."""
    spans, generated = rows.spans, rows.generated
    is_first = np.diff(spans.row, prepend=-1) > 0
    before: Integers = np.where(is_first, 0, np.roll(spans.end, 1))
    is_wrong = (spans.start != before) | (spans.end <= spans.start)
    reached = np.zeros(len(rows), np.int64)
    reached[spans.row] = spans.end  # the last one of each row stays
    right = (reached == generated) & (spans.sums(is_wrong) == 0)
    right &= rows.lengths("sources") == rows.lengths("tokens")
    right &= ~rows.has_arrays
    return right & (rows.lengths("logprobs") == generated)


def _report_missing(result: InvariantResult, coverage: Coverage) -> None:
    if coverage["trajectories"] == "part":
        result.add_unchecked("the trajectories before the first kept record")
    elif coverage["trajectories"] == "absent":
        result.add_unchecked("trajectories is missing")
