"""Each kind of violation planted into a healthy log: audit finds it, and names the invariant and
the position.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.consumers.audit.exactly_once import AnnotationAudit
from rollstream.consumers.audit.folds import AuditMessage, InvariantResult, LedgerIndex
from rollstream.streams.bus import AppendEntry
from rollstream.streams.codec import encode, record_hash
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import (
    Admitted,
    Annotation,
    GroupClosed,
    Opened,
    Record,
    StepDone,
    Superseded,
    Take,
    TakesRepeated,
)
from rollstream.streams.values import (
    Address,
    AnnotationUsed,
    Branch,
    GroupMembers,
    Span,
    Turn,
    Version,
)
from testbed.violations.healthy_run import (
    KEEP,
    POLICY,
    PROMPT,
    TOKENS,
    admitted,
    audited,
    completion,
    done,
    open_run,
    order,
    partial,
    prompt,
)
from testbed.violations.planted import append_raw, first
from tests.audit.test_archived_violations import archive

CLOSED = {"filtered": 1, "dead": 1, "expired": 1}
TOKENS_MASKED = 6  # of two completions, half of each


def places(result) -> list[str]:
    return [f"{offender.where}: {offender.what}" for offender in result.offenders]


def test_several_spans_violate_keep_version(folder: Path) -> None:
    """Invariant 4: spans of two versions are right in flight and wrong under `keep_version`, once
    trained.
    """
    run = open_run(folder, 2)
    run.train(3, {6: [run.complete(completion(6, index, 1, 2)) for index in (0, 1)]})
    run.bus.close()
    found = audited(folder, KEEP)[4]
    assert (found.violations, found.counts["of several"]) == (2, 6)
    assert "has 2 spans (v00000001-t0001, v00000002-t0001)" in places(found)[0]


def test_masked_tokens_violate_keep_version(folder: Path) -> None:
    """Invariant 5: it drops the whole trajectory."""
    run = open_run(folder, 2)
    members = [run.complete(completion(6, index, 0, 2)) for index in (0, 1)]
    run.train(3, {6: members}, counts={"masked_tokens": TOKENS_MASKED})
    run.publish_version(3, None)
    run.bus.close()
    assert audited(folder)[5].violations == 0
    assert audited(folder, KEEP)[5].violations == 2


def test_a_group_of_one_is_reported_if_equal_rewards_are_filtered(folder: Path) -> None:
    """Invariant 1: one reward is equal to itself."""
    run = open_run(folder, 2)
    run.prompts.append([("40", replace(prompt(40), samples=1))])
    at = Address(0, run.bus.end("prompts")[0] - 1)
    run.admissions.append([("40", replace(admitted(40), trajectories=("40.0",), prompt=at))])
    run.order(order(40, 0))
    five = [first(run, "5.0"), first(run, "5.1")]
    run.train(3, {5: five, 40: [run.complete(completion(40, 0, 2, reward=1.0))]})
    run.publish_version(3, None)
    run.bus.close()
    found = audited(folder)[1]
    assert [offender.what for offender in found.offenders] == [
        "group 40 was trained, and all its rewards are 1"
    ]


def repeated_run(folder: Path, *again: Record) -> list[str]:
    """Step 3 of two takes, with these records between them and its end; audited as one of a run
    with `trainer.epochs = 3`, whose steps 1 and 2 repeated their only take.
    """
    run = open_run(folder, 2)
    five, six = (
        [first(run, "5.0"), first(run, "5.1")],
        [run.complete(completion(6, index, 2)) for index in (0, 1)],
    )
    for number, members in enumerate((five, six)):
        group = GroupMembers(5 + number, tuple(members))
        take = Take(3, 0, number, tuple(members), (group,), (), run.read(), Version(2, 1))
        run.record(take)
    counts = {"groups": 2, "trained": 4}
    run.record(*again, done(3, 2, 4, counts=counts))
    run.publish_version(3, None)
    run.bus.close()
    offenders = audited(folder, dataclasses.replace(POLICY, epochs=3))[2].offenders
    return [one.what for one in offenders if one.what.startswith("step 3")]


@pytest.mark.parametrize(
    ("again", "found"),
    [
        ([(1, (0, 1)), (2, (0, 1))], []),
        ([(1, (0, 1))], ["epoch 2 is not recorded"]),
        ([], ["epoch 1 is not recorded", "epoch 2 is not recorded"]),
        ([(1, (0, 1)), (2, (0,))], ["epoch 2 repeats takes 0, not 0, 1"]),
        ([(1, (1, 0)), (2, (0, 1))], ["epoch 1 repeats takes 1, 0, not 0, 1"]),
        ([(1, (0, 1)), (2, (0, 1)), (2, (0, 1))], []),
    ],
)
def test_a_step_of_three_epochs_repeats_all_its_takes_twice(
    folder: Path, again: list[tuple[int, tuple[int, ...]]], found: list[str]
) -> None:
    """Invariant 2: every training of a trajectory is on record."""
    records = [TakesRepeated(3, 0, epoch, numbers) for epoch, numbers in again]
    assert repeated_run(folder, *records) == [f"step 3, update 0: {what}" for what in found]


def test_an_epoch_too_many_is_reported(folder: Path) -> None:
    records = [TakesRepeated(3, 0, epoch, (0, 1)) for epoch in (1, 2, 3)]
    assert repeated_run(folder, *records) == [
        "step 3, update 0 is repeated as epoch 3 of 3, counted from 0"
    ]


def test_a_repetition_is_recorded_again_without_a_take_that_was_superseded(folder: Path) -> None:
    """Takes that the trainer could not compute in a later epoch (invariant 12)."""
    gone = Superseded(3, 0, (1,), (6,), "no memory")
    before = [TakesRepeated(3, 0, 1, (0, 1)), gone]
    records = [*before, TakesRepeated(3, 0, 1, (0,)), TakesRepeated(3, 0, 2, (0,))]
    assert repeated_run(folder, *records) == []


def test_a_repetition_before_a_take_was_superseded_does_not_count(folder: Path) -> None:
    gone = Superseded(3, 0, (1,), (6,), "no memory")
    records = [TakesRepeated(3, 0, 1, (0, 1)), gone, TakesRepeated(3, 0, 2, (0,))]
    assert repeated_run(folder, *records) == ["step 3, update 0: epoch 1 is not recorded"]


def test_one_sample_that_max_lag_left_of_a_group_is_no_group_of_equal_rewards(folder: Path) -> None:
    run = open_run(folder, 2)
    members = [run.complete(completion(6, 0, 0)), run.complete(completion(6, 1, 2))]
    five = [first(run, "5.0"), first(run, "5.1")]
    run.train(3, {5: five, 6: members}, untrained=("6.0",))
    run.publish_version(3, None)
    run.bus.close()
    assert places(audited(folder)[1]) == []


def test_of_many_violations_the_first_ten_are_shown(folder: Path) -> None:
    run = open_run(folder, 2)
    run.record(*(GroupClosed(100 + n, "dead", "", 3) for n in range(25)))
    run.bus.close()
    found = audited(folder)[1]
    assert (found.violations, len(found.offenders)) == (25, 10)


def test_a_zombie_and_a_repeat_are_void_and_no_violation(folder: Path) -> None:
    """Invariant 7: records behind the fence change nothing."""
    append = open_run(folder, 2)
    for number in (5, 6):
        append_raw(append, "ledger", GroupClosed(0, "dead", "", 3), "trainer", 1, number)
    append_raw(append, "ledger", Opened("trainer", 2), "trainer", 2, 0)
    append.bus.close()
    found = audited(folder)
    assert all(result.state == "kept" for result in found.values())
    assert found[7].counts["void"] == 3


def test_a_step_repeated_with_other_bits_is_reported_as_a_fork(folder: Path) -> None:
    run = open_run(folder, 2)
    counts = {"trained": 4, "groups": 2, "masked_tokens": 0} | CLOSED
    metrics = {"tokens_trained": 24.0}
    run.record(StepDone(2, Version(2, 1), "f" * 32, 1, metrics, counts, 1.0))
    run.bus.close()
    found = audited(folder)
    assert all(result.state == "kept" for result in found.values())
    assert found[6].notes == ["ledger 0:10: step 2 was repeated with another state hash"]


def test_audit_writes_nothing(folder: Path) -> None:
    """It does not even dead-letter undecodable bytes."""
    run = open_run(folder, 2)
    run.bus.append("trajectories", [AppendEntry(b"6", b"rubbish", 0)])
    run.bus.close()
    found = audited(folder)
    assert found[0].counts["no records"] == 1
    assert found[0].state == "kept"
    run = open_run(folder, 3)
    assert run.bus.end("dead") == {0: 0}
    run.bus.close()


def test_the_healthy_run_is_healthy(folder: Path) -> None:
    found = audited(folder)
    assert [result.state for result in found.values()] == ["kept"] * 9
    assert found[1].counts["admitted"] == len({record.group for record in admissions(folder)}) == 9


def admissions(folder: Path) -> list[Admitted]:
    run = open_run(folder, 2)
    read = TopicReader(run.bus, "admissions", from_begin(run.bus, "admissions"))
    records = [one.record for one in read.read_to(run.bus.end("admissions"))]
    run.bus.close()
    return [record for record in records if isinstance(record, Admitted)]


def test_resumed_tokens_of_a_version_that_was_never_compared_are_counted(folder: Path) -> None:
    """A rollout publishes a partial under a version and ends before its `applied`. Another attempt
    completes the trajectory, and the log cannot show which rollout served the version.
    """
    run = open_run(folder, 2)
    for group in (5, 6):
        for index in (0, 1):
            run.order(order(group, index, attempt=2))
    run.train(3, {})
    spans = (Span(0, TOKENS // 2, Version(2, 1)), Span(TOKENS // 2, TOKENS, Version(3, 2)))
    members = [run.complete(completion(6, index, 2, attempt=2, spans=spans)) for index in (0, 1)]
    run.train(4, {6: members})
    run.publish_version(4, None)  # which rollout-0 applied
    run.bus.close()
    found = audited(folder)[3]
    assert found.counts["versions taken and not compared"] == 1, places(found)
    assert found.violations == 0, places(found)


def test_an_annotation_that_the_trainer_refuses_is_not_the_first_one() -> None:
    """The trainer ignores a value beyond its bounds and uses the next one: no violation."""
    notes = [Annotation("6.0", 6, "reward", np.array([v], np.float32), "judge") for v in (2e6, 0.5)]
    used = AnnotationUsed("6.0", "reward", Address(0, 1), record_hash(encode(notes[1])))
    fold = AnnotationAudit(LedgerIndex(notes={("6.0", "reward"): used}), InvariantResult(2, ""))
    for offset, note in enumerate(notes):
        at, data = Address(0, offset), encode(note)
        fold.apply(AuditMessage("annotations", at, note, None, "", False, data))
    assert fold.result.violations == 0


def abandons_its_first_turn() -> dict[str, Any]:
    """The fields of a completion of two turns with three generated tokens each."""
    edges = ((0, PROMPT, PROMPT + 3), (PROMPT + 3, PROMPT + 3, PROMPT + TOKENS))
    return {
        "turns": tuple(Turn(str(n), "", *edges[n], "stop", 0.0, 0.0) for n in (0, 1)),
        "branches": (Branch(PROMPT + 3, PROMPT - 1),),
        "abandoned": (0,),
    }


def test_tokens_of_abandoned_turns_count_as_neither_trained_nor_masked(folder: Path) -> None:
    """Invariants 5 and 13, in the log and in the archive."""
    run, left = open_run(folder, 2), abandons_its_first_turn()
    members = [run.complete(completion(6, index, 2, **left)) for index in (0, 1)]
    run.train(3, {6: members}, tokens=6, counts={"abandoned_tokens": 6})
    run.publish_version(3, None)
    run.bus.close()
    logged = audited(folder)[5]
    assert logged.violations == 0, places(logged)
    assert logged.counts["of abandoned turns"] == 6
    archive(folder)
    archived = audited(folder)[5]
    assert (archived.counts, archived.violations) == (logged.counts, 0)


def test_training_abandoned_turns_is_a_violation(folder: Path) -> None:
    run, left = open_run(folder, 2), abandons_its_first_turn()
    members = [run.complete(completion(6, index, 2, **left)) for index in (0, 1)]
    run.train(3, {6: members})
    run.publish_version(3, None)
    run.bus.close()
    assert "states 12 tokens trained, not 6" in places(audited(folder)[5])[0]


def test_an_episode_that_was_tried_again_after_its_resume_has_not_the_turns_of_its_chain(
    folder: Path,
) -> None:
    """The failed try's turns are in the chain that attempt 2 was resumed from; the record has those
    of the next try.
    """
    run, whole = open_run(folder, 2), abandons_its_first_turn() | {"abandoned": ()}
    members = [run.complete(completion(6, 0, 2, **whole))]
    lost = completion(6, 1, 2, tokens=np.arange(50, 59, dtype=np.uint32), **whole)
    at = run.gain(partial(lost, PROMPT, PROMPT + 3, None))
    run.order(order(6, 1, 2, kind="resume", partial=at, first=at))
    again = completion(6, 1, 2, attempt=2, failures=("agent: exit code 1",), **whole)
    members.append(run.complete(again))
    run.train(3, {6: members})
    run.publish_version(3, None)
    run.bus.close()
    results = audited(folder)
    every = [what for number in results for what in places(results[number])]
    assert not [what for what in every if "6.1" in what]
