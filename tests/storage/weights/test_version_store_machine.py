"""The version store against a simple model: trainers come, publish anchors and deltas, clean up and
die at any write, zombies resume, readers move between any versions and fail at any read.

A believed version is always readable bit for bit, a zombie's version is never believed, and no base
of a kept version is deleted (invariants 6 and 11). So it is in the policy's stream and a named one,
also beside another stream in the same store, which no step of the first one changes.
"""

import shutil
import tempfile

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.errors import Fenced
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.fetch import fetch_model_file, fetch_tensors
from rollstream.storage.weights.named_streams import POLICY, WeightStream
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.storage.weights.retention import stored_versions
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter
from testbed.memory import MemoryBus, MemoryStore
from tests.storage.store_faults import FaultyStore, Killed
from tests.storage.weights.version_samples import FILES, assert_same, changed, first_tensors
from tests.support.shares import examples

SETTINGS = WeightsSettings(versions_max=6, anchor_every=3, shard_bytes=300)
READERS = 2
DEATH = st.one_of(st.just(-1), st.just(-1), st.integers(0, 12))
"""The write at which the trainer dies, if at all."""


class FailingReads:
    """The store fails at read number `fatal` of tensors."""

    def __init__(self, store, fatal):
        self._store, self._left = store, fatal

    def get(self, key, start=0, end=None):
        if key.endswith(".safetensors"):
            self._left -= 1
            if self._left < 0:
                raise ConnectionResetError(key)
        return self._store.get(key, start, end)


class VersionStore(RuleBasedStateMachine):
    """`made` is the model: the tensors that a trainer published for each version."""

    stream = POLICY

    def new_store(self):
        return MemoryStore()

    def __init__(self):
        super().__init__()
        self.run_store, self.bus = self.new_store(), MemoryBus()
        self.store = self.stream.part(self.run_store)
        self.bus.create([*catalogue(), self.stream.topic])
        self.term, self.writer, self.zombies = 0, None, []
        self.made, self.highest = {}, None
        self.readers = [ResidentWeights() for _ in range(READERS)]
        self.pinned = set()
        self.strays = set()
        """Zombies' versions: never believed, and their bases may be deleted before."""

    def attempt(self, fatal, after, step):
        """Runs `step` on a store that dies at write `fatal`; returns None if it died."""
        writer = self.writer
        writer.store = FaultyStore(self.store, fatal, after)  # pyright: ignore[reportOptionalMemberAccess]
        try:
            return step(writer)
        except Killed:
            self.writer = None
            return None
        finally:
            writer.store = self.store  # pyright: ignore[reportOptionalMemberAccess]

    @precondition(lambda self: self.writer is None or self.term < 4)
    @rule(fatal=st.sampled_from([-1, -1, 0, 1]), after=st.booleans(), files=st.booleans())
    def a_new_trainer_starts(self, fatal, after, files):
        self.term += 1
        if self.writer is not None:
            self.zombies = [*self.zombies[-1:], self.writer]
        topic = self.stream.topic
        fenced = FencedWriter(self.bus, topic.name, topic.writer, self.term)
        more = {"extra.txt": b"x"} if files else {}
        self.writer = VersionWriter(
            self.store, fenced, "run", self.term, SETTINGS, {**FILES, **more}, lambda: self.pinned
        )
        self.attempt(fatal, after, lambda writer: writer.open())

    @precondition(lambda self: self.writer is not None and self.writer.highest is not None)
    @rule(same=st.booleans())
    def the_trainer_repeats_the_last_step(self, same):
        last = self.writer.highest  # pyright: ignore[reportOptionalMemberAccess]
        tensors = self.made[last] if same else changed(self.made[last], seed=self.term)
        assert self.writer.publish(last.number, tensors) == last  # pyright: ignore[reportOptionalMemberAccess]

    @precondition(lambda self: self.writer is not None)
    @rule(
        fatal=DEATH,
        after=st.booleans(),
        shares=st.lists(st.sampled_from([0.0, 0.01, 0.01, 0.6]), min_size=1, max_size=4),
    )
    def the_trainer_publishes_the_next_versions(self, fatal, after, shares):
        for share in shares:
            if self.writer is not None:
                self.publish(fatal if share == shares[-1] else -1, after, share)

    def publish(self, fatal, after, share):
        last = self.writer.highest  # pyright: ignore[reportOptionalMemberAccess]
        version = Version(last.number + 1 if last else 0, self.term)
        before = self.made[last] if last else first_tensors()
        seed = 100 * version.number + self.term
        self.made[version] = changed(before, seed, share) if share else before
        done = self.attempt(fatal, after, lambda w: w.publish(version.number, self.made[version]))
        assert done in (None, version)
        if done is not None:
            assert believed_pointer(self.store).version == version  # pyright: ignore[reportOptionalMemberAccess]

    @precondition(lambda self: self.zombies and self.writer is not None)
    @rule(data=st.data())
    def a_zombie_publishes_and_cleans_up(self, data):
        zombie = data.draw(st.sampled_from(self.zombies))
        number = zombie.highest.number + 1 if zombie.highest else 0
        version, before = Version(number, zombie.term), believed_pointer(self.store)
        if version not in self.made:
            self.made[version] = changed(first_tensors(), seed=zombie.term)
        self.strays.add(version)
        with pytest.raises(Fenced):
            zombie.publish(number, self.made[version])
        assert believed_pointer(self.store) == before
        self.zombies.remove(zombie)

    @precondition(lambda self: self.writer is not None and self.writer.highest is not None)
    @rule(fatal=DEATH, after=st.booleans())
    def the_trainer_retains(self, fatal, after):
        self.pinned = {reader.version for reader in self.readers if reader.version}
        self.attempt(fatal, after, lambda writer: writer.retain())
        if self.writer is not None:
            assert len(stored_versions(self.store)) <= SETTINGS.versions_max

    @precondition(lambda self: believed_pointer(self.store) is not None)
    @rule(
        data=st.data(), reader=st.integers(0, READERS - 1), fatal=st.sampled_from([99, 99, 0, 1, 3])
    )
    def a_reader_moves(self, data, reader, fatal):
        stored = [one for one in self.whole() if one not in self.strays]
        target, held = data.draw(st.sampled_from(stored)), self.readers[reader]
        try:
            moved = held.update(FailingReads(self.store, fatal), target)
        except ConnectionResetError:
            assert held.version is None
            return
        assert held.version == target == moved.manifest.version
        assert_same(held.tensors, self.made[target])

    @invariant()
    def what_is_believed_is_readable_bit_for_bit_and_never_goes_back(self):
        pointer = believed_pointer(self.store)
        place = (pointer.version.number, pointer.term) if pointer else None  # pyright: ignore[reportOptionalMemberAccess]
        assert self.highest is None or (place is not None and place >= self.highest)
        self.highest = place
        if pointer is not None:
            manifest, tensors = fetch_tensors(self.store, pointer.version, pointer.manifest_hash)  # pyright: ignore[reportArgumentType]
            assert_same(tensors, self.made[pointer.version])
            for entry in manifest.model_files:
                fetch_model_file(self.store, manifest, entry.name)

    @invariant()
    def everything_that_has_a_manifest_is_readable_but_what_zombies_wrote(self):
        for version in self.whole():
            if version not in self.strays:
                assert_same(fetch_tensors(self.store, version)[1], self.made[version])

    def whole(self):
        return [stored.version for stored in stored_versions(self.store) if stored.whole]


class VersionStoreOnFiles(VersionStore):
    def new_store(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.folder = tempfile.mkdtemp()
        return FileStore(self.folder)

    def teardown(self):
        shutil.rmtree(self.folder)


class NamedVersionStore(VersionStore):
    stream = WeightStream("draft")


class TwoStreams(VersionStore):
    """A writer of another stream of the same store publishes, retains, is fenced and dies between
    the steps: neither stream's objects change by a step of the other.
    """

    other = WeightStream("critic")

    def __init__(self):
        super().__init__()
        self.other_store = self.other.part(self.run_store)
        self.bus.create([self.other.topic])
        self.other_made, self.others = {}, []
        self.other_objects = {}

    def beside(self, step):
        """Runs a step of the other stream, which changes nothing of this one."""
        own = objects(self.run_store, self.stream)
        try:
            step()
        finally:
            self.other_objects = objects(self.run_store, self.other)
        assert objects(self.run_store, self.stream) == own

    @rule()
    def a_writer_of_the_other_stream_starts(self):
        def start():
            topic, term = self.other.topic, len(self.others) + 1
            fenced = FencedWriter(self.bus, topic.name, topic.writer, term)
            writer = VersionWriter(
                self.other_store, fenced, "run", term, SETTINGS, FILES, lambda: ()
            )
            writer.open()
            self.others.append(writer)

        self.beside(start)

    @precondition(lambda self: self.others)
    @rule(fatal=DEATH, after=st.booleans(), share=st.sampled_from([0.0, 0.01, 0.6]))
    def the_other_stream_goes_on(self, fatal, after, share):
        writer = self.others[-1]
        last = writer.highest
        version = Version(last.number + 1 if last else 0, writer.term)
        before = self.other_made[last] if last else first_tensors()
        self.other_made[version] = changed(before, 7 * version.number, share) if share else before

        def publish():
            writer.store = FaultyStore(self.other_store, fatal, after)
            try:
                writer.publish(version.number, self.other_made[version])
                writer.retain()
            except Killed:
                self.a_writer_of_the_other_stream_starts()
            writer.store = self.other_store

        self.beside(publish)

    @precondition(lambda self: len(self.others) > 1)
    @rule()
    def a_zombie_of_the_other_stream_is_fenced(self):
        def publish():
            zombie = self.others[-2]
            number = zombie.highest.number + 1 if zombie.highest else 0
            made = self.other_made.setdefault(Version(number, zombie.term), first_tensors())
            # Its form still has the store of its first publication, which may kill it before.
            with pytest.raises((Fenced, Killed)):
                zombie.publish(number, made)

        self.beside(publish)

    @invariant()
    def the_other_stream_is_what_its_writer_left(self):
        assert objects(self.run_store, self.other) == self.other_objects
        pointer = believed_pointer(self.other_store)
        if pointer is not None:
            version = pointer.version
            assert_same(fetch_tensors(self.other_store, version)[1], self.other_made[version])  # pyright: ignore[reportArgumentType]


class StreamBesideThePolicy(TwoStreams):
    stream, other = WeightStream("draft"), POLICY


def objects(store, stream):
    """All objects of the stream."""
    kept = stream.prefix or "weights/"
    return {entry.key: store.get(entry.key) for entry in store.list(kept)}


VersionStore.TestCase.settings = examples(15, share=2, steps=30)
NamedVersionStore.TestCase.settings = examples(10, share=3, steps=30)
TwoStreams.TestCase.settings = examples(24, share=3, steps=40)
StreamBesideThePolicy.TestCase.settings = examples(24, share=3, steps=40)
VersionStoreOnFiles.TestCase.settings = settings(
    max_examples=10, stateful_step_count=20, deadline=None
)
test_versions_in_memory = VersionStore.TestCase
test_versions_of_a_named_stream = NamedVersionStore.TestCase
test_the_policy_beside_a_named_stream = TwoStreams.TestCase
test_a_named_stream_beside_the_policy = StreamBesideThePolicy.TestCase
test_versions_in_files = VersionStoreOnFiles.TestCase
