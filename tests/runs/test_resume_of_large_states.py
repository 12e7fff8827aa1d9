"""A state above the bound is hashed at checkpoints only: between them the ledger has the hash of
the published tensors, which resume, replay and audit compare. The bound is lowered here, so that a
tiny model is above it.
"""

import json
from contextlib import closing
from pathlib import Path

import pytest

from rollstream.consumers.trainer import ledger
from rollstream.consumers.trainer.learn import workers
from rollstream.consumers.trainer.publisher import copied_state_hash
from rollstream.keep.replay.recorded_steps import read_recorded
from rollstream.run.cli.main import main
from rollstream.storage.weights.checkpoints import read_checkpoint, stored_checkpoints
from rollstream.storage.weights.manifest import read_manifest
from rollstream.streams.connect import open_bus
from rollstream.streams.records import StepDone
from rollstream.streams.values import Version
from tests.runs.test_resume import UNEVEN, train_until
from tests.runs.test_resume_differs import audit, elsewhere
from tests.support.kept_run import made
from tests.support.tiny_run import TinyRun, tiny_run

STEPS = 6


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "STATE_HASH_BYTES_MAX", 0)


def test_records_are_compared_by_the_hash_that_both_have() -> None:
    def done(state: str, weights: str) -> StepDone:
        return StepDone(1, Version(1, 1), state, 1, {}, {}, 0.0, weights)

    assert done("a", "").has_same_state(done("a", ""))
    assert not done("a", "").has_same_state(done("b", ""))
    assert done("a", "w").has_same_state(done("", "w"))
    assert not done("a", "w").has_same_state(done("b", "w"))
    assert not done("", "w").has_same_state(done("", "x"))
    assert not done("a", "").has_same_state(done("", "w")), "they have no hash in common"


def all_done(run: TinyRun) -> list[StepDone]:
    return run.records("ledger", StepDone)


def test_the_state_is_hashed_at_checkpoints_and_a_resume_compares_the_published_tensors(
    tmp_path: Path,
) -> None:
    with tiny_run(tmp_path, trainer={"steps": STEPS}, task=UNEVEN, checkpoint_every=2) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        for key in [entry.key for entry in run.store.list("checkpoints/")]:
            if "s00000000-" not in key:
                run.store.delete(key)
        trainer = run.build_trainer(2)
        assert trainer.step == 0
        assert run.train(3)
        run.end()
        found = all_done(run)
        assert [one.step for one in found] == list(range(1, STEPS + 1)), "a step is there twice"
        assert [one.step for one in found if one.state_hash] == [2, 4, 6]
        assert len({one.weights_hash for one in found}) == STEPS
        lines = {line.number: line for line in audit(run).check()}
        assert not [line for line in lines.values() if line.violations]
        assert lines[6].counts["versions compared with their step"] > 0


def test_other_bits_are_a_fork_although_no_state_was_hashed(tmp_path: Path) -> None:
    with tiny_run(tmp_path, trainer={"steps": STEPS}, task=UNEVEN) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        recorded = max(one.step for one in all_done(run))
        elsewhere(run)
        assert run.train(2)
        run.end()
        twice = [one.step for one in all_done(run) if one.step <= recorded]
        assert sorted(twice) == sorted([*range(1, recorded + 1)] * 2)
        lines = {line.number: line for line in audit(run).check()}
        assert not [line.offenders for line in lines.values() if line.violations]
        assert "step 1 was repeated with another state hash" in " ".join(lines[6].notes)


def test_a_ledger_of_an_earlier_release_is_compared_by_its_own_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the hash of the state at every step, whatever the size."""
    with tiny_run(tmp_path, trainer={"steps": STEPS}, task=UNEVEN) as run:
        run.start_all()
        with monkeypatch.context() as earlier:
            earlier.setattr(ledger, "STATE_HASH_BYTES_MAX", 1 << 40)
            train_until(run, term=1, steps=3)
        assert run.train(2)
        run.end()
        found = all_done(run)
        assert [one.step for one in found] == list(range(1, STEPS + 1)), "a step is there twice"
        assert all(one.state_hash and not one.weights_hash for one in found[:3])
        assert found[-1].weights_hash


def test_a_version_with_other_tensors_than_its_step_is_found_by_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_run(tmp_path, trainer={"steps": 2}, task=UNEVEN) as run:
        run.start_all()
        assert run.train(1)
        run.end()
        newest = read_manifest(run.store, all_done(run)[-1].version)
        monkeypatch.setattr(type(newest.weights), "combined_hash", "another")
        (line,) = [line for line in audit(run).check() if line.violations]
        assert line.number == 6
        assert "its tensors have the hash another" in str(line.offenders)


def test_a_replay_compares_the_published_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = made(tmp_path / "run"), tmp_path / "again"
    assert main(["replay", str(run), "--out", str(out), "--from-step", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["compared"], found["differing"]) == (STEPS, [])
    with closing(open_bus(f"sqlite:{out / 'bus'}")) as bus:
        again = [done for step in read_recorded(bus).done.values() for done in step]
    assert len(again) == STEPS
    assert all(one.weights_hash for one in again)
    assert not all(one.state_hash for one in again)


def test_a_lent_state_is_written_as_it_was_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LENT_BYTES_MIN", 0)
    with tiny_run(tmp_path, trainer={"steps": STEPS}, task=UNEVEN, checkpoint_every=1) as run:
        run.start_all()
        assert run.train(1)
        run.end()
        recorded = {one.step: one.state_hash for one in all_done(run)}
        kept = [one.id for one in stored_checkpoints(run.store) if one.whole]
        assert [one.step for one in kept] == [STEPS - 1, STEPS]
        for one in kept:
            tensors = read_checkpoint(run.store, one).tensors
            assert copied_state_hash(tensors) == recorded[one.step]
