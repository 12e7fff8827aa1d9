"""No record is truncated that a role still needs (invariant 11): whole runs that lose their
holders.
"""

import threading
from pathlib import Path

import pytest

from rollstream.consumers.dispatch.persistence import (
    STATE_KEY,
    PersistedState,
    StateFile,
    restore_state,
    state_to_persist,
)
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.errors import Fenced
from rollstream.streams.records import Position, StepDone
from testbed.memory import MemoryStore
from testbed.waiting import wait_for
from tests.runs.test_resume import hashes, train_until, used
from tests.support.tiny_run import DISPATCH, tiny_run

OFTEN = DISPATCH.model_copy(update={"keep_s": 0.05})
TOPICS = ("admissions", "trajectories", "ledger", "prompts", "assignments")


def truncated(run) -> dict[str, int]:
    return {topic: sum(run.bus.begin(topic).values()) for topic in TOPICS}


def test_a_run_truncates_unneeded_records_and_still_ends_right(tmp_path: Path) -> None:
    settings = {"trainer": {"steps": 8}, "checkpoint_every": 2, "dispatch": OFTEN, "truncate": True}
    with tiny_run(tmp_path, **settings) as run:
        run.start_all()
        assert run.train()
        assert all(truncated(run).values()), truncated(run)
        assert max(used(run).values()) == 1


def test_trainer_and_dispatch_restart_in_a_truncated_log(tmp_path: Path) -> None:
    """The trainer resumes from its checkpoint, dispatch from its predecessor's state; repeated
    steps have the same hashes.
    """
    settings = {"trainer": {"steps": 9}, "checkpoint_every": 3, "dispatch": OFTEN, "truncate": True}
    with tiny_run(tmp_path, **settings) as run:
        run.start_prompts(1)
        stop = threading.Event()
        run.start_dispatch(1, stop)
        run.start_rollout("rollout-0")
        train_until(run, term=1, steps=5)
        before = hashes(run)
        wait_for(lambda: truncated(run)["prompts"] > 0)
        stop.set()
        run.start_dispatch(2)
        assert run.train(term=2)
        after = hashes(run)
        assert 9 in after
        assert all(len(found) == 1 for found in after.values())
        assert {s: after[s] for s in before if s in after} == {
            s: before[s] for s in before if s in after
        }
        last = max(run.records("ledger", StepDone), key=lambda done: done.step)
        assert last.step == 9
        assert all(truncated(run).values()), truncated(run)


def test_what_dispatch_kept_is_the_fold_of_the_whole_log(tmp_path: Path) -> None:
    from rollstream.consumers.dispatch.inbox import DispatchInbox

    with tiny_run(tmp_path, trainer={"steps": 4}, dispatch=OFTEN) as run:
        run.start_all()
        assert run.train()
        run.end()
        kept = StateFile(run.store, 7).take_over()
        assert kept is not None

        def fold(state: DispatchState, positions) -> PersistedState:
            inbox = DispatchInbox(run.bus, state, lambda: 0.0)
            own = {t: {p: e - 1 for p, e in run.bus.end(t).items()} for t in OWN}
            inbox.rebuild(own, positions)
            folded = {t: at for t, at in inbox.positions().items() if t != "prompts"}
            return state_to_persist(state, 7, folded)  # prompts are read again, not folded

        OWN = ("admissions", "assignments")
        whole = fold(DispatchState(), {})
        assert fold(restore_state(kept), kept.where()) == whole
        assert kept.admitted > 0


def test_a_dispatch_that_was_replaced_cannot_keep_its_state() -> None:
    """Frozen while its successor works, it would keep void admissions."""
    store = MemoryStore()
    zombie, living = StateFile(store, 3), StateFile(store, 4)
    assert zombie.take_over() is None
    state = PersistedState(3, {"ledger": {"0": Position(5)}}, admitted=5)
    zombie.keep(state)
    assert living.take_over() == state
    with pytest.raises(Fenced, match=STATE_KEY):
        zombie.keep(PersistedState(3, state.positions, admitted=9))
    with pytest.raises(Fenced, match="term 4"):
        StateFile(store, 3).take_over()
    assert StateFile(store, 5).take_over().admitted == 5  # pyright: ignore[reportOptionalMemberAccess]
