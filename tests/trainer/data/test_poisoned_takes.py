"""A take that the learner cannot compute does not hold the run (invariant 12)."""

import threading

import pytest

from rollstream.consumers.audit.folds import NOTES_MAX
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.trainer.data.poisoned_takes import (
    FAILED_MAX,
    SILENT_MAX,
    ComputeFailed,
    TakeAttempts,
    plan_superseded,
)
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.keep.replay.recorded_steps import read_recorded
from rollstream.streams.records import (
    GroupClosed,
    Position,
    StepDone,
    Superseded,
    Take,
    TakeFailed,
    TakeRetried,
)
from testbed.stepped.hand_fed_trainer import HandFed, Killed

BAD = frozenset({"0.1"})


def die(run: HandFed, error: type[BaseException], times: int, broken: frozenset[str] = BAD) -> None:
    for _ in range(times):
        with pytest.raises(error):
            run.train(broken, error)


def test_a_take_that_fails_three_times_is_superseded_and_its_groups_end_dead(tmp_path):
    run = HandFed(tmp_path)
    run.feed(*range(6))
    die(run, ComputeFailed, FAILED_MAX)
    assert [f.error for f in run.ledger(TakeFailed)] == [
        "RuntimeError: CUDA error: device-side assert"
    ] * FAILED_MAX
    assert not any(failed.out_of_memory for failed in run.ledger(TakeFailed))
    assert run.train(BAD)
    (superseded,) = run.ledger(Superseded)
    assert 0 in superseded.poisoned
    dead = [c for c in run.ledger(GroupClosed) if c.reason == "dead"]
    assert sorted(c.group for c in dead) == sorted(superseded.poisoned)
    assert all(c.detail.startswith("poisoned: ") and c.step == 1 for c in dead)
    done = run.ledger(StepDone)
    assert [d.step for d in done] == [1, 2]
    assert done[0].counts["dead"] == len(dead)
    assert run.offences() == []


def test_lacks_of_memory_are_counted_for_each_take_and_as_failures():
    attempts = TakeAttempts()
    attempts.apply(TakeFailed(1, 0, (0, 1), "OutOfMemoryError: 2 GiB", out_of_memory=True))
    attempts.apply(TakeFailed(1, 0, (1,), "MemoryError: ", out_of_memory=True))
    attempts.apply(TakeFailed(1, 0, (0, 1), "IndexError: 23"))
    assert attempts.out_of_memory == {(1, 0, 0): 1, (1, 0, 1): 2}
    assert attempts.failed == {(1, 0, (0, 1)): 2, (1, 0, (1,)): 1}


def test_a_term_records_one_failure_however_many_ranks_fail_in_it(tmp_path):
    run = HandFed(tmp_path)
    feeder = run.build().take_feeder
    for error in ("OutOfMemoryError: of rank 0", "OutOfMemoryError: of rank 1"):
        feeder.append_failures([TakeFailed(1, 0, (0, 1), error, out_of_memory=True)])
    assert [failed.error for failed in run.ledger(TakeFailed)] == ["OutOfMemoryError: of rank 0"]


def test_the_other_groups_of_a_superseded_take_are_trained_by_a_later_one(tmp_path):
    """Two groups, each sample a micro-batch of its own: only group 0 is poisoned."""
    run = HandFed(tmp_path, settings={"micro_batch_tokens": 4})
    run.feed(*range(6))
    die(run, ComputeFailed, FAILED_MAX)
    assert run.train(BAD)
    (superseded,) = run.ledger(Superseded)
    assert superseded.poisoned == (0,)
    trained = [
        member.trajectory
        for take in run.ledger(Take)
        if (take.step, take.micro_batch) not in {(1, n) for n in superseded.micro_batches}
        for member in take.members
    ]
    assert sorted(trained) == [f"{g}.{i}" for g in (1, 2, 3, 4) for i in (0, 1)]
    assert run.offences() == []


def test_audit_names_the_superseded_takes_their_groups_and_the_reason(tmp_path):
    run = HandFed(tmp_path, settings={"micro_batch_tokens": 4})
    run.feed(*range(6))
    die(run, ComputeFailed, FAILED_MAX)
    assert run.train(BAD)
    (superseded,) = run.ledger(Superseded)
    takes = ", ".join(map(str, superseded.micro_batches))
    (groups,) = [result for result in run.audit() if result.number == 1]
    (note,) = groups.notes
    assert f"step 1, update 0: take {takes} superseded, group 0 poisoned: " in note
    assert note.endswith("RuntimeError: CUDA error: device-side assert")
    assert groups.counts["takes superseded"] == len(superseded.micro_batches)
    assert groups.state == "kept"


def test_an_audit_lists_the_first_decisions_and_counts_all(tmp_path):
    run = HandFed(tmp_path)
    ledger = Ledger(run.bus, 1)
    ledger.open(Position())
    ledger.append([Superseded(1, 0, (n,), (n,), "out of memory") for n in range(NOTES_MAX + 5)])
    (groups,) = [result for result in run.audit() if result.number == 1]
    assert len(groups.notes) == NOTES_MAX
    assert groups.counts["takes superseded"] == NOTES_MAX + 5


def test_a_resumed_trainer_and_a_replay_repeat_the_decision(tmp_path):
    run = HandFed(tmp_path, settings={"micro_batch_tokens": 8})
    run.feed(0, 1, 2)
    die(run, ComputeFailed, FAILED_MAX)
    die(run, Killed, 1, frozenset({"2.0"}))  # after the decision, in the step that it belongs to
    run.feed(3, 4)
    assert run.train(BAD)
    assert len(run.ledger(Superseded)) == 1
    recorded = read_recorded(run.bus)
    recorded.check_whole([1, 2])
    planned = list(recorded.planned([1, 2], 2))
    assert all("0.1" not in {m.trajectory for t in p.takes for m in t.members} for p in planned)
    assert run.offences() == []


def test_silent_deaths_in_one_take_end_it_after_ten(tmp_path):
    run = HandFed(tmp_path, settings={"micro_batch_tokens": 4})
    run.feed(*range(6))
    die(run, Killed, SILENT_MAX + 1)  # the first trainer met it live, without a marker
    assert run.ledger(Superseded) == []
    assert run.train(BAD)
    assert [s.poisoned for s in run.ledger(Superseded)] == [(0,)]
    assert run.offences() == []


def test_a_trainer_killed_elsewhere_poisons_nothing(tmp_path):
    """Deaths while it waits for data, after its retried takes were computed."""
    run = HandFed(tmp_path, settings={"micro_batch_tokens": 8})
    run.feed(0)
    for _ in range(SILENT_MAX + 3):
        trainer = run.build()
        trainer.take_feeder.intake = KilledWaiting(trainer.take_feeder.intake)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(Killed):
            trainer.run(threading.Event())
    assert any(retried.micro_batch is None for retried in run.ledger(TakeRetried))
    run.feed(1, 2, 3)
    assert run.train()
    assert run.ledger(Superseded) == []


class KilledWaiting:
    """A process that is killed in the first wait of its group intake."""

    def __init__(self, intake):
        self.intake = intake

    def read(self, wait_s: float = 0.0) -> int:
        if wait_s:
            raise Killed
        return self.intake.read()

    def __getattr__(self, name: str):
        return getattr(self.intake, name)


def test_a_crash_between_superseding_and_closing_is_mended(tmp_path):
    run = HandFed(tmp_path)
    run.feed(*range(6))
    die(run, ComputeFailed, FAILED_MAX)
    ledger = Ledger(run.bus, 9)
    recorded = ledger.open(Position())
    (given_up,) = plan_superseded(
        recorded.takes, recorded.done, recorded.superseded, recorded.attempts.takes_to_give_up()
    )
    ledger.append([given_up])  # … and dies before the closings
    run.terms = 9
    assert run.train(BAD)
    assert sorted(c.group for c in run.ledger(GroupClosed)) == sorted(given_up.poisoned)
    assert run.ledger(Superseded)[0].poisoned == given_up.poisoned
    assert len(run.ledger(Superseded)) == 1
    assert run.offences() == []


def test_dispatch_admits_others_for_poisoned_groups():
    """Accepted groups are the trained ones and the waiting ones: a dead one leaves the count."""
    state = DispatchState()
    for group in (0, 1):
        state.apply_taken(group, 1)
    state.apply_superseded(1, 1)
    state.apply_closed(0)
    assert (state.trained, state.closed) == (1, 1)
