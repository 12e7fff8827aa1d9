"""Each rule of the order of reading, against the interleaving that it stops."""

from collections.abc import Callable
from pathlib import Path

from rollstream.keep.cut import fix_cut
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.fence import TRUNCATED_GROUP, truncate
from rollstream.streams.records import Position
from tests.backup.copies import store_of


class Between(BusWrapper):
    """Calls `act` behind the nth call of a method on a topic."""

    def __init__(self, below: Bus, method: str, topic: str, act: Callable[[], None]) -> None:
        super().__init__(below)
        self._due, self._act = (method, topic), act

    def _called(self, method: str, topic: str) -> None:
        if (method, topic) == self._due:
            self._due = ("", "")
            self._act()

    def begin(self, topic: str) -> dict[int, int]:
        found = super().begin(topic)
        self._called("begin", topic)
        return found

    def end(self, topic: str) -> dict[int, int]:
        found = super().end(topic)
        self._called("end", topic)
        return found


def test_the_fence_of_a_begin_is_known_though_the_log_is_truncated_meanwhile(
    run: Path, bus: Bus
) -> None:
    end = bus.end("ledger")[0]

    def act() -> None:
        truncate(bus, "ledger", {0: Position(end - 1)})

    cut = fix_cut(Between(bus, "begin", "ledger", act), store_of(run), "tiny")
    (ledger,) = (one for one in cut.topics if one.topic.name == "ledger")
    assert ledger.begins[0] < end - 1
    at = {one.partition: one.at for one in ledger.commits if one.group == TRUNCATED_GROUP}
    assert at[0].offset >= ledger.begins[0]


def test_a_file_that_the_archive_creates_behind_the_cut_is_not_in_it(run: Path, bus: Bus) -> None:
    store = store_of(run)
    (key, *_) = sorted(one.key for one in store.list("archive/topic=ledger/"))
    new = f"{key.rpartition('-')[0]}-{10**6:020d}.parquet"
    between = Between(bus, "end", "ledger", lambda: void(store.create(new, b"later")))
    cut = fix_cut(between, store, "tiny")
    assert key in {one.key for one in cut.listed}
    assert new not in {one.key for one in cut.listed}


def void(_: object) -> None:
    pass


def test_a_trainer_that_publishes_between_two_looks_is_in_the_cut_as_a_whole(
    run: Path, bus: Bus
) -> None:
    """The trajectory of the new version is there only with ledger and announcement."""

    def act() -> None:
        for topic in ("ledger", "weights", "trajectories"):
            bus.append(topic, [AppendEntry(b"k", b"published", 0)])

    cut = fix_cut(Between(bus, "end", "dead", act), store_of(run), "tiny")
    ends = {one.topic.name: one.ends for one in cut.topics}
    for topic in ("ledger", "weights", "trajectories"):
        assert ends[topic][0] == bus.end(topic)[0], topic


def test_an_annotation_is_only_there_with_its_trajectory(run: Path, bus: Bus) -> None:
    def act() -> None:
        for topic in ("trajectories", "annotations"):
            bus.append(topic, [AppendEntry(b"k", b"finished", 0)])

    before = bus.end("annotations")[0]
    cut = fix_cut(Between(bus, "end", "annotations", act), store_of(run), "tiny")
    ends = {one.topic.name: one.ends for one in cut.topics}
    assert ends["annotations"][0] == before
