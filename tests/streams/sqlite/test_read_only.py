"""The reader of a log that may come from somebody else (`streams/sqlite/read_only.py`): it reads
all that was acknowledged, changes no file, and runs no SQL that a file defines.
"""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import BusError, OutsideRun, PositionLost, ReadOnly, TopicMissing
from rollstream.streams.bus import AppendEntry
from rollstream.streams.records import Position
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.sqlite.database import Database
from rollstream.streams.sqlite.read_only import SqliteReader
from rollstream.streams.topics import Topic

TOPIC = Topic("events", 2)


def append(bus: SqliteBus, *values: str) -> None:
    bus.append("events", [AppendEntry(b"k", value.encode(), 0) for value in values])


def written(folder: Path, *values: str) -> SqliteBus:
    bus = SqliteBus(folder)
    bus.create([TOPIC])
    append(bus, *values)
    return bus


def reader(folder: Path) -> SqliteReader:
    return SqliteReader(ContainedFolder(folder))


def values(bus: SqliteReader | SqliteBus, start: int = 0) -> list[str]:
    return [(m.value or b"").decode() for m in bus.read("events", {0: start, 1: 0})]


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file, without the index of a log in use, which readers lock."""
    stats = {path.name: path.stat() for path in folder.iterdir() if path.suffix != ".db-shm"}
    return {name: (found.st_size, found.st_mtime_ns) for name, found in stats.items()}


def test_a_stopped_log_is_read_and_no_file_is_made(tmp_path):
    bus = written(tmp_path / "bus", "a", "b")
    bus.commit("group", "events", {0: Position(1)})
    bus.close()
    before = files(tmp_path / "bus")
    log = reader(tmp_path / "bus")
    assert values(log) == ["a", "b"]
    assert log.end("events") == {0: 2, 1: 0}
    assert log.committed("group", "events") == {0: Position(1)}
    log.close()
    assert files(tmp_path / "bus") == before
    assert not list((tmp_path / "bus").glob("*-shm"))


def test_a_living_log_is_followed(tmp_path):
    bus, log = written(tmp_path / "bus", "a"), reader(tmp_path / "bus")
    assert values(log) == ["a"]
    append(bus, "b")
    assert values(log, 1) == ["b"]
    bus.truncate("events", {0: 1})
    with pytest.raises(PositionLost):
        values(log)


def test_a_run_that_starts_again_is_followed_by_a_reader_that_came_before(tmp_path):
    written(tmp_path / "bus", "a").close()
    log = reader(tmp_path / "bus")
    assert values(log) == ["a"]
    for value in ("b", "c"):
        bus = SqliteBus(tmp_path / "bus")
        append(bus, value)
        assert values(log)[-1] == value
        bus.close()
        assert values(log)[-1] == value


def test_a_copy_with_a_write_ahead_log_alone_is_read_whole(tmp_path):
    bus = written(tmp_path / "bus", "a", "b")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (tmp_path / "bus").iterdir():
        if path.suffix != ".db-shm":
            shutil.copy(path, copy)
    bus.close()
    before = files(copy)
    log = reader(copy)
    assert values(log) == ["a", "b"]
    log.close()
    assert files(copy) == before
    assert not list(copy.glob("*-shm"))


def test_what_a_killed_run_left_is_read_whole(tmp_path):
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        written(tmp_path / "bus", "a", "b")
        os.write(go, b"1")
        os.kill(os.getpid(), 9)
    os.read(ready, 1)
    os.waitpid(child, 0)
    assert list((tmp_path / "bus").glob("events.db-wal"))
    before = files(tmp_path / "bus")
    log = reader(tmp_path / "bus")
    assert values(log) == ["a", "b"]
    log.close()
    assert files(tmp_path / "bus") == before


def test_every_write_is_refused(tmp_path):
    written(tmp_path / "bus", "a").close()
    log = reader(tmp_path / "bus")
    for write in (
        lambda: log.create([TOPIC]),
        lambda: log.append("events", [AppendEntry(b"k", b"v")]),
        lambda: log.truncate("events", {0: 1}),
        lambda: log.commit("g", "events", {0: Position(1)}),
        lambda: log.join("g", "events", "m"),
    ):
        with pytest.raises(ReadOnly, match="opened for reading"):
            write()


def test_a_missing_topic_and_an_empty_file_are_no_topic(tmp_path):
    (tmp_path / "empty.db").touch()
    log = reader(tmp_path)
    for topic in ("events", "empty"):
        with pytest.raises(TopicMissing):
            log.end(topic)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.db"]


@pytest.mark.parametrize(
    "sql",
    [
        "ALTER TABLE log_0 RENAME TO old; CREATE VIEW log_0 AS SELECT * FROM old",
        "CREATE TRIGGER t AFTER INSERT ON log_0 BEGIN SELECT 1; END",
        "CREATE VIRTUAL TABLE v USING fts5(x)",
        "CREATE TABLE computed (a INT, b INT GENERATED ALWAYS AS (zeroblob(1000000000)))",
        "CREATE TABLE copied AS SELECT 1; CREATE VIEW w AS WITH RECURSIVE r(x) AS "
        "(SELECT 1 UNION ALL SELECT x FROM r) SELECT * FROM r",
    ],
)
def test_sql_that_a_file_defines_is_refused(tmp_path, sql):
    written(tmp_path, "a").close()
    connection = sqlite3.connect(tmp_path / "events.db")
    connection.executescript(sql)
    connection.close()
    with pytest.raises(BusError, match=r"not written by this program|is not a topic"):
        reader(tmp_path).end("events")


@pytest.mark.parametrize(
    "settings",
    [
        '{"name": "events", "partitions": 1000000000}',
        '{"name": "other"}',
        '{"name": "events", "partitions": "2"}',
        "[" * 100_000,
        "{}",
    ],
)
def test_settings_that_no_topic_has_are_refused(tmp_path, settings):
    written(tmp_path, "a").close()
    connection = sqlite3.connect(tmp_path / "events.db")
    connection.execute("UPDATE settings SET topic = ?", (settings,))
    connection.commit()
    connection.close()
    with pytest.raises(BusError, match="is not a topic of a bus"):
        reader(tmp_path).end("events")


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_links_and_pipes_in_place_of_files_are_not_opened(tmp_path, suffix, what):
    target = tmp_path / "target"
    target.write_bytes(b"user")
    (tmp_path / "bus").mkdir()
    if suffix:
        written(tmp_path / "bus", "a").close()
    place = tmp_path / "bus" / f"events.db{suffix}"
    place.symlink_to(target) if what == "link" else os.mkfifo(place)
    with pytest.raises(OutsideRun, match=r"events\.db"):
        reader(tmp_path / "bus").end("events")
    assert target.read_bytes() == b"user"


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TRIGGER t AFTER INSERT ON commits BEGIN DELETE FROM commits; END",
        "CREATE VIEW v AS SELECT 1",
        "ALTER TABLE members ADD COLUMN x AS (zeroblob(1000000000))",
    ],
)
def test_a_writer_runs_no_sql_of_the_file_of_groups(tmp_path, sql):
    written(tmp_path, "a").close()
    with closing(sqlite3.connect(tmp_path / "groups.db")) as database:
        database.execute(sql)
        database.commit()
    with pytest.raises(BusError, match="runs SQL of its own"):
        SqliteBus(tmp_path)


def test_a_log_that_begins_at_the_greatest_number_is_refused(tmp_path):
    """Readers take so high an offset as "no end", and never reach it."""
    written(tmp_path, "a").close()
    with closing(sqlite3.connect(tmp_path / "events.db")) as database:
        database.execute("UPDATE begins SET begin = 9223372036854775807")
        database.commit()
    for bus in (reader(tmp_path), SqliteBus(tmp_path)):
        with closing(bus), pytest.raises(BusError, match="which is no offset"):
            bus.begin("events")


def test_a_journal_that_names_another_file_deletes_nothing(tmp_path):
    """SQLite deletes the file that the journal of a transaction over several files names."""
    target = tmp_path / "key"
    target.write_bytes(b"user")
    path = tmp_path / "events.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE settings (topic TEXT)")
    name = str(target).encode()
    record = (1).to_bytes(4) + name + len(name).to_bytes(4) + sum(name).to_bytes(4)
    magic = bytes.fromhex("d9d505f920a163d7")
    header = (magic + bytes(12) + (1).to_bytes(4) + (512).to_bytes(4) + (4096).to_bytes(4)).ljust(
        512, b"\0"
    )
    Path(f"{path}-journal").write_bytes(header + record + magic)
    with pytest.raises(BusError, match=r"events\.db-journal names another file"):
        Database(path, "normal")
    assert target.read_bytes() == b"user"


class FollowedLog(RuleBasedStateMachine):
    """A writer appends, truncates, closes and opens again; one reader, opened once, always reads
    what the writer acknowledged (the contract of `Bus.read`).
    """

    @initialize(folder=st.builds(lambda: None))
    def begin(self, folder: None) -> None:
        import tempfile

        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name) / "bus"
        self.bus = written(self.folder)
        self.log = reader(self.folder)
        self.count, self.first = 0, 0

    @rule(number=st.integers(1, 40))
    def append(self, number: int) -> None:
        append(self.bus, *(str(self.count + i) for i in range(number)))
        self.count += number

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        before = self.first + int((self.count - self.first) * share)
        self.bus.truncate("events", {0: before})
        self.first = self.bus.begin("events")[0]

    @rule()
    def restart(self) -> None:
        self.bus.close()
        self.check()
        self.bus = SqliteBus(self.folder)

    @rule()
    def check(self) -> None:
        assert self.log.begin("events")[0] == self.first
        assert self.log.end("events")[0] == self.count
        assert values(self.log, self.first) == [str(i) for i in range(self.first, self.count)]

    def teardown(self) -> None:
        if hasattr(self, "bus"):
            self.check()
            self.bus.close()
            self.log.close()
            self.scratch.cleanup()


TestFollowedLog = FollowedLog.TestCase
TestFollowedLog.settings = settings(max_examples=15, stateful_step_count=12)
