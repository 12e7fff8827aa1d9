"""The share of planted violations that audit finds, and its findings in healthy runs
(docs/reference/audit.md).

`audit_found` plants every kind of violation of `testbed/violations/harness.py` into a copy of a
healthy run. Several seeds per kind draw which bit, token or index changes. The value is the share
of kinds that audit finds and names; kinds that a log cannot show count as missed and are printed.
`audit_false` audits seeded runs in memory, most of them with kills and freezes, and counts the runs
in which audit reports a violation or something that it could not check. `audit_continued` is the
CPU time of an audit that continues from a verdict on the first 95 % of a run, reading and writing
the verdict included, over that of a whole one.
"""

import dataclasses
import logging
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone, paired
from benchmarks.resume.promise_archive import (
    GROUPS,
    MAX_LAG,
    RUN,
    SAMPLES,
    TAKES,
    record_run,
)
from rollstream.consumers.audit.audit import Audit, continued_audit
from rollstream.consumers.audit.own_verdicts import read_own
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.audit.verdict import Verdict, basis_of, write_verdict
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.storage.archive.log_view import LogView
from rollstream.streams.bus import AppendEntry
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus, MemoryStore
from testbed.stepped import batches, trials
from testbed.stepped.findings import ShortLog
from testbed.violations import harness, healthy_run

SEEDS, SEEDS_QUICK = 3, 1
KILLED, KILLED_QUICK = 150, 15
CALM, CALM_QUICK = 50, 5
FOUND_GOAL = 0.95
STEPS, STEPS_QUICK = 200, 40  # of 64 trajectories of 512 tokens
TOKENS, PAIRS, JUDGED = 512, 5, 0.95
CONTINUED_GOAL = 0.25


def cases(quick: bool) -> Iterator[Case]:
    """Yields the share found, then the false findings."""
    logging.disable(logging.WARNING)  # roles of a killed run log an error about what was killed
    yield _found(SEEDS_QUICK if quick else SEEDS)
    yield _false(KILLED_QUICK if quick else KILLED, CALM_QUICK if quick else CALM)
    yield _continued(STEPS_QUICK if quick else STEPS)


def _found(seeds: int) -> Case:
    with tempfile.TemporaryDirectory(prefix="rollstream-audit-") as scratch:
        healthy = healthy_run.make_run(Path(scratch) / "healthy")
        wrong: list[str] = []
        count = 0
        for kind in harness.kinds():
            count += 1
            found = (harness.missed(kind, healthy, Path(scratch), seed) for seed in range(seeds))
            wrong += [why for why in found if why][:1]
        hidden = [f"{name} ({why})" for name, why, _ in harness.unseen(healthy, Path(scratch))]
    share = (count - len(wrong)) / (count + len(hidden))
    note = f"{count + len(hidden)} kinds, {seeds} seeds each; no log shows: {'; '.join(hidden)}"
    if wrong:
        note = f"{note}; missed: {'; '.join(wrong)}"
    return alone("audit_found", share, "of kinds", at_least=FOUND_GOAL, note=note)


def _false(killed: int, calm: int) -> Case:
    reported = batches.seeded_batches(killed)
    quiet = (trials.seeded(seed, calm=True) for seed in range(calm))
    wrong = [*reported.wrong, *(str(trial) for trial in quiet if trial.found.wrong)]
    happened = ", ".join(f"{n} {what}" for what, n in sorted(reported.happened.items()))
    note = f"{killed + calm} runs: {happened}"
    if wrong:
        note = f"{note}; first: {wrong[0]}"
    return alone("audit_false", len(wrong), "runs", at_most=0, note=note)


def _continued(steps: int) -> Case:
    bus, store = _recorded(steps), MemoryStore()
    rule = training_rule(TrainerSettings(), MAX_LAG, keep_version=False)
    policy = AuditPolicy(MAX_LAG, rule=rule)
    done = int(steps * JUDGED)
    ends = {
        "ledger": {0: 1 + done * (TAKES + 1)},
        "admissions": {0: 1 + done * GROUPS},
        "trajectories": {0: done * GROUPS * SAMPLES},
    }
    states: list[bytes | None] = []
    early = Audit(ShortLog(bus, ends), store, RUN, policy)
    early.check(None, states.append)
    (state,) = states
    assert state is not None, "the state holds a number that MessagePack cannot"
    before = Verdict(basis_of(RUN, policy), early.topics, state)
    place = f"the benchmark {uuid.uuid4()}"  # a verdict of another benchmark is not read
    write_verdict(before, place)
    size = len(read_own(RUN, place) or b"")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(PAIRS):
        for whole in (True, False):
            write_verdict(before, place)
            started = time.process_time()
            _, results = continued_audit(lambda: Audit(bus, store, RUN, policy), whole, place)
            seconds[whole].append(time.process_time() - started)
            assert not sum(result.violations for result in results), results
            assert results[1].counts["trained"] == steps * GROUPS, "both count the whole run"
    trajectories = steps * GROUPS * SAMPLES
    note = f"{trajectories:,} trajectories, {JUDGED:.0%} judged before; the verdict has "
    note += f"{size / trajectories:.0f} bytes a trajectory; CPU time"
    case = paired(
        "audit_continued", seconds[False], "s", "whole audit", seconds[True], CONTINUED_GOAL, note
    )
    return dataclasses.replace(case, met=(case.ratio or 0.0) <= CONTINUED_GOAL)


def _recorded(steps: int) -> MemoryBus:
    """The log of a run of this many steps."""
    bus, store, topics = MemoryBus(), MemoryStore(), ("admissions", "ledger", "trajectories")
    bus.create([topic for topic in catalogue(1) if topic.name in topics])
    record_run(store, TOKENS, steps, partitions=1)
    view = LogView(None, store, RUN)
    for topic in topics:
        at, end = 0, view.end(topic)[0]
        while at < end:
            found = view.read(topic, {0: at}, records_max=512)
            bus.append(topic, [AppendEntry(message.key, message.value, 0) for message in found])
            at = found[-1].offset + 1
    return bus
