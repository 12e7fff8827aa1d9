"""The faults of a finished run: the audit's findings, and counts that need no audit."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.poisoned_takes import SupersededTakes
from rollstream.consumers.trainer.data.prepare import training_rule
from rollstream.storage.log_view import LogView
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.streams.records import GroupClosed, Prompt, Record, StepDone, Superseded, Take
from testbed.stepped.run import MAX_LAG, RUN, Shape, trainer_settings

Kind = TypeVar("Kind", bound=Record)


@dataclass
class Findings:
    """`wrong` is empty where every promise was kept."""

    wrong: list[str] = field(default_factory=list[str])
    trained: int = 0
    closed: Counter[str] = field(default_factory=Counter[str])
    poisoned: dict[int, str] = field(default_factory=dict[int, str])
    """Groups of superseded takes that ended dead, and why."""


def policy_of(shape: Shape) -> AuditPolicy:
    """The settings of the run that audit uses."""
    return AuditPolicy(
        MAX_LAG,
        shape.keep_version,
        rule=training_rule(trainer_settings(shape), MAX_LAG, shape.keep_version),
        checkpoint_every=shape.checkpoint_every,
    )


def findings(bus: Bus, store: ObjectStore, shape: Shape) -> Findings:
    """Checks invariants 1 to 7, and that this run trained as much as any other with its
    settings.
    """
    found = Findings()
    for tally in Audit(bus, store, RUN, policy_of(shape)).check():
        found.wrong += [f"{tally.number} {o.where}: {o.what}" for o in tally.offenders]
        found.wrong += [f"{tally.number} not checked: {what}" for what in tally.unchecked]

    def records(topic: str, kind: type[Kind]) -> list[Kind]:
        found = LogView(bus, store, RUN).topic(topic).records()
        return [one.record for one in found if isinstance(one.record, kind)]

    superseded = SupersededTakes()
    for record in records("ledger", Superseded):
        superseded.apply(record)
    takes = [superseded.effective(take) for take in records("ledger", Take)]
    found.poisoned = {group: why for group, (_, why) in superseded.poisoned.items()}
    used = Counter(member.trajectory for take in takes for member in take.members)
    found.wrong += [f"{t} was trained {count} times" for t, count in used.items() if count > 1]
    found.trained = sum(len(take.groups) for take in takes)
    if found.trained != shape.steps * shape.groups:
        found.wrong.append(f"{found.trained} groups trained, not {shape.steps * shape.groups}")
    found.closed = Counter(record.reason for record in records("ledger", GroupClosed))
    hashes: dict[int, set[str]] = {}
    for done in records("ledger", StepDone):
        hashes.setdefault(done.step, set()).add(done.state_hash)
    if sorted(hashes) != list(range(1, shape.steps + 1)):
        found.wrong.append(f"steps done: {sorted(hashes)}")
    found.wrong += [f"step {s} was repeated to other bits" for s in hashes if len(hashes[s]) > 1]
    prompts = [record.group for record in records("prompts", Prompt)]
    if prompts and prompts != list(range(prompts[0], prompts[0] + len(prompts))):
        found.wrong.append(f"prompts are repeated or skipped: {prompts}")
    return found
