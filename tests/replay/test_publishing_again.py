"""`rollstream replay --to`: the same records in another bus, from the log or from the archive."""

import json
import shutil
from pathlib import Path

import pytest

from rollstream.keep.replay.topic_copy import HISTORY, TopicHash, hash_topic
from rollstream.run.cli.main import main
from rollstream.storage.claim_check import open_log
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.streams.fence import truncate
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Fence, GroupClosed, Position
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter
from testbed.servers.kafka_broker import new_url
from tests.support.kept_run import made
from tests.support.killed_at import run_killed_at


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its log is truncated, its archive is whole."""
    return made(tmp_path_factory.mktemp("forgetful"), archive=True, truncate=True)


def publish(run: Path, to: str, *words: str) -> list[str]:
    return ["replay", str(run), "--to", to, "--json", *words]


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    return {one["topic"]: one for one in json.loads(capsys.readouterr().out)["topics"]}


def values(url: str, topic: str) -> dict[int, list[bytes | None]]:
    bus = open_bus(url)
    found = {
        partition: [
            m.value for m in bus.read(topic, {partition: 0}, records_max=9999, bytes_max=1 << 30)
        ]
        for partition, end in bus.end(topic).items()
        if end
    }
    bus.close()
    return found


def live(run: Path, topic: str) -> dict[int, list[bytes | None]]:
    """The records of the run's log itself, by partition."""
    bus = open_log(f"sqlite:{run / 'bus'}", f"file:{run / 'store'}")
    found = {
        p: [m.value for m in bus.read(topic, {p: first}, records_max=9999, bytes_max=1 << 30)]
        for p, first in bus.begin(topic).items()
        if first < bus.end(topic)[p]
    }
    bus.close()
    return found


@pytest.mark.parametrize("target", ["sqlite", "kafka"])
def test_a_copy_holds_the_same_records_in_the_same_order(target, run, tmp_path, capsys):
    """Truncated records come first, from the archive."""
    to = f"sqlite:{tmp_path}/copy" if target == "sqlite" else new_url()
    assert main(publish(run, to)) == 0
    first = printed_json(capsys)
    assert set(first) <= set(HISTORY)
    for topic in ("ledger", "trajectories"):
        kept, copied = live(run, topic), values(to, topic)
        assert sum(map(len, copied.values())) == first[topic]["records"]
        assert first[topic]["records"] > sum(map(len, kept.values()))
        assert all(copied[p][-len(records) :] == records for p, records in kept.items())
        bus = open_bus(to)
        assert hash_topic(bus, topic).digest() == first[topic]["content_hash"]
        bus.close()
    assert main(publish(run, to)) == 0, "a second time there is nothing to write"
    again = printed_json(capsys)
    assert again["ledger"]["already"] == again["ledger"]["records"] == first["ledger"]["records"]


def test_an_archive_alone_gives_the_same_copy_as_far_as_it_goes(run, tmp_path, capsys):
    """The newest records of a run may be in its log only."""
    one, two = f"sqlite:{tmp_path}/one", f"sqlite:{tmp_path}/two"
    assert main(publish(run, one)) == 0
    whole = printed_json(capsys)
    shutil.copytree(run / "store" / "archive", tmp_path / "kept" / "archive")
    assert main(publish(tmp_path / "kept" / "archive", two)) == 0
    alone = printed_json(capsys)
    for topic in ("ledger", "trajectories"):
        before, after = values(one, topic), values(two, topic)
        assert sum(map(len, after.values()))
        assert all(records == before[p][: len(records)] for p, records in after.items())
        same = whole[topic]["content_hash"] == alone[topic]["content_hash"]
        assert same == (whole[topic]["records"] == alone[topic]["records"])


def test_a_copy_is_read_like_the_run_by_its_readers(run: Path, tmp_path: Path):
    """Terms and sequence numbers are complete: nothing is void, nothing is missing (invariant
    7).
    """
    assert main(publish(run, f"sqlite:{tmp_path}/copy", "--topic", "ledger")) == 0
    bus = open_bus(f"sqlite:{tmp_path}/copy")
    reader = TopicReader(bus, "ledger", from_begin(bus, "ledger"))
    assert reader.read_to(bus.end("ledger"))
    assert (reader.void, reader.dead) == (0, 0)
    bus.close()


def test_a_fence_whose_opening_was_truncated_is_in_the_copy(tmp_path: Path):
    """Invariant 7: `Opened 2` is truncated away, the first record kept is a zombie's."""
    run = tmp_path / "run"
    bus = SqliteBus(run / "bus")
    bus.create(catalogue())
    old, new = (FencedWriter(bus, "ledger", "trainer", term) for term in (1, 2))
    old.open()
    new.open()
    new.append([("run", GroupClosed(1, "dead", "", 1))])
    old.append([("run", GroupClosed(99, "dead", "a zombie", 1))])
    (last,) = new.append([("run", GroupClosed(2, "dead", "", 2))])
    truncate(bus, "ledger", {0: Position(last.offset - 1, Fence(2, 2))})
    (run / "config.json").write_text('{"run": "tiny", "bus": "sqlite:bus"}')
    assert main(publish(run, f"sqlite:{tmp_path}/copy")) == 0
    copy = open_bus(f"sqlite:{tmp_path}/copy")
    reader = TopicReader(copy, "ledger", from_begin(copy, "ledger"))
    groups = [received.record.group for received in reader.read_to(copy.end("ledger"))]  # pyright: ignore[reportAttributeAccessIssue]
    assert (groups, reader.void) == ([2], 1)
    copy.close()


def test_a_filter_chooses_by_what_only_the_ledger_knows(run: Path, tmp_path: Path, capsys):
    def chosen(name: str, *where: str) -> int:
        words = [word for one in where for word in ("--where", one)]
        assert main(publish(run, f"sqlite:{tmp_path}/{name}", *words)) == 0
        return printed_json(capsys)["trajectories"]["records"]

    every = chosen("all", "time>=2020-01-01")
    early, late = chosen("early", "step<=3"), chosen("late", "step>3")
    untrained = chosen("untrained", "step=null")
    assert min(early, late) > 0
    assert early + late + untrained == every
    assert chosen("lag", "lag>=0") == early + late
    assert chosen("none", "time<2020-01-01") == 0
    rewards = [chosen("good", "reward>=0.5"), chosen("bad", "reward<0.5")]
    assert min(rewards) > 0
    assert sum(rewards) == every


def test_a_bus_that_holds_other_records_is_refused(run: Path, tmp_path: Path, capsys):
    bus = SqliteBus(tmp_path / "other")
    bus.create(catalogue(2))
    bus.append("ledger", [AppendEntry(b"run", b"something")])
    assert main(publish(run, f"sqlite:{tmp_path}/other")) == 2
    assert "holds 1 records in ledger already" in capsys.readouterr().err
    assert not any(bus.end("trajectories").values())
    assert main(publish(run, f"sqlite:{run}/bus")) == 2


def test_a_copy_of_another_source_is_not_gone_on_with(run: Path, tmp_path: Path, capsys):
    to = f"sqlite:{tmp_path}/copy"
    assert main(publish(run, to, "--where", "step<=3")) == 0
    assert main(publish(run, to, "--where", "step>3")) == 2
    assert "holds something else from offset 0 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--topic", "ledger", "--where", "step>3"], "a log that lost records"),
        (["--topic", "weights"], "is compacted"),
        (["--topic", "trajectorys"], "did you mean 'trajectories'?"),
        (["--where", "time>=soon"], "ISO 8601"),
        (["--where", "lagg>3"], "did you mean 'lag"),
        (["--out", "somewhere"], "--out has no meaning with --to"),
        (["--from-step", "3"], "one of"),
    ],
)
def test_a_wish_that_means_nothing_is_refused(words, expected, run, tmp_path, capsys):
    assert main(publish(run, f"sqlite:{tmp_path}/copy", *words)) == 2
    assert expected in capsys.readouterr().err


@pytest.fixture(scope="module")
def long_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 20 000 records, so that a copy can be killed in the middle."""
    folder = tmp_path_factory.mktemp("long")
    bus = SqliteBus(folder / "bus")
    bus.create(catalogue())
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    for start in range(0, 20_000, 1000):
        numbers = range(start, start + 1000)
        writer.append([("run", GroupClosed(n, "dead", "x" * 300, 1)) for n in numbers])
    bus.close()
    (folder / "config.json").write_text('{"run": "tiny", "bus": "sqlite:bus"}')
    return folder


@pytest.mark.slow
def test_a_copy_that_was_killed_resumes_exactly(long_archive: Path, tmp_path: Path, capsys):
    to = f"sqlite:{tmp_path}/copy"
    run_killed_at("rollstream.streams.sqlite.bus:SqliteBus.append", 3, publish(long_archive, to))
    bus = open_bus(to)
    there = bus.end("ledger")[0]
    assert 0 < there < 20_001, "it was not killed in the middle"
    assert main(publish(long_archive, to)) == 0
    found = printed_json(capsys)["ledger"]
    assert (found["already"], found["records"]) == (there, 20_001)
    source = open_bus(f"sqlite:{long_archive}/bus")
    assert hash_topic(source, "ledger").digest() == found["content_hash"]
    assert hash_topic(bus, "ledger").digest() == found["content_hash"]
    bus.close()


def test_a_hash_depends_on_order_partition_and_framing():
    def digest(*records: tuple[int, bytes, bytes | None]) -> str:
        contents = TopicHash()
        for record in records:
            contents.add(*record)
        return contents.digest()

    one = digest((0, b"a", b"b"), (0, b"c", b"d"))
    assert one == digest((0, b"a", b"b"), (0, b"c", b"d"))
    others = {
        digest((0, b"c", b"d"), (0, b"a", b"b")), digest((1, b"a", b"b"), (0, b"c", b"d")),
        digest((0, b"ab", b""), (0, b"c", b"d")), digest((0, b"a", b"b")),
        digest((0, b"a", None), (0, b"c", b"d")), digest((0, b"a", b""), (0, b"c", b"d")),
    }  # fmt: skip
    assert len(others | {one}) == 7
