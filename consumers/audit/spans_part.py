"""Invariants 3 and 4: every generated token belongs to one span; under `keep_version` a trajectory
has one span.

The log does not show which engine stamped a span, only that the spans tile the generated tokens.
Only trained trajectories can violate these invariants: any program may append a malformed one,
which the trainer refuses (invariant 12). Malformed completions that were not trained are counted,
and so are foreign ones, of trajectories that were never admitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.audit.groups import Admission
from rollstream.consumers.audit.rows import Integers, TrajectoryRows
from rollstream.consumers.audit.seen import Coverage, AuditMessage, starts_complete
from rollstream.consumers.audit.folds import LedgerIndex
from rollstream.consumers.audit.tally import InvariantResult
from rollstream.streams.records import GENERATED, Assignment, Trajectory


@dataclass(frozen=True, slots=True)
class ForeignCompletions:
    """Finds completions that name no admitted trajectory, by the groups of `admissions`."""

    admitted: Mapping[int, Admission]
    coverage: Coverage
    taken: LedgerIndex

    def has(self, record: Trajectory) -> bool:
        """Whether the completion is foreign; False if the first admissions are not available."""
        if not starts_complete(self.coverage["admissions"]):
            return False
        group = self.admitted.get(record.group)
        return group is None or record.trajectory not in group.names


@dataclass(slots=True)
class SpanAudit:
    """Checks `trajectories`; needs the ledger before them."""

    foreign: ForeignCompletions
    tally: InvariantResult = field(
        default_factory=lambda: InvariantResult(3, "every generated token belongs to one span")
    )

    def apply(self, seen: AuditMessage) -> None:
        record = seen.record
        if seen.topic != "trajectories" or not isinstance(record, Trajectory):
            return
        if self.foreign.has(record):
            self.tally.counts["foreign completions"] += 1
            return
        self.tally.counts["trajectories"] += 1
        self.tally.counts["spans"] += len(record.spans)
        generated = int(np.count_nonzero(record.sources == GENERATED))
        self.tally.counts["tokens"] += generated
        wrong = _span_problem(record, generated)
        if wrong and not self.foreign.taken.is_trained(record.trajectory, seen.address):
            self.tally.counts["malformed and not trained"] += 1
        elif wrong:
            self.tally.offend(f"{record.trajectory}: {wrong}", seen.topic, seen.address)

    def apply_rows(self, rows: TrajectoryRows) -> None:
        right = _well_formed(rows)
        self.tally.counts["trajectories"] += int(np.count_nonzero(right))
        self.tally.counts["spans"] += int(rows.spans.count[right].sum())
        self.tally.counts["tokens"] += int(rows.generated[right].sum())
        for row in np.flatnonzero(~right).tolist():
            self.apply(rows.seen(row))

    def finish(self, coverage: Coverage) -> None:
        _report_missing(self.tally, coverage)


@dataclass(slots=True)
class OneVersionAudit:
    """Checks invariant 4; `keep_version` is None if the run's settings are unknown."""

    keep_version: bool | None
    foreign: ForeignCompletions
    tally: InvariantResult = field(default_factory=lambda: InvariantResult(4, "under keep_version, one span each"))

    def apply(self, seen: AuditMessage) -> None:
        record = seen.record
        if isinstance(record, Assignment) and self.keep_version and not seen.void:
            self._ordered(record)
        if seen.topic != "trajectories" or not isinstance(record, Trajectory):
            return
        several = len(record.spans) > 1
        self.tally.counts["trajectories of one span"] += not several
        self.tally.counts["of several"] += several
        is_trained = self.foreign.taken.is_trained(record.trajectory, seen.address)
        if several and self.keep_version and is_trained:
            names = ", ".join(str(span.version) for span in record.spans[:4])
            what = f"{record.trajectory} has {len(record.spans)} spans ({names})"
            self.tally.offend(what, seen.topic, seen.address)

    def _ordered(self, order: Assignment) -> None:
        """Count the outcomes of trajectories whose version no rollout held, as far as assignments
        are kept.
        """
        if order.from_history:
            self.tally.counts["loaded from history"] += 1
        elif order.kind == "start" and order.attempt > 1:
            self.tally.counts["started again"] += 1

    def apply_rows(self, rows: TrajectoryRows) -> None:
        several = rows.spans.count > 1
        self.tally.counts["trajectories of one span"] += int(np.count_nonzero(~several))
        if self.keep_version:
            for row in np.flatnonzero(several).tolist():
                self.apply(rows.seen(row))
        else:
            self.tally.counts["of several"] += int(np.count_nonzero(several))

    def finish(self, coverage: Coverage) -> None:
        if self.keep_version is False:
            self.tally.notes.append("the run's policy lets versions change within a trajectory")
            return
        _report_missing(self.tally, coverage)
        if self.keep_version is None and self.tally.counts["of several"]:
            self.tally.cannot("rollouts.on_update is not known without the run's config.json")


def _span_problem(record: Trajectory, generated: int) -> str:
    if len(record.sources) != len(record.tokens):
        return f"{len(record.tokens)} tokens but {len(record.sources)} sources"
    if len(record.logprobs) != generated:
        return f"{generated} generated tokens but {len(record.logprobs)} log-probabilities"
    end = 0
    for span in record.spans:
        if span.start != end or span.end <= span.start:
            return f"span [{span.start}, {span.end}) instead of one that starts at {end}"
        end = span.end
    return "" if end == generated else f"its spans end at {end} of {generated} generated tokens"


def _well_formed(rows: TrajectoryRows) -> NDArray[np.bool_]:
    """The rows for which `_span_problem` returns ""."""
    spans, generated = rows.spans, rows.generated
    is_first = np.diff(spans.row, prepend=-1) > 0
    before: Integers = np.where(is_first, 0, np.roll(spans.end, 1))
    is_wrong = (spans.start != before) | (spans.end <= spans.start)
    reached = np.zeros(len(rows), np.int64)
    reached[spans.row] = spans.end  # the last one of each row stays
    right = (reached == generated) & (spans.sums(is_wrong) == 0)
    right &= rows.lengths("sources") == rows.lengths("tokens")
    return right & (rows.lengths("logprobs") == generated)


def _report_missing(tally: InvariantResult, coverage: Coverage) -> None:
    if coverage["trajectories"] == "part":
        tally.cannot("the trajectories before the first kept record")
    elif coverage["trajectories"] == "absent":
        tally.cannot("trajectories is missing")
