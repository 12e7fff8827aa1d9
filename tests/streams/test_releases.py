"""Invariant 14 in the log: a reader that lacks a feature stops before the record, commits nothing
and dead-letters nothing.
"""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from rollstream.errors import NewerRelease
from rollstream.streams import release
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import Envelope, decode, encode
from rollstream.streams.dead_letters import DeadLetterWriter
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import SCHEMAS, Claim, Dead, GroupClosed, Opened
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus
from testbed.sample_records import trajectory
from tests.streams.test_codec import sealed, tampered

FENCED = [topic.name for topic in catalogue() if topic.writer]


@pytest.fixture
def run() -> Iterator[Bus]:
    bus = MemoryBus()
    bus.create(catalogue())
    yield bus
    bus.close()


def closed(group: int) -> GroupClosed:
    return GroupClosed(group, "filtered", "all the same", 1)


def renamed(record: GroupClosed, envelope: Envelope, schema: str = "group_closed/2") -> bytes:
    return tampered(encode(record, envelope), {"record": {"schema": schema}})


def append(run: Bus, topic: str, *values: bytes) -> None:
    run.append(topic, [AppendEntry(b"run", value, 0) for value in values])


@pytest.mark.parametrize("topic", FENCED)
def test_a_reader_stops_before_a_schema_of_a_newer_release(run: Bus, topic: str) -> None:
    role = run.settings(topic).writer
    FencedWriter(run, topic, role, 1).open()
    append(run, topic, encode(closed(1), Envelope(role, 1, 1)))
    reader = TopicReader(run, topic, {0: from_begin(run, topic)[0]})
    assert len(reader.poll()) == 1
    before = dict(reader.positions)
    append(run, topic, renamed(closed(2), Envelope(role, 1, 2)))
    for _ in range(2):
        with pytest.raises(NewerRelease, match="group_closed/2") as refused:
            reader.poll()
    assert f"{topic}/0 offset 2" in str(refused.value)  # pyright: ignore[reportPossiblyUnboundVariable]
    assert f"rollstream {release.RELEASE}: run release {release.RELEASE} or a later" in str(
        refused.value  # pyright: ignore[reportPossiblyUnboundVariable]
    )
    assert reader.positions == before
    assert run.end("dead") == {0: 0}


def test_a_known_schema_with_a_value_of_a_newer_release_is_not_dead_lettered(run: Bus) -> None:
    FencedWriter(run, "ledger", "trainer", 1).open()
    value = encode(closed(1), Envelope("trainer", 1, 1))
    record = {"schema": "group_closed/1", "group": 1, "reason": "merged", "detail": "", "step": 1}
    append(run, "ledger", tampered(value, {"record": record}))
    with pytest.raises(NewerRelease, match="group_closed/1"):
        TopicReader(run, "ledger", from_begin(run, "ledger")).poll()


def test_a_void_record_of_a_newer_release_is_passed_over(run: Bus) -> None:
    """A zombie of the newer release, behind the opening of the older one's term."""
    FencedWriter(run, "ledger", "trainer", 1).open()
    successor = FencedWriter(run, "ledger", "trainer", 2)
    successor.open()
    append(run, "ledger", renamed(closed(1), Envelope("trainer", 1, 1)))
    successor.append([("run", closed(2))])
    reader = TopicReader(run, "ledger", from_begin(run, "ledger"))
    assert [received.record.group for received in reader.poll()] == [2]  # type: ignore[union-attr]
    assert reader.void == 1


@pytest.mark.parametrize("topic", FENCED)
def test_a_term_that_needs_an_unknown_feature_is_not_read(run: Bus, topic: str) -> None:
    role = run.settings(topic).writer
    opened = Opened(role, 1, "7.1", ("merged_groups",), ("merged_groups", "other"))
    append(run, topic, encode(opened, Envelope(role, 1, 0)))
    reader = TopicReader(run, topic, {0: from_begin(run, topic)[0]})
    with pytest.raises(NewerRelease, match=r"release 7\.1.*does not know: merged_groups;"):
        reader.poll()
    assert reader.positions == {0: from_begin(run, topic)[0]}


def test_features_that_are_only_known_to_the_writer_do_not_matter(run: Bus) -> None:
    opened = Opened("trainer", 1, "7.1", (), ("merged_groups",))
    append(run, "ledger", encode(opened, Envelope("trainer", 1, 0)))
    assert TopicReader(run, "ledger", from_begin(run, "ledger")).poll() == []


def test_an_opening_names_the_release_and_what_its_topic_needs(run: Bus) -> None:
    for topic in FENCED:
        FencedWriter(run, topic, run.settings(topic).writer, 1).open()
        reader = TopicReader(run, topic, from_begin(run, topic), with_opened=True)
        for received in reader.poll():
            assert isinstance(received.record, Opened)
            assert received.record.release == release.RELEASE
            assert received.record.needs == release.NEEDED_BY_TOPIC.get(topic, ())
            assert set(received.record.knows) == release.KNOWN_FEATURES


def test_an_opening_of_the_first_release_is_read(run: Bus) -> None:
    first = sealed(
        b'{"record":{"schema":"opened/1","role":"trainer","term":1},'
        b'"envelope":{"role":"trainer","term":1,"sequence":0}}'
    )
    assert encode(replace(decode(first).record, term=1), decode(first).envelope) == first
    append(run, "ledger", first)
    assert TopicReader(run, "ledger", from_begin(run, "ledger")).poll() == []


def test_every_schema_beyond_the_first_release_is_declared() -> None:
    """A new record kind states who must know it: the readers of a topic, those of runs with certain
    settings, or, in topics of many writers, the acting trainer.
    """
    declared = {feature for needs in release.NEEDED_BY_TOPIC.values() for feature in needs}
    declared |= release.FEATURES_OF_SETTINGS
    assert set(SCHEMAS) - release.FIRST_RELEASE_SCHEMAS <= declared | release.SHARED_FEATURES
    assert not release.missing_features(declared | release.SHARED_FEATURES)
    assert set(release.NEEDED_BY_TOPIC) <= set(FENCED)


def test_in_a_topic_of_many_writers_it_is_dead_lettered(run: Bus) -> None:
    append(run, "trajectories", tampered(encode(trajectory(4)), {"record": {"schema": "t/2"}}))
    publish(run, "trajectories", "7", trajectory(4), 0)
    begin, owned = from_begin(run, "trajectories"), DeadLetterWriter(run, "trajectories")
    reader = TopicReader(run, "trajectories", begin, dead_letters=owned)
    assert len(reader.poll()) == 1
    (dead,) = TopicReader(run, "dead", from_begin(run, "dead")).poll()
    assert isinstance(dead.record, Dead)
    assert "'t/2'" in dead.record.reason


def test_a_claim_that_cannot_be_redeemed_is_not_taken_for_a_newer_release(run: Bus) -> None:
    FencedWriter(run, "ledger", "trainer", 1).open()
    claim = Claim("blobs/ledger/2026-11-21T13/0123", 2_000_000, "0123456789abcdef")
    append(run, "ledger", encode(claim, Envelope("trainer", 1, 1)))
    begin, owned = from_begin(run, "ledger"), DeadLetterWriter(run, "ledger")
    assert TopicReader(run, "ledger", begin, dead_letters=owned).poll() == []
    assert run.end("dead") == {0: 1}


def test_a_rollout_does_not_write_what_the_acting_trainer_does_not_read() -> None:
    older, newer = Opened("trainer", 1), Opened("trainer", 2, "9.0", (), ("trajectory/2",))
    release.check_readable_by(older)
    release.check_readable_by(newer, ("trajectory/2",))
    with pytest.raises(NewerRelease, match=r"release 0\.1\.0\) does not read .*trajectory/2"):
        release.check_readable_by(older, ("trajectory/2",))
