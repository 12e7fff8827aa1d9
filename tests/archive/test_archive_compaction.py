"""Merged files: no reader sees a row twice or not at all.

Every call to bus and store is a boundary. Archivers, compactors and readers run step by step; at a
boundary of one of them another one runs, or it is killed there.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollstream.api import open_run
from rollstream.consumers.archive.compaction import Compactor
from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.errors import ObjectMissing
from rollstream.storage.archive.file_names import (
    ArchiveFile,
)
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.reading import (
    BATCH_BYTES,
    archived_files,
    batches_from,
    table_from,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.fence import ARCHIVE_GROUP, truncate
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus
from testbed.servers import versity
from tests.archive.archive_samples import (
    RETAINED_MAX,
    append,
    archived_to,
    large,
    restored,
    retained_bytes,
    trajectory,
)
from tests.archive.archive_world import NEVER, TOPIC, Boundaries, Killed, World, die
from tests.support.shares import examples, one_of

DAY_MS = 1_763_683_200_000


@dataclass
class Reader:
    """Reads rows in order from the files of one listing; lists again when one is gone."""

    store: ObjectStore
    rows: list[tuple[int, bytes | None]] = field(default_factory=list[tuple[int, bytes | None]])
    files: list[ArchiveFile] = field(default_factory=list[ArchiveFile])

    def step(self) -> bool:
        """Read one file of the listing; False at its end."""
        if not self.files:
            self.files = archived_files(self.store, "tiny", TOPIC)
        while self.files:
            file = self.files.pop(0)
            try:
                table = table_from(self.store, file)
            except ObjectMissing:
                self.files = []
                return True
            offsets = table.column("offset").to_pylist()
            before = len(self.rows)
            new = zip(offsets, restored(table, TOPIC), strict=True)
            self.rows += [row for row in new if row[0] >= before]
            if len(self.rows) > before:
                return True
        return False

    def finish(self) -> list[tuple[int, bytes | None]]:
        while self.step():
            pass
        return self.rows


COMPACTED = ArchiveSettings(compact_bytes=40_000, compact_grace_s=30.0, topics=(TOPIC,))
STOP = threading.Event()


class Merging(RuleBasedStateMachine):
    """Archivers, compactors and readers of one partition over several days."""

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.now_s = 0.0
        self.actors: dict[str, tuple[Boundaries, Callable[[], object]]] = {}
        self.readers: dict[str, Reader] = {}
        self.seen = {m.offset: m.value for m in self.world.log()}

    @rule(who=st.sampled_from(["archiver 1", "archiver 2"]))
    def start_archiver(self, who: str) -> None:
        boundaries = Boundaries(NEVER, False, die)
        archiver = self.world.archiver(boundaries)
        self.actors[who] = boundaries, archiver.advance
        self.run(who, archiver.start)

    @rule(who=st.sampled_from(["compactor 1", "compactor 2"]))
    def start_compactor(self, who: str) -> None:
        boundaries = Boundaries(NEVER, False, die)
        compactor = Compactor(
            boundaries.wrap(self.world.store), "tiny", COMPACTED, lambda: self.now_s, 2
        )

        def advance() -> None:
            self.now_s += 61
            compactor.advance(STOP)

        self.actors[who] = boundaries, advance

    @rule(who=st.sampled_from(["reader 1", "reader 2"]))
    def start_reader(self, who: str) -> None:
        boundaries = Boundaries(NEVER, False, die)
        self.readers[who] = Reader(boundaries.wrap(self.world.store))
        self.actors[who] = boundaries, self.readers[who].step

    @rule(days=st.sampled_from([0, 0, 0, 1]))
    def grow(self, days: int) -> None:
        self.world.day += days
        self.world.grow()
        self.seen |= {m.offset: m.value for m in self.world.log()}

    @precondition(lambda self: self.actors)
    @rule(data=st.data(), at=st.integers(0, 12), after=st.booleans(), times=st.integers(1, 3))
    def act(self, data: st.DataObject, at: int, after: bool, times: int) -> None:
        """A step of one; at one of its boundaries others step, or it is killed."""
        who = data.draw(st.sampled_from(sorted(self.actors)))
        rest = st.sampled_from(sorted(set(self.actors) - {who}))
        others = data.draw(st.lists(rest, max_size=4)) if len(self.actors) > 1 else []
        boundaries, action = self.actors[who]

        def meanwhile() -> None:
            if not others:
                die()
            for other in others:
                for _ in range(times):
                    self.run(other, None)

        boundaries.fatal, boundaries.after = boundaries.calls + at, after
        boundaries.act = meanwhile
        self.run(who, action)
        boundaries.fatal = NEVER

    @rule()
    def truncate(self) -> None:
        committed = self.world.bus.committed(ARCHIVE_GROUP, TOPIC)
        truncate(self.world.bus, TOPIC, committed)

    def run(self, who: str, action: Callable[[], object] | None) -> None:
        try:
            if who in self.actors:
                (action or self.actors[who][1])()
        except Killed:
            self.actors.pop(who, None)
            self.readers.pop(who, None)

    @invariant()
    def every_reader_sees_the_log_in_order(self) -> None:
        whole = Reader(self.world.store).finish()
        committed = self.world.bus.committed(ARCHIVE_GROUP, TOPIC)
        assert len(whole) >= (committed[0].offset if committed else 0)
        for rows in [whole, *(reader.rows for reader in self.readers.values())]:
            assert rows == [(offset, self.seen[offset]) for offset in range(len(rows))]
        files = archived_files(self.world.store, "tiny", TOPIC)
        tables = [table_from(self.world.store, file) for file in files]
        assert sum(table.num_rows for table in tables) == len(whole)

    def teardown(self) -> None:
        self.world.run(Boundaries(NEVER, False, die))
        for reader in [Reader(self.world.store), *self.readers.values()]:
            assert dict(reader.finish()) == self.seen
        assert archived_to(self.world.store, "tiny", TOPIC) == self.world.bus.end(TOPIC)


TestMerging = Merging.TestCase
TestMerging.settings = examples(12, share=2, steps=30)


def life_of_compactor(world: World, boundaries: Boundaries) -> int:
    """From start to the last deletion, or to its death; the calls that it made."""
    now_s = [0.0]
    given = COMPACTED.model_copy(update={"compact_grace_s": 0.0})
    compactor = Compactor(boundaries.wrap(world.store), "tiny", given, lambda: now_s[0], 2)
    try:
        for _ in range(3):
            compactor.advance(STOP)
            now_s[0] += 61
    except Killed:
        pass
    return boundaries.calls


def alive() -> Boundaries:
    return Boundaries(NEVER, False, die)


@pytest.mark.parametrize("after", [False, True])
def test_an_archiver_suspended_while_its_files_are_merged_and_deleted(after: bool) -> None:
    """At every boundary of it: then its next file, which is longer, has a name that is free."""
    longer = ArchiveSettings(roll_bytes=900, roll_s=1000.0)
    for fatal in range(World().run(alive(), longer)):
        world = World()

        def meanwhile(world: World = world) -> None:
            for _ in range(4):
                world.grow()
                world.run(alive())
            life_of_compactor(world, alive())

        world.run(Boundaries(fatal, after, meanwhile), longer)
        for _ in range(2):
            world.run(alive())
            world.assert_exactly_once()
            life_of_compactor(world, alive())


@pytest.mark.parametrize("after", one_of(2, [False, True]))
def test_two_compactors_at_every_pair_of_boundaries(after: bool) -> None:
    """While the first stands at boundary m more is archived and the second lives, until its own
    boundary n.
    """
    pairs = [(m, n) for m in range(0, 40, 3) for n in [*range(m % 8, 30, 8), NEVER]]
    for m, n in pairs:
        world = World()
        world.run(alive())

        def meanwhile(world: World = world, n: int = n) -> None:
            for _ in range(3):
                world.grow()
                world.run(alive())
            life_of_compactor(world, Boundaries(n, not after, die))

        life_of_compactor(world, Boundaries(m, after, meanwhile))
        world.assert_exactly_once()
        life_of_compactor(world, alive())
        world.assert_exactly_once()


def archive_of(store: ObjectStore, files: int) -> MemoryBus:
    """An archive of trajectories in so many files of one day, and one of the next."""
    now_s = [DAY_MS / 1000]
    bus = MemoryBus(lambda: now_s[0])
    bus.create(catalogue(1))
    archive = TopicArchive(bus, store, "tiny", "trajectories", ArchiveSettings())
    archive.start()
    for number in range(files + 1):
        now_s[0] += 86_400 * (number == files)
        append(bus, "trajectories", [trajectory(number, 3 + number), trajectory(number, 0)])
        archive.finish()
    return bus


def rows(store: ObjectStore) -> Iterator[tuple[str, bytes | None]]:
    for file in archived_files(store, "tiny", "trajectories"):
        table = table_from(store, file)
        yield from zip(
            table.column("timestamp").cast("string").to_pylist(),
            restored(table, "trajectories"),
            strict=True,
        )


def compact(store: ObjectStore) -> Compactor:
    """One compactor without grace, from listing to listing until nothing is left to do."""
    now_s = [0.0]
    given = ArchiveSettings(topics=("trajectories",), compact_grace_s=0.0)
    compactor = Compactor(store, "tiny", given, lambda: now_s[0])
    for _ in range(3):
        compactor.advance(STOP)
        now_s[0] += 60
    return compactor


def test_an_open_query_session_and_log_find_the_rows_of_deleted_files(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}/store")
    archive_of(store, 5)
    view = LogView(None, store, "tiny")
    with open_run(f"file:{tmp_path}/store") as run:
        count = 'SELECT count(*) AS n, sum("offset") AS s FROM trajectories'
        before = run.sql(count).to_pylist()
        (first,) = view.read("trajectories", {0: 0}, records_max=1)
        assert compact(store).deleted == 5
        assert run.sql(count).to_pylist() == before == [{"n": 12, "s": 66}]
        (second,) = view.read("trajectories", {0: 2}, records_max=1)
        assert (first.offset, second.offset) == (0, 2)


@pytest.mark.parametrize("url", [lambda path: f"file:{path}", lambda path: versity.new_url()])
def test_the_compactor_merges_a_day_and_deletes_after_the_grace(
    url: Callable[[Path], str], tmp_path: Path
) -> None:
    store = open_store(url(tmp_path))
    archive_of(store, 5)
    before, now_s = list(rows(store)), [0.0]
    given = ArchiveSettings(topics=("trajectories",), compact_grace_s=100.0)
    compactor = Compactor(store, "tiny", given, lambda: now_s[0])
    present: list[int] = []
    for _ in range(4):
        compactor.advance(STOP)
        now_s[0] += 60
        assert list(rows(store)) == before
        present.append(len(list(store.list("archive/"))))
    assert present == [7, 7, 7, 2]
    assert (compactor.merged, compactor.deleted) == (1, 5)
    assert archived_to(store, "tiny", "trajectories") == {0: 12}
    assert [f.last for f in archived_files(store)] == [9, None]


@dataclass
class Rounds(threading.Event):
    """Stops a service after so many rounds; measures between them."""

    left: int
    retained: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        super().__init__()

    def wait(self, timeout: float | None = None) -> bool:
        self.retained.append(retained_bytes())
        self.left -= 1
        return self.left == 0


def test_the_archive_role_keeps_no_memory_of_large_files(tmp_path: Path) -> None:
    """It kept as much as the largest merge took: 26 MB more in the last quarter of a long run."""
    store, now_s = open_store(f"file:{tmp_path}"), [0.0]
    day = [0]
    bus = MemoryBus(lambda: DAY_MS / 1000 + 86_400 * day[0])
    bus.create(catalogue(1))
    given = ArchiveSettings(topics=("annotations",), roll_bytes=4 << 20)

    def monotonic() -> float:
        now_s[0] += 200
        return now_s[0]

    service = ArchiveService(bus, store, "tiny", given, monotonic)
    append(bus, "annotations", [large(number) for number in range(1000)])
    day[0] = 1
    append(bus, "annotations", [large(1000)])
    rounds = Rounds(6)
    service.run(rounds)
    assert service.metric_values()["archive_merged_total"]
    assert max(rounds.retained[1:]) < RETAINED_MAX


def test_a_large_compressible_file_is_read_in_parts(tmp_path: Path) -> None:
    store, bus = open_store(f"file:{tmp_path}"), MemoryBus(lambda: DAY_MS / 1000)
    bus.create(catalogue(1))
    archive = TopicArchive(
        bus, store, "tiny", "annotations", ArchiveSettings(topics=("annotations",))
    )
    archive.start()
    append(bus, "annotations", [large(number) for number in range(600)])
    archive.finish()
    (file,) = archived_files(store)
    sizes = [batch.nbytes for batch in batches_from(store, file)]
    assert file.bytes < BATCH_BYTES / 4
    assert sum(sizes) > 4 * BATCH_BYTES
    assert max(sizes) < 2 * BATCH_BYTES


def test_damaged_files_stay_and_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(f"file:{tmp_path}")
    archive_of(store, 3)
    damaged = archived_files(store)[1].key
    store.put(damaged, store.get(damaged)[:-9] + b"no tail!!")
    compactor = compact(store)
    assert caplog.text.count(damaged) == 1
    assert (compactor.merged, compactor.deleted) == (0, 0)


def test_files_are_kept_beside_a_damaged_merged_file(tmp_path: Path) -> None:
    store, now_s = open_store(f"file:{tmp_path}"), [0.0]
    archive_of(store, 3)
    given = ArchiveSettings(topics=("trajectories",), compact_grace_s=0.0)
    compactor = Compactor(store, "tiny", given, lambda: now_s[0])
    compactor.advance(STOP)
    (wide, _) = archived_files(store)
    store.put(wide.key, b"PAR1 and no more")
    now_s[0] += 60
    compactor.advance(STOP)
    assert compactor.deleted == 0
    store.delete(wide.key)
    assert len(list(rows(store))) == 8
