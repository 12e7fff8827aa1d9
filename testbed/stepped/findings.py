"""The faults of a finished run: the audit's findings, and counts that need no audit."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rollstream.consumers.audit.audit import END_ORDER, Audit
from rollstream.consumers.audit.folds import InvariantResult
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.audit.verdict import Verdict, basis_of
from rollstream.consumers.trainer.data.poisoned_takes import SupersededTakes
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.reader import from_begin
from rollstream.streams.records import GroupClosed, Prompt, Record, StepDone, Superseded, Take
from rollstream.streams.topics import ARCHIVED_TOPICS
from testbed.stepped.run import RUN, Shape, trainer_settings

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
        shape.max_lag,
        shape.keep_version,
        rule=training_rule(trainer_settings(shape), shape.max_lag, shape.keep_version),
        checkpoint_every=shape.checkpoint_every,
    )


class ShortLog(BusWrapper):
    """A log as it was when these were its ends."""

    def __init__(self, below: Bus, ends: Mapping[str, Mapping[int, int]]) -> None:
        super().__init__(below)
        self._ends = ends

    def end(self, topic: str) -> dict[int, int]:
        return super().end(topic) | dict(self._ends.get(topic, {}))


def ends_at(bus: Bus, store: ObjectStore, run: str, share: float) -> dict[str, dict[int, int]]:
    """The ends of all topics after this share of the time in which the ledger was written. What was
    truncated since and not archived was never there.
    """
    view = LogView(bus, store, run)
    times = [one.timestamp_ms for one in view.topic("ledger").messages()] or [0]
    limit = times[0] + share * (times[-1] - times[0])
    found: dict[str, dict[int, int]] = {}
    for topic in END_ORDER:
        found[topic] = dict.fromkeys(range(view.partitions(topic)), 0)
        for one in view.topic(topic).messages():
            if one.timestamp_ms <= limit:
                found[topic][one.address.partition] = one.address.offset + 1
        if topic in ARCHIVED_TOPICS:
            continue
        removed = bus.begin(topic)
        for partition, begin in from_begin(bus, topic).items():
            # A process killed between `truncate`'s commit and the removal leaves records below the
            # committed begin. A reader from 0 on meets them if none before them was removed.
            if removed[partition]:
                found[topic][partition] = max(begin.offset, found[topic][partition])
    return found


def continued_results(
    bus: Bus, store: ObjectStore, policy: AuditPolicy, share: float, run: str = RUN
) -> list[InvariantResult]:
    """An audit that continues from the verdict of one at that time."""
    states: list[bytes | None] = []
    early = Audit(ShortLog(bus, ends_at(bus, store, run, share)), store, run, policy)
    early.check(None, states.append)
    (state,) = states
    assert state is not None, "the state holds a number that MessagePack cannot"
    verdict = Verdict(basis_of(run, policy), early.topics, state)
    return Audit(bus, store, run, policy).check(verdict)


def differing(whole: list[InvariantResult], continued: list[InvariantResult]) -> list[str]:
    """Where two audits of one log differ, but for how they read it."""
    found: list[str] = []
    for one, other in zip(whole, continued, strict=True):
        for name in ("state", "violations", "offenders", "unchecked", "notes", "counts"):
            here, there = getattr(one, name), getattr(other, name)
            if name == "counts":
                here, there = (
                    {k: n for k, n in of.items() if n and not k.startswith("from the ")}
                    for of in (here, there)
                )
            elif name in ("offenders", "unchecked", "notes"):
                here, there = sorted(map(str, here)), sorted(map(str, there))
            if here != there:
                found.append(f"{one.number} {name}: {here} whole, {there} continued")
    return found


def findings(bus: Bus, store: ObjectStore, shape: Shape) -> Findings:
    """Checks invariants 1 to 7, and that this run trained as much as any other with its
    settings.
    """
    found, policy = Findings(), policy_of(shape)
    whole = Audit(bus, store, RUN, policy).check()
    for result in whole:
        found.wrong += [f"{result.number} {o.where}: {o.what}" for o in result.offenders]
        found.wrong += [f"{result.number} not checked: {what}" for what in result.unchecked]
    for share in (0.3, 0.7):
        continued = continued_results(bus, store, policy, share)
        found.wrong += [f"continued at {share}: {one}" for one in differing(whole, continued)]

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
