"""Checks that a step with several epochs repeated exactly what it had trained: a `TakesRepeated`
for each update and further epoch, before the `StepDone`, with the numbers of all its takes in
order. So the ledger has every training of a trajectory that is in one take (invariant 2). Memory
holds the steps that are not done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream.consumers.audit import folds
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.streams.records import Configured, StepDone, Superseded, Take, TakesRepeated
from rollstream.streams.values import Address

UpdateOfStep = tuple[int, int]
"""A step, and the number of an update in it."""


@dataclass(slots=True)
class RepetitionAudit:
    """The caller applies each record of the ledger first to `ledger`, then here. The result is that
    of `ExactlyOnceAudit`.
    """

    ledger: folds.LedgerIndex
    policy: AuditPolicy
    result: folds.InvariantResult
    _takes: dict[UpdateOfStep, list[int]] = field(default_factory=dict[UpdateOfStep, list[int]])
    """The trained takes, by update of a step that is not done."""
    _repeated: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])
    """The repetitions of steps that are not done, by step, update and epoch."""
    _done: int = 0
    """The highest step that is done."""
    _configured: str = ""
    _changed: set[UpdateOfStep] = field(default_factory=set[UpdateOfStep])
    """Updates whose takes were recorded under other settings, and may train less."""
    _early: list[tuple[str, Address]] = field(default_factory=list[tuple[str, Address]])
    """Findings in the first step that was read."""

    def apply(self, message: folds.AuditMessage) -> None:
        if message.void or message.topic != "ledger":
            return
        match message.record:
            case Take() as take if take.members and take.step > self._done:
                self._takes.setdefault((take.step, take.update), []).append(take.micro_batch)
            case Superseded() as gone:
                self._supersede(gone)
            case Configured() as configured:
                if self._configured not in ("", configured.configuration_hash):
                    self._changed.update(self._takes)
                self._configured = configured.configuration_hash
            case TakesRepeated() as repetition if repetition.step > self._done:
                self._repeat(repetition, message.address)
            case StepDone() as done if done.step > self._done:
                self._end(done.step, message.address)
            case _:
                pass

    def finish(self, coverage: folds.Coverage) -> None:
        if folds.starts_complete(coverage["ledger"]):
            for what, at in self._early:
                self.result.add_violation(what, "ledger", at)

    def _supersede(self, gone: Superseded) -> None:
        key = gone.step, gone.update
        numbers = self._takes.get(key, [])
        numbers[:] = [number for number in numbers if number not in gone.micro_batches]
        # A restarted trainer records the repetitions of the remaining takes again.
        self._repeated = {r for r in self._repeated if r[:2] != key}

    def _repeat(self, repetition: TakesRepeated, at: Address) -> None:
        key, epochs = (repetition.step, repetition.update), self.policy.epochs
        self._repeated.add((*key, repetition.epoch))
        self.result.counts["repetitions"] += 1
        if repetition.epoch < 1 or (epochs and repetition.epoch >= epochs):
            what = f"epoch {repetition.epoch} of {epochs}, counted from 0"
            self._add(repetition.step, f"{_update_of(key)} is repeated as {what}", at)
        trained = self._takes.get(key, [])
        if list(repetition.micro_batches) != trained and key not in self._changed:
            what = f"epoch {repetition.epoch} repeats takes {_listed(repetition.micro_batches)}"
            self._add(repetition.step, f"{_update_of(key)}: {what}, not {_listed(trained)}", at)

    def _end(self, step: int, at: Address) -> None:
        for key in sorted(key for key in self._takes if key[0] <= step):
            del self._takes[key]
            for epoch in range(1, self.policy.epochs):
                if (*key, epoch) not in self._repeated:
                    self._add(step, f"{_update_of(key)}: epoch {epoch} is not recorded", at)
        self._repeated = {key for key in self._repeated if key[0] > step}
        self._changed = {key for key in self._changed if key[0] > step}
        self._done = step

    def _add(self, step: int, what: str, at: Address) -> None:
        first = self.ledger.first_step
        # Some takes of the first step that was read may be missing, so `finish` decides.
        if first is None or step <= first:
            self._early.append((what, at))
        else:
            self.result.add_violation(what, "ledger", at)


def _update_of(key: UpdateOfStep) -> str:
    return f"step {key[0]}, update {key[1]}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
