"""Two competing archivers that die anywhere leave every row exactly once.

Every call to bus and store is a boundary. At each boundary of one archiver another one runs, alive
or killed at each boundary of its own, before the call or after it; the log grows meanwhile, so the
two have read different amounts when they create a file of the same name.
"""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.errors import BusError, PositionLost
from rollstream.storage.archive.file_names import message_bytes
from rollstream.storage.archive.reading import archived_files, table_from
from rollstream.storage.archive.rows import classify_rows
from rollstream.storage.archive.tables import originals_of
from rollstream.streams.fence import ARCHIVE_GROUP, truncate
from rollstream.streams.topics import catalogue
from testbed.memory import MemoryBus
from tests.archive.archive_samples import archived_to
from tests.archive.archive_world import NEVER, SETTINGS, TOPIC, Boundaries, Killed, World, die
from tests.support.shares import examples


def calls_of_a_life() -> int:
    return World().run(Boundaries(NEVER, False, die))


def test_a_life_has_boundaries_enough_to_be_worth_killing_at() -> None:
    assert calls_of_a_life() > 12
    world = World()
    world.run(Boundaries(NEVER, False, die))
    assert len(archived_files(world.store, "tiny", TOPIC)) >= 3
    world.assert_exactly_once()


@pytest.mark.parametrize("after", [False, True])
def test_one_archive_killed_at_every_boundary_and_started_again(after: bool) -> None:
    for fatal in range(calls_of_a_life()):
        world = World()
        world.run(Boundaries(fatal, after, die))
        world.grow()
        world.run(Boundaries(NEVER, False, die))
        world.assert_exactly_once()


@pytest.mark.parametrize(
    ("then_dies", "after"),
    [
        (True, True),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_two_archives_at_every_pair_of_boundaries(after: bool, then_dies: bool) -> None:
    """While the first archiver is stopped at boundary m the log grows and the second one runs until
    its own boundary n; then the first continues or dies. Every m meets every fourth n, and four
    neighbours together all of them.
    """
    boundaries = calls_of_a_life() + 2
    for m in range(boundaries):
        for n in [*range(m % 4, boundaries, 4), NEVER]:
            world = World()

            def meanwhile(world: World = world, n: int = n) -> None:
                world.grow()
                world.run(Boundaries(n, not after, die))
                if then_dies:
                    die()

            world.run(Boundaries(m, after, meanwhile))
            world.run(Boundaries(NEVER, False, die))
            world.assert_exactly_once()


class Competition(RuleBasedStateMachine):
    """Any number of archivers, step by step, while the log grows and is truncated up to the
    archive's commits; each step may be interrupted by a step of another, or killed.
    """

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.archivers: dict[int, TopicArchive] = {}
        self.boundaries: dict[int, Boundaries] = {}
        self.seen = {m.offset: m.value for m in self.world.log()}

    @rule(who=st.integers(0, 2))
    def start(self, who: int) -> None:
        self.boundaries[who] = Boundaries(NEVER, False, die)
        self.archivers[who] = self.world.archiver(self.boundaries[who])
        self.step(who, self.archivers[who].start)

    @rule()
    def grow(self) -> None:
        self.world.grow()
        self.seen |= {m.offset: m.value for m in self.world.log()}

    @precondition(lambda self: self.archivers)
    @rule(data=st.data(), ends=st.booleans(), at=st.integers(0, 12), after=st.booleans())
    def act(self, data: st.DataObject, ends: bool, at: int, after: bool) -> None:
        """A step of one archiver; at one of its boundaries another one steps, or it is killed."""
        who = data.draw(st.sampled_from(sorted(self.archivers)))
        other = data.draw(st.sampled_from([*sorted(set(self.archivers) - {who}), None]))
        boundaries = self.boundaries[who]
        boundaries.fatal, boundaries.after = boundaries.calls + at, after
        boundaries.act = die if other is None else lambda: self.step(other, self.finish(other))
        self.step(who, self.finish(who) if ends else self.archivers[who].advance)
        boundaries.fatal = NEVER

    @rule()
    def truncate(self) -> None:
        committed = self.world.bus.committed(ARCHIVE_GROUP, TOPIC)
        truncate(self.world.bus, TOPIC, committed)

    def finish(self, who: int) -> Callable[[], object]:
        return self.archivers[who].finish

    def step(self, who: int, action: Callable[[], object]) -> None:
        try:
            action()
        except Killed:
            self.archivers.pop(who, None)

    def rows(self) -> list[tuple[int, bytes | None]]:
        found: list[tuple[int, bytes | None]] = []
        for file in archived_files(self.world.store, "tiny", TOPIC):
            table = table_from(self.world.store, file)
            found += zip(
                table.column("offset").to_pylist(), originals_of(table, TOPIC), strict=True
            )
        return found

    @invariant()
    def rows_are_the_log_so_far(self) -> None:
        for expected, (offset, value) in enumerate(self.rows()):
            assert (offset, value) == (expected, self.seen[offset])

    def teardown(self) -> None:
        self.world.run(Boundaries(NEVER, False, die))
        assert dict(self.rows()) == self.seen
        assert archived_to(self.world.store, "tiny", TOPIC) == self.world.bus.end(TOPIC)


TestCompetition = Competition.TestCase
TestCompetition.settings = examples(40, share=3, steps=20)


def test_records_truncated_before_they_were_archived_are_reported_and_no_gap_is_left() -> None:
    world = World()
    first = world.archiver(Boundaries(NEVER, False, die))
    first.start()
    first.advance()
    world.grow()
    archived = archived_to(world.store, "tiny", TOPIC)[0]
    world.bus.truncate(TOPIC, {0: archived + 2})
    with pytest.raises(PositionLost, match=f"records {archived} to {archived + 1} were truncated"):
        world.archiver(Boundaries(NEVER, False, die)).start()
    assert archived_to(world.store, "tiny", TOPIC)[0] == archived


def test_a_log_that_was_replaced_by_a_shorter_one_is_refused() -> None:
    world = World()
    world.run(Boundaries(NEVER, False, die))
    world.bus = MemoryBus()
    world.bus.create(catalogue(1))
    with pytest.raises(BusError, match="beyond the end"):
        world.run(Boundaries(NEVER, False, die))


def test_commits_bound_how_far_the_log_may_be_truncated() -> None:
    """Invariant 11: the log is truncated up to archived positions only, with the fence in the
    archive.
    """
    world = World()
    archiver = world.archiver(Boundaries(NEVER, False, die))
    archiver.start()
    assert world.bus.committed(ARCHIVE_GROUP, TOPIC)[0].offset == 0
    archiver.advance()
    at = world.bus.committed(ARCHIVE_GROUP, TOPIC)[0]
    assert at.offset == archived_to(world.store, "tiny", TOPIC)[0] > 0
    assert at.fence == classify_rows(TOPIC, world.log()[: at.offset])[1][0]


def test_what_is_held_has_a_bound() -> None:
    """Invariant 8: a file is written as soon as a topic's records take `roll_bytes`."""
    world = World()
    for _ in range(30):
        world.grow()
    archiver = world.archiver(Boundaries(NEVER, False, die))
    archiver.start()
    smallest, largest = (of(map(message_bytes, world.log())) for of in (min, max))
    while archiver.advance():
        assert archiver.pending() * smallest < SETTINGS.roll_bytes
    assert len(archived_files(world.store, "tiny", TOPIC)) > 10
    assert all(
        table_from(world.store, file).num_rows * smallest <= SETTINGS.roll_bytes + 3 * largest
        for file in archived_files(world.store, "tiny", TOPIC)
    )
