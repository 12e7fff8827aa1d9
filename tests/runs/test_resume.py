"""A trainer, dispatch, prompt source or rollout that ended resumes under its next term, and repeats
nothing.
"""

import threading
from collections import Counter
from pathlib import Path

from rollstream.producers.settings import TaskSettings
from rollstream.streams.records import Admitted, GroupClosed, Prompt, StepDone, Take, Trajectory
from testbed.waiting import WAIT_S, wait_for
from tests.support.tiny_run import TinyRun, tiny_run

UNEVEN = TaskSettings(name="tests.support.uneven_task:Uneven")
"""Every step has a gradient: with the rewards of an untrained model, all zero, a step trained on
other data would have the same hash.
"""


def train_until(run: TinyRun, term: int, steps: int) -> None:
    """A trainer that is stopped once this many steps are in the ledger, in the middle of the next
    one.
    """
    stop = threading.Event()
    thread = threading.Thread(target=lambda: run.train(term, stop), daemon=True)
    thread.start()
    wait_for(lambda: len(run.records("ledger", StepDone)) >= steps)
    stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def hashes(run: TinyRun) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for done in run.records("ledger", StepDone):
        found.setdefault(done.step, set()).add(done.state_hash)
    return found


def used(run: TinyRun) -> Counter[str]:
    return Counter(m.trajectory for take in run.records("ledger", Take) for m in take.members)


def test_a_restarted_trainer_repeats_the_ledgers_steps_to_the_same_bits(tmp_path: Path) -> None:
    """Only the checkpoint of step 0 exists: everything since comes from the ledger (invariant
    2).
    """
    with tiny_run(tmp_path, trainer={"steps": 6}, task=UNEVEN) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        before = hashes(run)
        trainer = run.build_trainer(term=2)
        assert trainer.step == 0
        repeated = max(trainer.recorded.done)
        assert trainer.run(threading.Event())
        assert set(hashes(run)) == {1, 2, 3, 4, 5, 6}
        assert all(len(found) == 1 for found in hashes(run).values()), "a repeated step differs"
        assert {step: hashes(run)[step] for step in before} == before
        assert len(set().union(*hashes(run).values())) == 6, "a step changed nothing"
        assert repeated >= 3
        assert max(used(run).values()) == 1


def test_a_restarted_trainer_equals_one_that_was_never_stopped(tmp_path: Path) -> None:
    """The same recorded takes, from step 0 at once and from a checkpoint in the middle: the same
    bits.
    """
    with tiny_run(tmp_path, trainer={"steps": 5}, checkpoint_every=2, task=UNEVEN) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        assert run.build_trainer(term=2).step >= 2
        assert run.train(term=3)
        live = hashes(run)[5]
        for key in [entry.key for entry in run.store.list("checkpoints/")]:
            if "s00000000-" not in key:
                run.store.delete(key)
        again = run.build_trainer(term=4)
        assert again.step == 0
        assert again.run(threading.Event())
        assert hashes(run)[5] == live


def test_steps_that_are_believed_are_not_published_again(tmp_path: Path) -> None:
    """Invariant 6: a repeated step finds its version there, and leaves each of its objects
    unchanged.
    """
    with tiny_run(tmp_path, trainer={"steps": 4}, task=UNEVEN) as run:
        run.start_all()
        train_until(run, term=1, steps=2)
        before = objects(run)
        assert run.train(term=2)
        after = objects(run)
        numbers = {name.split("/")[1] for name in after}
        assert len({name.split("-")[0] for name in numbers}) == len(numbers) == 5
        assert {name: at for name, at in after.items() if name in before} == before


def objects(run: TinyRun) -> dict[str, tuple[int, int]]:
    """Each object of a version by its file and modification time."""
    files = {e.key: run.folder / "store" / e.key for e in run.store.list("weights/v")}
    return {key: (path.stat().st_ino, path.stat().st_mtime_ns) for key, path in files.items()}


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    with tiny_run(tmp_path, trainer={"steps": 2}) as run:
        run.start_all()
        assert run.train(term=1)
        before = len(run.records("ledger", Take))
        assert run.train(term=2)
        assert len(run.records("ledger", Take)) == before


def test_a_new_dispatch_neither_repeats_nor_loses_groups(tmp_path: Path) -> None:
    """Its state is rebuilt from topics; the counts of invariant 1 continue."""
    with tiny_run(tmp_path, trainer={"steps": 5}) as run:
        run.start_prompts(1)
        first = threading.Event()
        run.start_dispatch(1, first)
        run.start_rollout("rollout-0")
        training = threading.Thread(target=run.train, daemon=True)
        training.start()
        wait_for(lambda: len(run.records("ledger", StepDone)) >= 2)
        first.set()
        run.start_dispatch(2)
        training.join(WAIT_S)
        assert not training.is_alive()
        run.end()
        groups = [record.group for record in run.records("admissions", Admitted)]
        assert groups == list(range(len(groups)))
        taken = {g.group for take in run.records("ledger", Take) for g in take.groups}
        assert len(taken) == 15
        assert max(used(run).values()) == 1


def test_a_zombie_dispatch_does_no_harm(tmp_path: Path) -> None:
    """Invariant 7: records that a dispatch of an earlier term still writes are void for every
    reader.
    """
    with tiny_run(tmp_path, trainer={"steps": 4}) as run:
        run.start_all(rollouts=1)
        wait_for(lambda: run.bus.end("admissions")[0])  # it has opened its term
        run.start_dispatch(2)  # the first one does not notice until it persists its state
        assert run.train()
        run.end()
        groups = [record.group for record in run.records("admissions", Admitted)]
        assert len(set(groups)) == len(groups)
        taken = [g.group for take in run.records("ledger", Take) for g in take.groups]
        assert len(set(taken)) == len(taken) == 12
        assert max(used(run).values()) == 1


def test_a_new_prompt_source_continues_where_the_last_one_ended(tmp_path: Path) -> None:
    with tiny_run(tmp_path) as run:
        run.start_prompts(1)
        wait_for(lambda: run.records("prompts", Prompt))
        run.start_prompts(2)
        run.start_dispatch(1)
        run.start_rollout("rollout-0")
        assert run.train()
        run.end()
        groups = [record.group for record in run.records("prompts", Prompt)]
        assert groups == list(range(len(groups)))


def test_a_rollout_that_vanishes_has_its_trajectories_finished_elsewhere(tmp_path: Path) -> None:
    with tiny_run(tmp_path, trainer={"steps": 5}, tokens_max=40) as run:
        run.start_prompts(1)
        run.start_dispatch(1)
        vanishes = threading.Event()
        run.start_rollout("rollout-0", vanishes)
        run.start_rollout("rollout-1")
        training = threading.Thread(target=run.train, daemon=True)
        training.start()
        wait_for(lambda: len(run.records("ledger", StepDone)) >= 1)
        vanishes.set()
        training.join(WAIT_S)
        assert not training.is_alive()
        run.end()
        admitted = run.records("admissions", Admitted)
        taken = {g.group for take in run.records("ledger", Take) for g in take.groups}
        closed = {record.group for record in run.records("ledger", GroupClosed)}
        assert len(taken) == 15
        assert not taken & closed
        assert taken <= {record.group for record in admitted}
        firsts = Counter(record.trajectory for record in run.records("trajectories", Trajectory))
        assert set(used(run)) <= set(firsts)
