"""Audits invariant 5: no token is trained above `max_lag` (`LagAudit`). Only a trained completion
can violate it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
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
from rollstream.consumers.audit.source import Integers, TrajectoryRows
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.lags import lag_of
from rollstream.streams.branches import abandoned_tokens
from rollstream.streams.records import Configured, StepDone, Take, Trajectory
from rollstream.streams.values import Address

NO_BOUND = 1 << 62  # above every lag


def _limit(bound: int | None) -> int:
    return NO_BOUND if bound is None else bound


@dataclass(slots=True)
class LagAudit:
    """Audits invariant 5; must receive the ledger before `trajectories`.

    A token's lag is the version that its step trains from (step - 1) minus the version of its span,
    at least 0. Tokens above `max_lag` are masked, and so are tokens of a never believed version
    (invariant 6); those of abandoned turns are neither trained nor masked. The ledger does not name
    masked tokens, so the sums of each step are compared with its `StepDone`. Memory grows by three
    sums, a bound and one `StepDone` per step.
    """

    ledger: LedgerIndex
    policy: AuditPolicy
    result: InvariantResult = field(
        default_factory=lambda: InvariantResult(5, "no token is trained above max_lag")
    )
    _sums: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    """Trained trajectories, trained tokens and masked tokens, by step and name."""
    _done: list[tuple[StepDone, Address]] = field(default_factory=list[tuple[StepDone, Address]])
    _bounds: list[int | None] = field(default_factory=list[int | None])
    """The bounds of the run's first and present term; empty before the first `Configured`."""
    _group_bounds: dict[int, int | None] = field(default_factory=dict[int, int | None])
    """Group → the bound under which a take began it, if not the run's first one."""
    _loosest: dict[int, int | None] = field(default_factory=dict[int, int | None])
    """Step → the loosest bound of its groups: two terms may have begun them."""

    def apply(self, message: AuditMessage) -> None:
        if message.void:
            return
        record = message.record
        if isinstance(record, Configured) and message.topic == "ledger":
            self._configure(record)
        elif isinstance(record, Take) and message.topic == "ledger":
            self._begin_groups(record)
        elif isinstance(record, StepDone) and message.topic == "ledger":
            self._done.append((record, message.address))
        elif isinstance(record, Trajectory) and message.topic == "trajectories":
            use = self.ledger.uses.get(record.trajectory)
            if use is not None and use.step and use.at == message.address:
                self._add_lags(record, use.step, message)

    def apply_rows(self, rows: TrajectoryRows) -> None:
        """Add the tokens of all rows at once; a row that may violate the invariant is applied as a
        record.
        """
        uses = rows.uses(self.ledger)
        steps: Integers = np.where(uses.is_here, uses.step, 0)
        if not steps.any():
            return
        spans = rows.spans
        lags = np.maximum(steps[spans.row] - 1 - spans.number, 0)
        is_masked = ~self._are_believed(rows)
        is_masked |= lags > self._limits(rows.groups)[spans.row]
        tokens = spans.end - spans.start
        masked, trained = spans.sums(tokens * is_masked), spans.sums(tokens * ~is_masked)
        # Newer than the version that is trained from.
        ahead = spans.number >= steps[spans.row]
        suspicious = (spans.sums(ahead) > 0) | (trained == 0)
        if self.policy.keep_version:
            suspicious |= masked > 0
        for row in np.flatnonzero(suspicious & (steps > 0)).tolist():
            self.apply(rows.message(row))
        plain = np.where(suspicious, 0, steps)
        self._add(plain, {"trained": trained, "masked": masked})
        counted = lags[~is_masked & (plain[spans.row] > 0)]
        if len(counted):
            name = "is the highest lag"
            self.result.counts[name] = max(self.result.counts[name], int(counted.max()))

    def _configure(self, record: Configured) -> None:
        bound = self.policy.max_lags.get(record.configuration_hash, self.policy.max_lag)
        # The bound holds for the groups that the term's takes begin; repeated takes of earlier
        # terms keep theirs.
        self._bounds = [*self._bounds[:1], bound]

    def _first_bound(self) -> int | None:
        return self._bounds[0] if self._bounds else self.policy.max_lag

    def _begin_groups(self, take: Take) -> None:
        first = self._first_bound()
        bound = self._bounds[-1] if self._bounds else first
        for group in take.groups:
            if bound != first:
                self._group_bounds.setdefault(group.group, bound)
            before = self._loosest.get(take.step, bound)
            self._loosest[take.step] = max(before, bound, key=_limit)

    def _bound_of(self, group: int) -> int | None:
        return self._group_bounds.get(group, self._first_bound())

    def _limits(self, groups: Sequence[int]) -> Integers:
        limit_by_group = {group: _limit(self._bound_of(group)) for group in set(groups)}
        return np.array([limit_by_group[group] for group in groups], np.int64)

    def finish(self, coverage: Coverage) -> None:
        """Compare each step of which all takes and completions were read; others count as
        unchecked.
        """
        if not self.policy.known:
            self.result.add_unchecked("dispatch.max_lag is not known without the run's config.json")
            return
        bound = self.policy.max_lag
        if bound is None:
            self.result.notes.append("max_lag = null: ready_groups_max bounds it")
        incomplete, ledger_whole = 0, starts_complete(coverage["ledger"])
        for done, at in self._done:
            complete = self.ledger.is_whole(done.step, ledger_whole=ledger_whole)
            if complete and self._sums[done.step, "trajectories"] == self.ledger.trained[done.step]:
                self._compare(done, at)
            else:
                incomplete += 1
        if incomplete:
            self.result.add_unchecked(f"{incomplete} steps whose takes or completions are missing")
        for topic in ("trajectories", "ledger"):
            if coverage[topic] == "absent":
                self.result.add_unchecked(f"{topic} is missing")

    def _are_believed(self, rows: TrajectoryRows) -> NDArray[np.bool_]:
        numbers, index = np.unique(rows.spans.number, return_inverse=True)
        believed = [self.ledger.versions.get(number) for number in numbers.tolist()]
        is_known = np.array([version is not None for version in believed], np.bool_)
        terms = np.array([0 if version is None else version.term for version in believed], np.int64)
        # As `LedgerIndex.is_believed`.
        return ~is_known[index] | (terms[index] == rows.spans.term)

    def _add(self, steps: Integers, tokens: Mapping[str, Integers]) -> None:
        distinct_steps, index = np.unique(steps, return_inverse=True)
        sums = {name: np.bincount(index, counts).tolist() for name, counts in tokens.items()}
        sums["trajectories"] = np.bincount(index).tolist()
        for at, step in enumerate(distinct_steps.tolist()):
            for name, values in sums.items():
                # Step 0: the row was not trained.
                self._sums[step, name] += int(values[at]) if step else 0

    def _add_lags(self, record: Trajectory, step: int, message: AuditMessage) -> None:
        trained = masked = 0
        is_abandoned = abandoned_tokens(record.turns, record.abandoned)
        bound = self._bound_of(record.group)
        for span in record.spans:
            lag, tokens = lag_of(span, step - 1), span.end - span.start
            tokens -= int(np.count_nonzero(is_abandoned[span.start : span.end]))
            # The version did not exist yet when the step chose its groups.
            if span.version.number > max(step - 1, self.ledger.highest[step]):
                what = f"step {step} trained {record.trajectory} of {span.version}, made later"
                self.result.add_violation(what, message.topic, message.address)
            is_above = bound is not None and lag > bound
            if is_above or not self.ledger.is_believed(span.version):
                masked += tokens
            elif tokens:
                trained += tokens
                self.result.counts["is the highest lag"] = max(
                    self.result.counts["is the highest lag"], lag
                )
        self._sums[step, "trajectories"] += 1
        self._sums[step, "trained"] += trained
        self._sums[step, "masked"] += masked
        if is_abandoned.any():
            self.result.counts["of abandoned turns"] += int(np.count_nonzero(is_abandoned))
        # Under `keep_version` the trainer drops a trajectory with masked tokens whole.
        if self.policy.known and (not trained or (masked and self.policy.keep_version)):
            oldest = min((span.version.number for span in record.spans), default=0)
            what = f"step {step} trained {record.trajectory} at lag {step - 1 - oldest}"
            self.result.add_violation(f"{what}, max_lag is {bound}", message.topic, message.address)

    def _compare(self, done: StepDone, at: Address) -> None:
        sums = {name: self._sums[done.step, name] for name in ("trained", "masked")}
        self.result.counts["tokens trained"] += sums["trained"]
        self.result.counts["masked"] += sums["masked"]
        stated = {
            "trained": done.metrics.get("tokens_trained"),
            "masked": float(done.counts.get("masked_tokens", 0)),
        }
        for name, number in stated.items():
            if number is None:
                self.result.add_unchecked(
                    f"step {done.step} does not state how many tokens it trained"
                )
            elif number != sums[name]:
                what = f"step {done.step} states {number:g} tokens {name}, not {sums[name]}"
                self.result.add_violation(what, "ledger", at)
        lag = done.metrics.get("lag_consumed_max", 0.0)
        bound = self._loosest.get(done.step, self._first_bound())
        if bound is not None and lag > bound:
            self.result.add_violation(
                f"step {done.step} states lag {lag:g} > {bound}", "ledger", at
            )
