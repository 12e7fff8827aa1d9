"""Stepped runs that are stopped in their course and resumed with changed settings: whether they
hang, admit more groups than their steps need, or ignore a change.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.settings import TrainerSettings
from rollstream.errors import RollstreamError
from rollstream.storage.archive.log_view import LogView
from rollstream.streams.records import Admitted, GroupClosed, Prompt, Record, StepDone, Take
from testbed.memory import MemoryBus, MemoryStore
from testbed.stepped.baton import Baton, Stuck
from testbed.stepped.findings import policy_of
from testbed.stepped.run import RUN, Shape, SteppedRun, configuration_of, trainer_settings

Kind = TypeVar("Kind", bound=Record)
ENDS_S = 600.0  # of the run's own clock: a stepped run of ten steps takes less than one minute


@dataclass
class ResumeFindings:
    """What a resumed run did; a line each, empty where it kept its word."""

    hangs: list[str] = field(default_factory=list[str])
    ended: list[str] = field(default_factory=list[str])
    floods: list[str] = field(default_factory=list[str])
    ignored: list[str] = field(default_factory=list[str])
    audited: list[str] = field(default_factory=list[str])
    since: int = 0
    """The group from which on the changed settings hold."""

    def lines(self) -> list[str]:
        return [*self.hangs, *self.ended, *self.floods, *self.ignored, *self.audited]


class BoundedRun(SteppedRun):
    """Raises `Stuck` at a time of its clock."""

    def _tend(self, names: tuple[str, ...]) -> None:
        if self.baton.now_s > ENDS_S:
            raise Stuck(f"not done after {ENDS_S:g} s")
        super()._tend(names)


@dataclass(frozen=True)
class LogCounts:
    """Counts of a log: groups by how they are, and prompts."""

    prompts: int
    admitted: int
    closed: Counter[str]
    trained: dict[int, int]
    """Groups by step."""
    done: int
    """The last step that the ledger states to be finished."""

    @property
    def open(self) -> int:
        return self.admitted - self.closed.total() - sum(self.trained.values())


def resumed(first: Shape, then: Shape, stop_at: int, folder: Path, seed: int = 1) -> ResumeFindings:
    """Stops a run at this step, and continues it to its end as `then`."""
    bus, store, found = MemoryBus(), MemoryStore(), ResumeFindings()
    run = BoundedRun(lambda: (bus, store), folder, Baton(seed), first)
    run.run_to(stop_at)
    before = counts_of(run)
    run.shape = then
    run.baton.now_s = 1.0
    try:
        run.run()
    except Stuck as stuck:
        found.hangs.append(f"{stuck}: {counts_of(run)}")
        return found
    except RollstreamError as error:
        found.ended.append(f"{type(error).__name__}: {error}")
        return found
    settings, after = trainer_settings(then), counts_of(run)
    _look_for_floods(found, settings, before, after)
    _look_for_ignored(found, then, settings, before, run)
    max_lags = {configuration_of(shape): shape.max_lag for shape in (first, then)}
    policy = replace(policy_of(then), max_lags=max_lags)
    for one in Audit(bus, store, RUN, policy).check():
        found.audited += [f"{one.number} {o.where}: {o.what}" for o in one.offenders]
    return found


def counts_of(run: SteppedRun) -> LogCounts:
    trained = Counter[int]()
    for take in records(run, "ledger", Take):
        trained[take.step] += len(take.groups)
    closed = Counter[str](one.reason for one in records(run, "ledger", GroupClosed))
    prompts = max((one.group for one in records(run, "prompts", Prompt)), default=-1) + 1
    admitted = len(records(run, "admissions", Admitted))
    done = max((one.step for one in records(run, "ledger", StepDone)), default=0)
    return LogCounts(prompts, admitted, closed, dict(trained), done)


def records(run: SteppedRun, topic: str, kind: type[Kind]) -> list[Kind]:
    found = LogView(run.bus, run.store, RUN).topic(topic).records()
    return [one.record for one in found if isinstance(one.record, kind)]


def _look_for_floods(
    found: ResumeFindings, settings: TrainerSettings, before: LogCounts, after: LogCounts
) -> None:
    settled = sum(groups for step, groups in before.trained.items() if step <= before.done)
    size, ahead = settings.groups_per_step, range(before.done + 1, settings.steps + 1)
    left = sum(max(size, before.trained.get(step, 0)) for step in ahead)
    needed = max(settled + left, before.admitted - before.closed.total())
    if after.admitted - after.closed.total() > needed:
        found.floods.append(f"{after.admitted} admitted, {after.closed} closed, {needed} needed")
    expired = after.closed["expired"] - before.closed["expired"]
    if expired > before.open:
        found.floods.append(f"{expired} groups expired, of which {before.open} were open before")


def _look_for_ignored(
    found: ResumeFindings,
    then: Shape,
    settings: TrainerSettings,
    before: LogCounts,
    run: SteppedRun,
) -> None:
    after, last = counts_of(run), max(before.done, settings.steps)
    if after.done != last:
        found.ignored.append(f"the last step is {after.done}, not {last}")
    for step, groups in after.trained.items():
        if step > max(before.trained, default=0) and groups != settings.groups_per_step:
            found.ignored.append(f"step {step} has {groups} groups")
    changed = [one for one in records(run, "admissions", Admitted) if one.settings is not None]
    found.since = min((one.group for one in changed), default=before.prompts)
    if found.since > before.prompts:
        found.ignored.append(f"from group {found.since} on, {before.prompts} were published")
    sampling, more = then.of("sampling"), then.of("task").get("redundancy", 0)
    for prompt in records(run, "prompts", Prompt):
        if prompt.group < found.since:
            continue
        if prompt.samples != settings.samples_per_group + more:
            found.ignored.append(f"group {prompt.group} has {prompt.samples} samples")
        for name, value in sampling.items():
            if getattr(prompt.sampling, name) != value:
                found.ignored.append(f"group {prompt.group} has another {name} than {value}")
