"""A trainer killed at any write, and the store that the next one finds: invariant 6 under
crashes.
"""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.errors import Fenced, SwapLost
from rollstream.storage.weights.fetch import fetch_model_file, fetch_tensors
from rollstream.storage.weights.manifest import manifest_key
from rollstream.storage.weights.pointer import (
    advance_pointer,
    believed_pointer,
    read_pointer,
    take_pointer,
)
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.storage.weights.retention import delete_versions, plan_retention, stored_versions
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from tests.storage.store_faults import FaultyStore, Killed
from tests.support.shares import examples


def tensors_of(version):
    return {
        name: torch.full((4,), float(100 * version.number + version.term + extra))
        for extra, name in enumerate(("a", "b"))
    }


def write(store, version):
    files = {"config.json": b"{}"}
    return publish_version(store, NewVersion("run", version, tensors_of(version), files, 1, 0.0))


def holds(store, version):
    manifest, got = fetch_tensors(store, version)
    for entry in manifest.model_files:
        fetch_model_file(store, manifest, entry.name)
    return all(torch.equal(got[name], want) for name, want in tensors_of(version).items())


def step(store):
    take_pointer(store, "run", 1)
    return advance_pointer(store, write(store, Version(1, 1)))


def writes_of_one_step():
    counting = FaultyStore(MemoryStore(), fatal=-1, after=False)
    step(counting)
    return counting.writes


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fatal", range(writes_of_one_step()))
def test_a_crash_at_any_write_of_a_step_is_mended_by_doing_it_again(fatal, after):
    store = MemoryStore()
    dying = FaultyStore(store, fatal, after)
    with pytest.raises(Killed):
        step(dying)
    found = believed_pointer(store)
    assert found is None or holds(store, found.version)
    assert step(store) == believed_pointer(store)
    assert holds(store, Version(1, 1))


class Versions(RuleBasedStateMachine):
    """Trainers come, publish, clean up and die at any write; zombies of lower terms resume."""

    def __init__(self):
        super().__init__()
        self.store = MemoryStore()
        self.term = 0
        self.pinned = set()
        self.highest = None

    def attempt(self, fatal, after, step):
        """Runs `step` on a store that dies at write `fatal`; returns whether it completed."""
        try:
            step(FaultyStore(self.store, fatal, after))
        except Killed:
            return False
        return True

    @rule(fatal=st.integers(0, 1), after=st.booleans())
    def a_new_trainer_takes_the_pointer(self, fatal, after):
        self.term += 1
        self.attempt(fatal, after, lambda store: take_pointer(store, "run", self.term))

    @precondition(lambda self: self.term > 0)
    @rule(fatal=st.integers(0, 12), after=st.booleans())
    def the_trainer_publishes_the_next_version(self, fatal, after):
        last = take_pointer(self.store, "run", self.term).version
        version = Version(last.number + 1 if last else 0, self.term)
        if self.attempt(fatal, after, lambda store: advance_pointer(store, write(store, version))):
            assert believed_pointer(self.store).version == version  # pyright: ignore[reportOptionalMemberAccess]

    @precondition(lambda self: self.term > 1)
    @rule(data=st.data(), ahead=st.integers(1, 3))
    def a_zombie_publishes_and_cannot_move_the_pointer(self, data, ahead):
        take_pointer(self.store, "run", self.term)
        before = read_pointer(self.store)
        number = before[0].version.number + ahead if before[0].version else ahead  # pyright: ignore[reportOptionalSubscript]
        zombie = Version(number, data.draw(st.integers(1, self.term - 1)))
        with pytest.raises(Fenced):
            advance_pointer(self.store, write(self.store, zombie))
        with pytest.raises(Fenced):
            take_pointer(self.store, "run", zombie.term)
        assert read_pointer(self.store) == before

    @precondition(lambda self: believed_pointer(self.store) is not None)
    @rule(fatal=st.integers(0, 8), after=st.booleans(), keep=st.integers(2, 4), data=st.data())
    def the_trainer_retains(self, fatal, after, keep, data):
        pointer = take_pointer(self.store, "run", self.term)
        stored = stored_versions(self.store)
        self.pinned = data.draw(st.sets(st.sampled_from([one.version for one in stored])))
        plan = plan_retention(stored, pointer, self.pinned, 0, keep)
        if self.attempt(fatal, after, lambda store: delete_versions(store, plan, self.term)):
            left = stored_versions(self.store)
            assert len(left) <= keep
            above = {one.version for one in left if one.version.number > pointer.version.number}  # pyright: ignore[reportOptionalMemberAccess]
            assert all(one.whole for one in left if one.version not in above)
            assert all(version.term == self.term or version in self.pinned for version in above)

    @invariant()
    def whatever_has_a_manifest_is_whole(self):
        for stored in stored_versions(self.store):
            assert not stored.whole or holds(self.store, stored.version)

    @invariant()
    def the_believed_version_is_there_and_never_goes_back(self):
        pointer = believed_pointer(self.store)
        place = (pointer.version.number, pointer.term) if pointer else None  # pyright: ignore[reportOptionalMemberAccess]
        if self.highest is not None:
            assert place is not None
            assert place >= self.highest
        if pointer is not None:
            self.highest = place
            assert holds(self.store, pointer.version)
            assert manifest_key(pointer.version) == pointer.manifest  # pyright: ignore[reportArgumentType]


Versions.TestCase.settings = examples(60, share=2, steps=30)
test_versions_survive_crashes = Versions.TestCase


def test_a_zombie_may_not_retain():
    store = MemoryStore()
    take_pointer(store, "run", 1)
    for number in range(4):
        advance_pointer(store, write(store, Version(number, 1)))
    plan = plan_retention(stored_versions(store), believed_pointer(store), (), 0, 2)  # pyright: ignore[reportArgumentType]
    take_pointer(store, "run", 2)
    with pytest.raises(Fenced):
        delete_versions(store, plan, 1)
    assert all(holds(store, Version(number, 1)) for number in range(4))
    delete_versions(store, plan, 2)
    assert [stored.version.number for stored in stored_versions(store)] == [2, 3]


def test_a_publisher_without_the_pointer_believes_nothing():
    store = MemoryStore()
    with pytest.raises(SwapLost):
        advance_pointer(store, write(store, Version(1, 1)))
    assert believed_pointer(store) is None
