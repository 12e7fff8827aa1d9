"""One rule decides whether a trajectory can be trained (invariant 12); no appended record ends the
trainer.
"""

import threading

import numpy as np
import pytest

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.settings import ArchiveSettings
from rollstream.consumers.trainer.data.lags import lags_of, mask_by_lag
from rollstream.consumers.trainer.data.metrics import OTHER_TASKS, TASKS_MAX, StepMetrics
from rollstream.consumers.trainer.data.sample import admitted_sample
from rollstream.consumers.trainer.data.selection import UpdateProgress
from rollstream.consumers.trainer.learn.row_layout import token_rows
from rollstream.streams.admissible import (
    REFUSAL_KINDS,
    BelievedVersions,
    TrainingBounds,
    believed_terms,
    refusal,
)
from rollstream.streams.records import GroupClosed, StepDone, Take
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Span, Version
from rollstream.streams.writer import publish
from testbed.stepped.hand_fed_trainer import HandFed, completion

BOUNDS = TrainingBounds(vocabulary=32, context_max=8)
V0, V1 = Version(0, 1), Version(1, 1)
HUGE = 1 << 70
HOSTILE = {
    "a token beyond the vocabulary": ({"tokens": np.array([3, 4, 99_999, 6], np.uint32)}, "tokens"),
    "longer than the context": (
        {"tokens": np.ones(60_014, np.uint32),
         "sources": np.array([0, 1, 1, *[2] * 60_011], np.uint8)}, "tokens"),
    "a source that is none": ({"sources": np.array([0, 7, 1, 1], np.uint8)}, "arrays"),
    "fewer sources than tokens": ({"sources": np.array([0, 1], np.uint8)}, "arrays"),
    "fewer log-probabilities": ({"logprobs": np.zeros(1, np.float32)}, "arrays"),
    "its first token generated": ({"sources": np.array([1, 0, 0, 1], np.uint8)}, "arrays"),
    "nothing generated": (
        {"sources": np.zeros(4, np.uint8), "logprobs": np.zeros(0, np.float32)}, "arrays"),
    "spans that overlap": ({"spans": (Span(0, 3, V0), Span(3, 1, V0), Span(1, 2, V0))}, "spans"),
    "an empty span": ({"spans": (Span(0, 0, V0), Span(0, 2, V0))}, "spans"),
    "spans beyond the tokens": ({"spans": (Span(0, HUGE, V0),)}, "spans"),
    "no span": ({"spans": ()}, "spans"),
    "a version of the future": ({"spans": (Span(0, 2, Version(7, 1)),)}, "version"),
    "a version of 22 digits": ({"spans": (Span(0, 2, Version(HUGE, 1)),)}, "version"),
    "a version of 4 000 digits": ({"spans": (Span(0, 2, Version(10**4000, 1)),)}, "version"),
    "a version below 0": ({"spans": (Span(0, 2, Version(-1, 1)),)}, "version"),
    "a log-probability that is no number": (
        {"logprobs": np.array([-1, np.nan], np.float32)}, "logprobs"),
    "a log-probability of -inf": ({"logprobs": np.array([-np.inf, -1], np.float32)}, "logprobs"),
    "a probability above 1": ({"logprobs": np.array([5.0, -1], np.float32)}, "logprobs"),
    "a temperature of 1e-40": ({"temperature": 1e-40}, "temperature"),
    "greedy": ({"temperature": 0.0}, "temperature"),
    "a temperature of 1e30": ({"temperature": 1e30}, "temperature"),
    "a reward of 1e39": ({"reward": 1e39}, "reward"),
    "a score of -1e300": ({"scores": {"style": -1e300}}, "reward"),
    "a task name of a megabyte": ({"task": "x" * (1 << 20)}, "label"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "kind"), HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_trained_is_refused_by_kind(changed, kind):
    refused = refusal(completion("0.1", **changed), BOUNDS, BelievedVersions(1, ((0, 1),)))
    assert refused is not None
    assert refused.kind == kind
    assert refused.kind in REFUSAL_KINDS


@pytest.mark.parametrize("advantage", ["grpo", "centred", "leave_one_out"])
def test_hostile_members_are_dead_and_the_living_are_trained(tmp_path, advantage):
    """Every hostile record is the third member of a group of three."""
    settings = {"groups_per_step": len(HOSTILE), "steps": 1, "advantage": advantage}
    run = HandFed(tmp_path, max_lag=2, bounds=BOUNDS, settings=settings)
    for group, (changed, _) in enumerate(HOSTILE.values()):
        run.admit(group, samples=3)
        run.finish(completion(f"{group}.0"), completion(f"{group}.1"))
        run.finish(completion(f"{group}.2", **changed))
    assert run.train()
    (done,) = run.ledger(StepDone)
    found = {name[8:]: n for name, n in done.counts.items() if name.startswith("refused_")}
    kinds = [kind for _, kind in HOSTILE.values()]
    assert found == {kind: kinds.count(kind) for kind in kinds}
    assert done.counts["trained"] == 2 * len(HOSTILE)
    assert done.counts["dead_members"] == len(HOSTILE)
    assert run.offences() == []


def test_a_group_of_refused_members_ends_dead_with_the_reason(tmp_path):
    run = HandFed(tmp_path, bounds=BOUNDS, settings={"steps": 1})
    run.admit(0)
    run.finish(completion("0.0"), completion("0.1", temperature=1e-40))
    run.feed(1, 2)
    assert run.train()
    (closed,) = run.ledger(GroupClosed)
    assert (closed.group, closed.reason) == (0, "dead")
    assert "0.1 refused (temperature): it was sampled at temperature 1e-40" in closed.detail


def test_keep_version_refuses_two_spans():
    record = completion("0.1", spans=(Span(0, 1, V0), Span(1, 2, V1)))
    assert refusal(record, BOUNDS) is None
    refused = refusal(record, TrainingBounds(keep_version=True))
    assert refused is not None
    assert refused.kind == "spans"


def test_what_was_decided_is_decided_again_although_more_is_believed_now(tmp_path):
    """A stamp of a later version is refused in step 1, and again when the step is repeated after
    step 2: the take names the versions believed then.
    """
    run = HandFed(tmp_path, settings={"steps": 1})
    run.admit(0, samples=3)
    run.finish(completion("0.0"), completion("0.1"), completion("0.2", Version(1, 1)))
    run.feed(1)
    assert run.train()
    take = run.ledger(Take)[0]
    assert take.believed == Version(0, 1)
    (first,) = run.ledger(StepDone)
    assert first.counts["refused_version"] == 1
    for entry in run.store.list("checkpoints/s00000001"):
        run.store.delete(entry.key)
    run.settings["steps"] = 2
    run.feed(2, 3)
    assert run.train()
    assert [d.step for d in run.ledger(StepDone)] == [1, 2]  # step 1 has the same result


def test_tokens_of_a_version_that_another_took_the_place_of_are_masked():
    """Trainer and audit apply the same two checks (defect 8)."""
    record = completion("0.0", spans=(Span(0, 1, Version(1, 1)), Span(1, 2, Version(2, 9))))
    believed = BelievedVersions(3, believed_terms([Version(1, 1), Version(2, 2), Version(3, 2)]))
    assert believed.terms == ((1, 1), (2, 2))
    assert mask_by_lag(admitted_sample(record, 0.0), 3, None, believed).mask.tolist() == [
        True,
        False,
    ]


def test_a_lag_below_zero_counts_as_zero():
    sample = admitted_sample(completion("0.0", Version(9, 1)), 0.0)
    assert lags_of(sample, 4).tolist() == [0, 0]


def test_rows_end_at_the_last_trained_token():
    """An environment's reply at the end of a trajectory costs no row."""
    sources = np.array([0, 0, 1, 1, *[2] * 60_000], np.uint8)
    record = completion("0.0", tokens=np.ones(60_004, np.uint32), sources=sources)
    rows = token_rows([admitted_sample(record, 1.0)])
    assert rows.lengths == (3,)
    assert rows.scored.tolist() == [1, 2]


def test_labels_of_tasks_are_bounded():
    """Rollouts choose the names; a `StepDone` has a count for each."""
    figures = StepMetrics()
    for number in range(3 * TASKS_MAX):
        figures.add_closed("dead", {}, [completion("0.0", task=f"task-{number}")])
    assert len(figures.counts) == TASKS_MAX + 2
    assert figures.counts[f"dead/{OTHER_TASKS}"] == 2 * TASKS_MAX


def test_a_completion_that_came_while_its_overdue_group_waited_is_in_the_take(tmp_path):
    """`Take.read` states that everything below it was read."""
    run = HandFed(tmp_path, deadline_s=0.0, settings={"steps": 1})
    trainer = run.build()
    run.admit(0, samples=3)
    run.finish(completion("0.0"), completion("0.1"))
    takes, intake = trainer.take_feeder, trainer.take_feeder.intake
    intake.read()
    progress = UpdateProgress(1, 0, 2)
    assert not takes.take_ready(progress, StepMetrics(), 0.0)
    run.finish(completion("0.2"))
    run.feed(1)
    intake.read()
    takes.take_ready(progress, StepMetrics(), 0.0)
    take = run.ledger(Take)[0]
    members = {
        g.group: [m.trajectory for m in g.members] for t in run.ledger(Take) for g in t.groups
    }
    assert members[0] == ["0.0", "0.1", "0.2"]
    assert {r.topic: r.offsets for r in take.read} == {"trajectories": (5,), "annotations": (0,)}


@pytest.mark.parametrize("is_archived", [False, True])
def test_a_completion_outside_its_groups_partition_is_first_of_nothing(tmp_path, is_archived):
    """Invariant 2: the order in which partitions are read does not decide which samples are
    trained; audit and trainer skip the same records.
    """
    run = HandFed(tmp_path, partitions=2, settings={"filter_equal_rewards": False})
    for group in range(4):
        foreign = completion(f"{group}.0", reward=9.0, rollout="x")
        publish(run.bus, "trajectories", "x", foreign, 1 - partition_of(str(group).encode(), 2))
    run.feed(*range(4))
    assert run.train()
    trained = {m.at.partition for t in run.ledger(Take) for m in t.members if m.trajectory == "0.0"}
    assert trained == {partition_of(b"0", 2)}
    if is_archived:
        stop = threading.Event()
        stop.set()
        ArchiveService(run.bus, run.store, "hand", ArchiveSettings()).run(stop)
        for topic in ("trajectories", "annotations"):
            run.bus.truncate(topic, run.bus.end(topic))
    assert run.offences() == []
