"""Checks that each trained completion has the origin that the log records (invariant 3).

`applied`, `prompts`, `assignments` and `partials` are truncated once no reader needs them, so a
missing record proves a violation only where the whole topic is kept. Memory grows by a tuple per
version and rollout, per kept prompt and assignment, and per kept partial of a resumed trajectory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from rollstream.consumers.audit.folds import AuditMessage, Coverage, InvariantResult, LedgerIndex
from rollstream.consumers.audit.groups import Admission
from rollstream.consumers.audit.resume_chains import ResumeChains
from rollstream.consumers.audit.source import TrajectoryRows
from rollstream.streams import records
from rollstream.streams.values import Address, Tokens, Version

RolloutTerm = tuple[str, int]


class PromptDigest(msgspec.Struct, frozen=True, gc=False):
    """A `Prompt` without its tokens: `hash` is the hash of its `count` tokens, `at` its address."""

    count: int
    hash: int
    task: str
    temperature: float
    at: Address


@dataclass(slots=True)
class OriginAudit:
    """Compares each trained completion with the log:
    1. the rollout and term that it names applied each version of its spans; of a resumed trajectory
       it is enough that some rollout did;
    2. prompt, task, temperature, index and wave equal those in `prompts` and `admissions`;
    3. dispatch assigned this attempt to this rollout and term;
    4. the resumed part equals the chain of partials in the assignment (`resume_chains.py`).

    The caller applies the ledger, `applied`, `prompts`, `assignments` and `partials` before
    `trajectories`. `result` is also that of `SpanAudit`.
    """

    ledger: LedgerIndex
    admitted: Mapping[int, Admission]
    result: InvariantResult
    coverage: Coverage
    """The completeness of the topics read so far."""
    chains: ResumeChains = field(init=False)
    _applied: set[tuple[str, int, int, int]] = field(default_factory=set[tuple[str, int, int, int]])
    """(rollout, its term, version number, version term) of each `Applied`."""
    _served: set[Version] = field(default_factory=set[Version])
    """The versions that any rollout applied."""
    _prompts: dict[int, PromptDigest] = field(default_factory=dict[int, PromptDigest])
    _assigned: set[int] = field(default_factory=set[int])
    """Hashes of (trajectory, attempt, rollout, term)."""
    _newest: dict[RolloutTerm, Version] = field(default_factory=dict[RolloutTerm, Version])
    """The newest version that each rollout term applied."""
    _unconfirmed: dict[tuple[RolloutTerm, Version], tuple[str, Address]] = field(
        default_factory=dict[tuple[RolloutTerm, Version], tuple[str, Address]]
    )
    """Versions that completions name and that their rollout did not apply, although it applied none
    newer; each with the first such completion. `finish` decides.
    """
    _uncompared: set[Version] = field(default_factory=set[Version])
    """Versions in resumed trajectories that no rollout had applied when they were read."""
    _differing_prompts: list[tuple[str, Address, Address]] = field(
        default_factory=list[tuple[str, Address, Address]]
    )
    """Prompts that differ from their group's admission: description, address and admitted address.
    """
    _unadmitted_prompts: list[tuple[int, int, Address]] = field(
        default_factory=list[tuple[int, int, Address]]
    )
    """Prompts whose group was not admitted when they were read: group, samples, address."""
    _unverifiable: int = 0
    """Completions whose versions cannot be checked, because `applied` is truncated."""

    def __post_init__(self) -> None:
        self.chains = ResumeChains(self.result)

    def apply(self, message: AuditMessage) -> None:
        if message.void:
            return
        match message.record:
            case records.Applied() as applied if message.topic == "applied":
                self._add_applied(applied)
            case records.Prompt() as prompt if message.topic == "prompts":
                self._add_prompt(prompt, message.address)
            case records.Assignment() as assignment if message.topic == "assignments":
                self._check_assignment(assignment, message)
            case records.Partial() as partial if message.topic == "partials":
                self.chains.keep(partial, message.address)
            case records.Trajectory() as record if message.topic == "trajectories":
                use = self.ledger.uses.get(record.trajectory)
                if use is not None and use.step and use.at == message.address:
                    self._check(record, message)
            case _:
                pass

    def apply_rows(self, rows: TrajectoryRows) -> None:
        """Check archived rows together; a trained row that may violate is applied as a record."""
        is_trained = rows.uses(self.ledger).step > 0
        is_served = rows.spans.sums(~self._are_applied(rows)) == 0
        is_unknown = is_trained & ~is_served & (self.coverage.get("applied") != "whole")
        is_served |= is_unknown
        is_unrecorded = not self._assigned and self._prompts.keys().isdisjoint(rows.groups)
        # Without assignments and prompts, only versions, index and wave can be compared.
        if is_unrecorded:
            is_served &= self._are_plainly_placed(rows)
        else:
            is_served[:] = False
        self._unverifiable += int(np.count_nonzero(is_unknown & is_served))
        for row in np.flatnonzero(is_trained & ~is_served).tolist():
            self.apply(rows.message(row))

    def _are_applied(self, rows: TrajectoryRows) -> NDArray[np.bool_]:
        """Returns for each span whether the row's rollout, in its term, applied the version."""
        spans, row = rows.spans, rows.spans.row.tolist()
        served = zip(
            map(rows.plain("rollout").__getitem__, row),
            map(rows.plain("rollout_term").__getitem__, row),
            spans.number.tolist(),
            spans.term.tolist(),
            strict=True,
        )
        return np.fromiter(map(self._applied.__contains__, served), np.bool_, len(row))

    def _are_plainly_placed(self, rows: TrajectoryRows) -> NDArray[np.bool_]:
        groups = {group: self.admitted.get(group) for group in set(rows.groups)}
        indices: list[int] = rows.plain("index")
        waves: list[int] = rows.plain("wave")
        places = zip(rows.names, rows.groups, indices, waves, strict=True)
        is_placed = np.ones(len(rows), np.bool_)
        for row, (name, group, index, wave) in enumerate(places):
            admission = groups[group]
            if admission is not None:
                names = admission.names
                is_named = 0 <= index < len(names) and names[index] == name
                is_placed[row] = is_named and wave == admission.wave
        return is_placed

    def finish(self, coverage: Coverage) -> None:
        """Report what only the whole log shows."""
        for group, samples, at in self._unadmitted_prompts:
            if group in self.admitted:
                self._compare_with_admission(group, self.admitted[group], samples, at)
        for what, at, admitted_at in self._differing_prompts:
            # Where `prompts` was truncated, a fenced source may have written the prompt: the
            # `Opened` that makes it void may be among the truncated records.
            if at == admitted_at or coverage.get("prompts") == "whole":
                self.result.add_violation(what, "prompts", at)
        if self._unverifiable:
            few = f"{self._unverifiable} completions name versions whose `applied` is not kept"
            self.result.notes.append(few)
        if self._uncompared - self._served:
            uncompared = len(self._uncompared - self._served)
            self.result.counts["versions taken and not compared"] += uncompared
        last: dict[RolloutTerm, Version] = {}
        unconfirmed = {
            (who, version): completion
            for (who, version), completion in self._unconfirmed.items()
            if (*who, version.number, version.term) not in self._applied  # by a later record
        }
        for who, version in unconfirmed:
            last[who] = max(last.get(who, version), version)
        for (who, version), (trajectory, at) in unconfirmed.items():
            what = f"{trajectory} has tokens of {version}, which {_rollout_name(who)} never applied"
            # A rollout fetches a version only after it has recorded the previous one as applied. So
            # of versions that it served and never applied, only the newest can be correct: it may
            # have died before it recorded that one.
            if version < last[who]:
                self.result.add_violation(what, "trajectories", at)
            else:
                self.result.counts["versions taken and not compared"] += 1

    def _add_applied(self, applied: records.Applied) -> None:
        if not _is_possible(applied):
            return
        version, who = applied.version, (applied.rollout, applied.rollout_term)
        self._applied.add((*who, version.number, version.term))
        self._newest[who] = max(self._newest.get(who, version), version)
        self._served.add(version)

    def _add_prompt(self, prompt: records.Prompt, at: Address) -> None:
        admission = self.admitted.get(prompt.group)
        if admission is not None:
            self._compare_with_admission(prompt.group, admission, prompt.samples, at)
        else:
            self._unadmitted_prompts.append((prompt.group, prompt.samples, at))
        count, token_hash = len(prompt.tokens), _token_hash(prompt.tokens)
        digest = PromptDigest(count, token_hash, prompt.task, prompt.sampling.temperature, at)
        self._prompts.setdefault(prompt.group, digest)

    def _compare_with_admission(
        self, group: int, admission: Admission, samples: int, at: Address
    ) -> None:
        if (admission.prompt, len(admission.names)) == (at, samples):
            return
        what = f"group {group} was admitted with {len(admission.names)} samples of "
        what += f"prompts {admission.prompt.partition}:{admission.prompt.offset}"
        what = f"{what}; this prompt asks for {samples}"
        self._differing_prompts.append((what, at, admission.prompt))

    def _check_assignment(self, assignment: records.Assignment, message: AuditMessage) -> None:
        if assignment.kind == "release":
            return
        key = (
            assignment.trajectory,
            assignment.attempt,
            assignment.rollout,
            assignment.rollout_term,
        )
        self._assigned.add(_assignment_hash(key))
        self.chains.want(assignment)
        digest = self._prompts.get(assignment.group)
        if digest is not None and _token_hash(assignment.tokens) != digest.hash:
            what = f"{assignment.trajectory} was assigned with other tokens than its prompt has"
            self.result.add_violation(what, message.topic, message.address)

    def _check(self, record: records.Trajectory, message: AuditMessage) -> None:
        wrong = (
            self._wrong_version(record, message.address),
            self._wrong_prompt(record),
            self._wrong_place(record),
            self._wrong_assignment(record),
            self.chains.wrong(record),
        )
        for what in filter(None, wrong):
            self.result.add_violation(f"{record.trajectory} {what}", message.topic, message.address)

    def _wrong_version(self, record: records.Trajectory, at: Address) -> str:
        who = (record.rollout, record.rollout_term)
        for span in record.spans:
            version = span.version
            if (*who, version.number, version.term) in self._applied:
                continue
            if record.attempt > 1 and version in self._served:
                # An earlier attempt, on another rollout, generated these tokens.
                continue
            if self.coverage.get("applied") != "whole":
                self._unverifiable += 1
                return ""
            if record.attempt > 1 and version not in self._served:
                # The rollout of an earlier attempt ended after a partial and before `Applied`.
                self._uncompared.add(version)
                continue
            if who not in self._newest or version < self._newest[who]:
                return f"has tokens of {version}, which {_rollout_name(who)} never applied"
            self._unconfirmed.setdefault((who, version), (record.trajectory, at))
        return ""

    def _wrong_prompt(self, record: records.Trajectory) -> str:
        digest = self._prompts.get(record.group)
        if digest is None:
            return ""
        if record.turns:  # the prompt of an episode comes with the first request of its program
            return self._wrong_task(record, digest)
        sources, count = record.sources, digest.count
        is_prompt = not sources[:count].any() and not (sources[count:] == records.PROMPT).any()
        if not is_prompt or _token_hash(record.tokens[:count]) != digest.hash:
            return f"has another prompt than prompts {digest.at.partition}:{digest.at.offset}"
        return self._wrong_task(record, digest)

    def _wrong_task(self, record: records.Trajectory, digest: PromptDigest) -> str:
        if (record.task, record.temperature) != (digest.task, digest.temperature):
            task_text = f"{record.task!r} at temperature {record.temperature:g}"
            return f"is of {task_text}, its prompt of {digest.task!r} at {digest.temperature:g}"
        return ""

    def _wrong_place(self, record: records.Trajectory) -> str:
        place = (record.index, record.wave)
        if self._is_in_place(record.trajectory, record.group, place):
            return ""
        return f"has index {record.index} and wave {record.wave}, but was admitted with others"

    def _is_in_place(self, name: str, group: int, place: tuple[int, int]) -> bool:
        admission = self.admitted.get(group)
        if admission is None or name not in admission.names:
            # The admission is not kept, or does not name the trajectory.
            return True
        index, wave = place
        return wave == admission.wave and admission.names.index(name) == index

    def _wrong_assignment(self, record: records.Trajectory) -> str:
        key = (record.trajectory, record.attempt, record.rollout, record.rollout_term)
        # Truncation goes partition by partition: only the whole topic proves that an assignment is
        # missing.
        if not self._assigned or self.coverage.get("assignments") != "whole":
            return ""
        if _assignment_hash(key) in self._assigned:
            return ""
        who = _rollout_name((record.rollout, record.rollout_term))
        return f"is attempt {record.attempt} by {who}, which was never assigned"


def _rollout_name(who: RolloutTerm) -> str:
    return f"{who[0]} of term {who[1]}"


def _assignment_hash(assignment: tuple[str, int, str, int]) -> int:
    return xxh3_64_intdigest("\0".join(map(str, assignment)).encode())


def _token_hash(tokens: Tokens) -> int:
    return xxh3_64_intdigest(tokens.tobytes())


def _is_possible(applied: records.Applied) -> bool:
    # No trajectory with a larger version is ever trained, and a verdict cannot store such a number.
    numbers = applied.rollout_term, applied.version.number, applied.version.term
    return all(0 <= number < 1 << 63 for number in numbers)
