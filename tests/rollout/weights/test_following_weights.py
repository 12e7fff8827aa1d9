"""Rollouts move from version to version by deltas and compare the served weights; after a mismatch
they serve nothing until everything was fetched again and compared.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.errors import EngineRefused, NewerRelease, ObjectMissing
from rollstream.producers.rollout.read_back import TensorRotation, compare_all_tensors
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.storage.terms import ROLLOUTS, RoleTerms, hold_name, next_term
from rollstream.streams.bus import AppendEntry
from rollstream.streams.codec import Envelope, encode
from rollstream.streams.records import Applied, Assignment, Opened, RolloutStatus
from rollstream.streams.release import ABANDONED, KNOWN_FEATURES, SHARED_FEATURES
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling, Version
from testbed.memory import MemoryBus, MemoryStore
from testbed.waiting import wait_for
from tests.rollout.weights.following import Followed, damage, damage_after_update


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Followed]:
    followed = Followed(tmp_path)
    yield followed
    followed.close()


def looked_until(rollout: RolloutLoop, done: Callable[[], bool]) -> None:
    """Runs the worker's own phase repeatedly (bounded)."""

    def is_done() -> bool:
        rollout.take_weights()
        return done()

    wait_for(is_done)


def test_a_followed_version_is_a_patch_that_serves_its_bits(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    for _ in range(3):
        version = run.publish()
        fetched = run.fetched(engine.version)
        assert fetched.update.patches
        assert fetched.update.base == engine.version
        engine.update(fetched.update, "in_flight")
        assert engine.version == version
        assert run.differing(engine) == []


def test_a_reader_that_slept_catches_up_with_one_squashed_patch(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    for _ in range(3):
        run.publish()
    update = run.fetched(engine.version).update
    assert (update.base, update.version) == (Version(0, 1), Version(3, 1))
    assert update.patches
    engine.update(update, "in_flight")
    assert run.differing(engine) == []


def test_a_fetch_brings_back_the_name_that_dispatch_retired(run: Followed) -> None:
    """The rollout was cut off for long; dispatch refuses a name that has no term."""
    term = next_term(run.store, ROLLOUTS, "r")
    run.follower.hold_name = lambda: hold_name(run.store, ROLLOUTS, "r")
    run.publish()
    engine = run.engine()
    terms = RoleTerms(run.store, lambda: 0.0)
    terms.retire(ROLLOUTS, {"r": term})
    assert not terms.has_taken(ROLLOUTS, "r", term)
    run.publish()
    run.fetched(engine.version)
    assert RoleTerms(run.store, lambda: 0.0).has_taken(ROLLOUTS, "r", term)


def test_a_draining_rollout_has_the_newest_version_when_it_is_empty(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    rollout = run.rollout(engine, "keep_version")
    rollout.driver.running["0.0"], rollout.drawn = running_trajectory(), 8
    for _ in range(3):  # the present one is overtaken by the next
        newest = run.publish()
        looked_until(rollout, lambda v=newest: is_here(run, v))
        assert engine.version == Version(0, 1), "what it generates keeps its version"
    del rollout.driver.running["0.0"]
    rollout.take_weights()
    assert engine.version == newest, "nothing was to be waited for"  # pyright: ignore[reportPossiblyUnboundVariable]
    assert run.differing(engine) == []


def is_here(run: Followed, version: Version) -> bool:
    """Its thread has ended, so nothing is in progress."""
    fetched = run.follower._fetched
    is_wanted = fetched is not None and fetched.announced.version == version
    return is_wanted and not run.follower.is_busy()


def is_fetched_ahead(run: Followed, held: Version, version: Version) -> bool:
    run.follower.fetch_ahead(held)
    return is_here(run, version)


def test_an_emptied_rollout_goes_straight_to_a_version_from_history(run: Followed) -> None:
    """Invariant 4: the version fetched ahead is not served in between."""
    old = run.publish()
    engine = run.engine()
    rollout = run.rollout(engine, "keep_version")
    run.publish()
    looked_until(rollout, lambda: engine.version > old)
    newest = run.publish()
    rollout.driver.running["0.0"], rollout.drawn = running_trajectory(), 8
    looked_until(rollout, lambda: is_here(run, newest))
    del rollout.driver.running["0.0"]
    rollout.assignments.waiting.append(
        replace(running_trajectory().assignment, version=old, from_history=True)
    )
    looked_until(rollout, lambda: engine.version == old)
    assert newest not in [a.version for a in run.records("applied", Applied)]
    assert run.differing(engine) == []


def test_a_rollout_that_leaves_publishes_its_last_comparison(
    run: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped while its tensors were read back."""
    run.publish()
    engine = run.engine()
    rollout, newest = run.rollout(engine), run.publish()
    gate, read_back = threading.Event(), engine.read_back
    monkeypatch.setattr(engine, "read_back", lambda *a: (gate.wait(), read_back(*a))[1])
    looked_until(rollout, lambda: engine.version == newest)
    stop = threading.Event()
    stop.set()
    threading.Timer(0.2, gate.set).start()
    rollout.run(stop)
    assert [a.version for a in run.records("applied", Applied)] == [newest]


def test_what_was_overtaken_before_it_was_served_is_part_of_the_next_patch(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    for _ in range(3):
        newest = run.publish()
        run.follower.read()
        wait_for(lambda v=newest: is_fetched_ahead(run, engine.version, v))
    fetched = wait_for(run.follower.take)  # its thread is about to end
    assert (fetched.update.base, fetched.update.version) == (Version(0, 1), Version(3, 1))
    assert fetched.update.patches
    engine.update(fetched.update, "keep_version")
    assert run.differing(engine) == []


def test_applied_has_the_announced_hash_and_how_many_were_read_back(run: Followed) -> None:
    run.publish()
    rollout = run.rollout(run.engine())
    for _ in range(2):
        version = run.publish()
        looked_until(rollout, lambda v=version: [  # pyright: ignore[reportArgumentType]
            a for a in run.records("applied", Applied) if a.version == v
        ])  # fmt: skip
    last = run.records("applied", Applied)[-1]
    assert last.hash == run.versions.pointer.manifest_hash  # pyright: ignore[reportOptionalMemberAccess]
    assert (last.checked, last.tensors) == ("read_back", len(run.tensors))
    assert last.compared == len(run.tensors) - 1, "the tied one is the same tensor"


@pytest.mark.parametrize("on_update", ["in_flight", "keep_version"])
def test_a_mismatch_serves_nothing_until_everything_was_fetched_again(
    run: Followed, on_update: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish()
    engine = run.engine()
    rollout = run.rollout(engine, on_update)
    damage_after_update(engine)
    version = run.publish()
    looked_until(rollout, lambda: not run.follower.verified)
    assert "does not serve what it was given" in caplog.text
    assert run.records("applied", Applied) == []
    status = run.records("status", RolloutStatus)[-1]
    assert not status.verified
    assert status.health == "pulling"
    rollout.driver.running["0.0"] = running_trajectory()
    engine.submit(running_trajectory().request(hold=False))
    assert not rollout.generate()
    looked_until(rollout, lambda: run.follower.verified)
    assert any(rollout.generate() for _ in range(1000))
    assert run.differing(engine) == []
    assert [a.version for a in run.records("applied", Applied)] == [version]
    assert run.records("applied", Applied)[0].compared == len(run.tensors) - 1
    assert run.records("status", RolloutStatus)[-1].verified


def running_trajectory() -> RunningTrajectory:
    tokens = np.array([1, 2, 3], np.uint32)
    order = Assignment(
        kind="start", trajectory="0.0", group=0, index=0, attempt=1, rollout="a", rollout_term=1,
        version=Version(0, 1), task="t", tokens=tokens, sampling=Sampling(tokens_max=4), seed=0,
    )  # fmt: skip
    return RunningTrajectory.start(order, None, 0.0)


def test_an_engine_that_never_serves_what_it_is_given_ends_the_rollout(run: Followed) -> None:
    """Invariant 8: repairs are bounded."""
    run.publish()
    engine = run.engine()
    rollout = run.rollout(engine)
    load = engine.update

    def faulty(*arguments: object) -> None:
        load(*arguments)  # pyright: ignore[reportArgumentType]
        damage(engine)

    engine.update = faulty  # pyright: ignore[reportAttributeAccessIssue]
    run.publish()
    with pytest.raises(EngineRefused, match="memory"):
        looked_until(rollout, lambda: False)
    assert run.records("applied", Applied) == []


def test_the_first_version_is_compared_whole_before_anything_is_served(run: Followed) -> None:
    run.publish()
    engine = run.engine()
    fetched = run.fetched(None)
    compared = compare_all_tensors(fetched, engine.read_back, time.perf_counter()).compared
    assert compared.count == len(run.tensors) - 1
    damage(engine)
    with pytest.raises(EngineRefused, match="down_proj"):
        compare_all_tensors(fetched, engine.read_back, time.perf_counter())


def test_a_sample_is_bounded_and_comes_round_to_every_tensor() -> None:
    sizes = {f"t{i}": 40 if i else 2000 for i in range(7)}
    rotation, met = TensorRotation(100), []
    for _ in range(6):
        names = rotation.next(sizes)
        assert len(names) == 1 or sum(sizes[name] for name in names) <= 100
        assert len(set(names)) == len(names)
        met += names
    assert set(met) == set(sizes)
    assert TensorRotation().next(sizes) == sorted(sizes)
    assert rotation.next({}) == []


def test_a_repair_under_keep_version_never_moves_to_a_newer_version(run: Followed) -> None:
    """Invariant 4: running trajectories have one span; if their version is gone, the rollout ends
    and they are resumed elsewhere.
    """
    run.publish()
    engine = run.engine()
    rollout = run.rollout(engine, "keep_version")
    damage_after_update(engine)
    held = run.publish()
    looked_until(rollout, lambda: engine.version == held)  # the served weights are not compared yet
    run.publish()
    looked_until(rollout, lambda: not run.follower.verified)
    looked_until(rollout, lambda: run.follower.verified)
    assert [a.version for a in run.records("applied", Applied)] == [held]
    damage_after_update(engine)
    looked_until(rollout, lambda: engine.version != held)
    run.publish()
    for entry in list(run.store.list("weights/")):
        if str(engine.version) in entry.key:
            run.store.delete(entry.key)
    with pytest.raises(ObjectMissing, match=str(engine.version)):
        looked_until(rollout, lambda: False)


def test_a_rollout_writes_no_abandoned_turns_beside_a_trainer_that_would_train_them() -> None:
    """Invariant 14: a trainer that knows agents, but not `Trajectory.abandoned`."""
    bus = MemoryBus()
    bus.create(catalogue())
    older = tuple(sorted(KNOWN_FEATURES - {ABANDONED}))
    opened = encode(Opened("trainer", 1, "0.2.0", (), older), Envelope("trainer", 1, 0))
    bus.append("weights", [AppendEntry(b"run", opened, 0)])
    WeightsFollower(bus, MemoryStore()).read()
    follower = WeightsFollower(bus, MemoryStore())
    follower.writes = SHARED_FEATURES | {ABANDONED}
    with pytest.raises(NewerRelease, match="agents/abandoned"):
        follower.read()
