"""All roles of a run die together and resume under their next terms: counts and prompts continue,
from the log or from its archive.
"""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.dispatch.admission import AdmissionPace, admissible_groups
from rollstream.consumers.settings import ArchiveSettings
from rollstream.consumers.trainer.loop import Trainer
from rollstream.errors import PositionLost
from rollstream.storage.weights.checkpoints import delete_checkpoints, stored_checkpoints
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.fence import truncate
from rollstream.streams.reader import from_end
from rollstream.streams.records import Admitted, GroupClosed, Prompt, Take
from testbed.waiting import WAIT_S, wait_for
from tests.runs.test_resume import UNEVEN, hashes, train_until, used
from tests.support.tiny_run import DISPATCH, TinyRun, tiny_run

TOPICS = ArchiveSettings().topics
OFTEN = DISPATCH.model_copy(update={"keep_s": 0.05})


@contextmanager
def stopped(folder: Path, steps: int, **changed):
    """A run of 30 steps whose roles all ended after `steps` of them."""
    with tiny_run(folder, trainer={"steps": 30}, task=UNEVEN, **changed) as run:
        run.start_all()
        train_until(run, term=1, steps=steps)
        run.end()
        run.stop = threading.Event()
        yield run


def admitted(run: TinyRun) -> list[int]:
    return [record.group for record in run.records("admissions", Admitted)]


@pytest.mark.parametrize("keep", [DISPATCH, OFTEN])
def test_no_burst_of_admissions_follows_a_restart(tmp_path: Path, keep) -> None:
    """A dispatch that lost its admissions would admit a whole window again."""
    with stopped(tmp_path, 4, dispatch=keep) as run:
        run.start_prompts(2)
        run.start_dispatch(2)
        run.start_rollout("rollout-0")
        pointer = believed_pointer(run.store)
        assert pointer is not None
        assert pointer.version is not None
        pace = AdmissionPace(
            run.trainer.groups_per_step, run.dispatch.max_lag, 64, run.trainer.steps
        )
        closed = len(run.records("ledger", GroupClosed))
        number = pointer.version.number
        settled = number * run.trainer.groups_per_step
        window = admissible_groups(pace, number, 0, closed, 0, settled)
        wait_for(lambda: len(admitted(run)) >= window)
        wait_for(lambda: len(run.records("trajectories")) >= window * 4)  # all of it is done
        run.end()
        assert len(admitted(run)) == window


def test_prompts_are_neither_repeated_nor_skipped_when_everything_dies(tmp_path: Path) -> None:
    with stopped(tmp_path, 3) as run:
        run.trainer = run.trainer.model_copy(update={"steps": 8})
        run.start_prompts(2)
        run.start_dispatch(2)
        run.start_rollout("rollout-1")
        assert run.train(2)
        run.end()
        prompts = [record.group for record in run.records("prompts", Prompt)]
        assert prompts == list(range(len(prompts)))
        assert admitted(run) == prompts[: len(admitted(run))]
        trained = {g.group for take in run.records("ledger", Take) for g in take.groups}
        assert len(trained) == 8 * 3
        assert max(used(run).values()) == 1


def archive(run: TinyRun) -> None:
    """The present log as archive files."""
    service = ArchiveService(run.bus, run.store, "tiny", ArchiveSettings(roll_s=0.05))
    stop = threading.Event()
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    wait_for(lambda: all(_is_archived(run, topic) for topic in TOPICS))
    stop.set()
    thread.join(WAIT_S)


def _is_archived(run: TinyRun, topic: str) -> bool:
    ends, done = run.bus.end(topic), run.bus.committed("archive", topic)
    return all(p in done and done[p].offset >= end for p, end in ends.items() if end)


def cut(run: TinyRun) -> None:
    """The log is truncated as far as allowed: of each partition the last record stays."""
    for topic in ("ledger", "admissions", "trajectories", "annotations"):
        truncate(run.bus, topic, from_end(run.bus, topic))


def test_a_trainer_without_log_and_checkpoints_trains_again_from_the_archive(
    tmp_path: Path,
) -> None:
    with stopped(tmp_path, 4, checkpoint_every=2) as run:
        archive(run)
        before = hashes(run)
        last = max(before)
        delete_checkpoints(run.store, [stored.id for stored in stored_checkpoints(run.store)])
        cut(run)
        with pytest.raises(PositionLost):
            run.bus.read("ledger", {0: 0})
        trainer = run.build_trainer(2)
        assert (trainer.step, set(trainer.recorded.done)) == (0, set(before))
        repeat(trainer, last)
        assert_nothing_differed(run, trainer, before)


def test_a_trainer_whose_log_was_cut_resumes_from_checkpoint_and_archive(tmp_path: Path) -> None:
    """The checkpoint of step 0 needs records that only the archive has."""
    with stopped(tmp_path, 5, checkpoint_every=100) as run:
        archive(run)
        before = hashes(run)
        last = max(before)
        cut(run)
        trainer = run.build_trainer(2)
        assert (trainer.step, set(trainer.recorded.done)) == (0, set(before))
        repeat(trainer, last)
        assert_nothing_differed(run, trainer, before)


def repeat(trainer: Trainer, last: int) -> None:
    """Up to the last step of the ledger, and further live steps as far as there are groups for
    them.
    """
    stop = threading.Event()
    thread = threading.Thread(target=trainer.run, args=(stop,), daemon=True)
    thread.start()
    wait_for(lambda: trainer.step >= last)
    stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def assert_nothing_differed(run: TinyRun, trainer: Trainer, before: dict[int, set[str]]) -> None:
    """A repeated step with the ledger's hash is not written again, nor is its version."""
    assert trainer.publisher.totals.repeated == max(before)
    again = {step for step, found in hashes(run).items() if found != before.get(step)}
    assert all(step > max(before) for step in again)
    names = {entry.key.split("/")[1] for entry in run.store.list("weights/v")}
    new = [int(name[1:9]) for name in names if name.endswith("t0002")]
    assert all(number > max(before) for number in new)


def test_records_neither_in_the_log_nor_archived_are_reported(tmp_path: Path) -> None:
    with stopped(tmp_path, 3) as run:
        delete_checkpoints(run.store, [stored.id for stored in stored_checkpoints(run.store)])
        cut(run)
        with pytest.raises(PositionLost, match="neither in the log nor in the archive"):
            run.train(2)
