"""Checks invariant 6 in the log: steps make versions in order, no version of a fenced term is
believed after the fence, and all records of a version name the same manifest. State grows by two
hashes and a few bytes per version.
"""

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from rollstream.consumers.audit.folds import (
    AuditMessage,
    Coverage,
    InvariantResult,
    LedgerIndex,
    starts_complete,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import ROLLOUTS, newest_term, retired_term_max, role_names
from rollstream.streams.records import Applied, Configured, Opened, StepDone, WeightsAnnounced
from rollstream.streams.values import Version

Standing = Literal["known", "retired", "foreign"]


@dataclass(slots=True)
class KnownRollouts:
    """Looks up the rollouts that the store knows (`terms.py`) and the highest term of each. Any
    process may append to `applied`, so records of other rollouts prove nothing.
    """

    store: ObjectStore | None
    _names: frozenset[str] | None = None
    _terms: dict[str, int] = field(default_factory=dict[str, int])
    _retired_term_max: int = 0

    def standing(self, applied: Applied) -> Standing:
        """Returns `foreign` if no rollout of the name has held the term; `retired` if the name may
        have been deleted since (`RoleTerms.retire`), which the store cannot prove; else `known`,
        also if the store knows no rollout.
        """
        if self.store is None:
            return "known"
        if self._names is None:
            self._names = frozenset(role_names(self.store, ROLLOUTS))
            self._retired_term_max = retired_term_max(self.store, ROLLOUTS)
        name, term = applied.rollout, applied.rollout_term
        if self._names and name not in self._names:
            return "retired" if 0 < term <= self._retired_term_max else "foreign"
        if name in self._names and name not in self._terms:
            self._terms[name] = newest_term(self.store, ROLLOUTS, name)
        return "foreign" if term > self._terms.get(name, term) else "known"


@dataclass(slots=True)
class VersionAudit:
    """Checks invariant 6 in the topics `ledger`, `weights` and `applied`; `StoreAudit` adds its
    violations to the same `result`.
    """

    ledger: LedgerIndex
    rollouts: KnownRollouts
    result: InvariantResult = field(
        default_factory=lambda: InvariantResult(6, "versions are whole, in order, unchanged")
    )
    hashes: dict[Version, str] = field(default_factory=dict[Version, str])
    """Hash of the manifest of each version that was announced or served."""
    states: dict[int, StepDone] = field(default_factory=dict[int, StepDone])
    """The first `StepDone` of each step, without its metrics and counts."""
    last: StepDone | None = None
    """The last `StepDone` that repeats no earlier step."""
    term: int = 0
    """The highest term of a trainer that opened the ledger."""
    configurations: set[str] = field(default_factory=set[str])
    """Hashes of the configurations of the trainer's terms."""
    _is_first: bool = False  # whether the next new step is the first of its term

    def apply(self, message: AuditMessage) -> None:
        if message.void:
            return
        match message.record:
            case Opened() as opened if message.topic == "ledger":
                self.term, self._is_first = opened.term, True
            case Configured() as configured:
                self.configurations.add(configured.configuration_hash)
            case StepDone() as done if message.topic == "ledger":
                self._done(done, message)
            case WeightsAnnounced() as announced:
                self._check_hash(announced.version, announced.manifest_hash, message)
            case Applied() as applied:
                self._check_applied(applied, message)
            case _:
                pass

    def finish(self, coverage: Coverage) -> None:
        if not starts_complete(coverage["ledger"]):
            defect = "missing" if coverage["ledger"] == "absent" else "not whole"
            self.result.add_unchecked(f"the ledger is {defect}")

    def _done(self, done: StepDone, message: AuditMessage) -> None:
        state = self.states.get(done.step)
        if state is not None:
            self.result.counts["repeated"] += 1
            if not done.has_same_state(state):
                at = f"ledger {message.address.partition}:{message.address.offset}"
                # A fork; no violation.
                what = f"{at}: step {done.step} was repeated with another state hash"
                self.result.notes.append(what)
            return
        self.states[done.step] = replace(done, metrics={}, counts={})
        self.result.counts["steps"] += 1
        problem = self._problem(done, message)
        if problem:
            self.result.add_violation(
                f"step {done.step} as {done.version}: {problem}", "ledger", message.address
            )
        self.last, self._is_first = done, False

    def _problem(self, done: StepDone, message: AuditMessage) -> str:
        """Returns why a new step's version is out of order; "" if it is in order."""
        if done.version.number != done.step:
            return "the numbers differ"
        term = self.term if message.envelope is None else message.envelope.term
        if done.version.term > term:
            return f"its trainer's term is {term}, which is lower"
        # A trainer may die after the pointer was moved to its version and before it writes the
        # `StepDone`, which its successor then writes. So the first new step of a term may have a
        # version of a lower term.
        if done.version.term < term and not self._is_first:
            return f"term {term} had fenced that term and made a step before"
        last = self.last
        if last is None:
            return ""
        if done.step != last.step + 1:
            return f"it follows step {last.step}"
        return "" if done.version.term >= last.version.term else f"it follows {last.version}"

    def _check_applied(self, applied: Applied, message: AuditMessage) -> None:
        standing = self.rollouts.standing(applied)
        if standing == "foreign":
            self.result.counts["foreign applied"] += 1
        elif standing == "known":
            self.result.counts["applied"] += 1
            self._check_hash(applied.version, applied.hash, message)
        else:
            # Any process may have written the record, so a difference is only noted.
            self.result.counts["applied by retired rollouts"] += 1
            logged = self.hashes.get(applied.version, applied.hash)
            if logged != applied.hash:
                what = f"applied {message.address.partition}:{message.address.offset}: "
                what += f"{applied.rollout}, which the store no longer knows, served "
                what += f"{applied.version} with manifest {applied.hash}, which is {logged}"
                self.result.add_note(what, "other hashes by retired rollouts")

    def _check_hash(self, version: Version, manifest_hash: str, message: AuditMessage) -> None:
        logged = self.hashes.setdefault(version, manifest_hash)
        if logged != manifest_hash:
            what = f"{version} has manifest {manifest_hash} here, but {logged} in an earlier record"
            self.result.add_violation(what, message.topic, message.address)
