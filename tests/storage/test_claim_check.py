"""Records above the limit are stored in the object store, invisibly to all users of the bus."""

import struct
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from rollstream.errors import CorruptObject, RecordTooLarge, StoreTimeout
from rollstream.storage.claim_check import (
    SETTLED_S,
    BlobCollector,
    ClaimCheck,
    blob_key,
    is_claim,
    upload_hour,
)
from rollstream.storage.stores.base import content_hash
from rollstream.storage.stores.file import FileStore
from rollstream.streams.bus import AppendEntry
from rollstream.streams.codec import CLAIM_START, Envelope, encode
from rollstream.streams.dead_letters import DeadLetterWriter
from rollstream.streams.fence import position_before, truncate
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Annotation, Claim
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.topics import KEY_BYTES_MAX, RECORD_BYTES_MAX, Topic, catalogue
from rollstream.streams.values import Address
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus


def sealed(header: bytes) -> bytes:
    """A record with this header and a valid checksum."""
    return struct.pack("<4sIQ", b"RSR1", len(header), xxh3_64_intdigest(header)) + header


START_S = 1_700_000_000.0
SMALL = 2000


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path / "store"))


@pytest.fixture(params=["sqlite", "memory"])
def inner(request, tmp_path: Path, clock: Hands):
    bus = SqliteBus(tmp_path / "bus", clock) if request.param == "sqlite" else MemoryBus(clock)
    bus.create(catalogue(2))
    yield bus
    bus.close()


@pytest.fixture
def bus(inner, store, clock) -> ClaimCheck:
    return ClaimCheck(inner, store, SMALL, clock)


def annotation(group: int, values: int) -> Annotation:
    return Annotation(f"{group}.0", group, "reward", np.arange(values, dtype=np.float32), "test")


def blobs(store: FileStore) -> list[str]:
    return [entry.key for entry in store.list("blobs/")]


def read(bus) -> list:
    letters = DeadLetterWriter(bus, "annotations")
    reader = TopicReader(bus, "annotations", from_begin(bus, "annotations"), dead_letters=letters)
    return sorted(reader.read_to(bus.end("annotations")), key=lambda r: r.record.group)  # pyright: ignore[reportAttributeAccessIssue]


def test_large_records_come_back_with_the_bytes_and_the_hash_they_were_appended_with(
    bus, inner, store
):
    small, large = annotation(1, 3), annotation(2, SMALL)
    publish(bus, "annotations", "1", small)
    publish(bus, "annotations", "2", large)
    received = read(bus)
    assert [r.data for r in received] == [encode(small), encode(large)]
    assert len(blobs(store)) == 1
    assert blobs(store)[0].startswith(f"blobs/annotations/{upload_hour(START_S)}/")
    carried = inner.read("annotations", inner.begin("annotations"))
    assert max(len(message.value) for message in carried) < SMALL
    assert sum(is_claim(message) for message in carried) == 1


def test_a_member_of_a_group_reads_large_records_whole(bus):
    publish(bus, "annotations", "2", annotation(2, SMALL))
    member = bus.join("scorers", "annotations", "a")
    (message,) = member.poll(5.0)
    assert message.value == encode(annotation(2, SMALL))
    member.commit()
    member.close()


def test_a_claim_keeps_its_place_in_the_fence(bus):
    """Invariant 7: its envelope is the record's own."""
    dispatch = FencedWriter(bus, "admissions", "dispatch", 1)
    dispatch.open()
    many = tuple(f"7.{i}" for i in range(500))
    dispatch.append([("7", Admitted(7, 0, many, 60.0, Address(0, 0)))])
    dispatch.append([("8", Admitted(8, 0, ("8.0",), 60.0, Address(0, 0)))])
    reader = TopicReader(bus, "admissions", from_begin(bus, "admissions"))
    assert [r.record.group for r in reader.poll()] == [7, 8]  # pyright: ignore[reportAttributeAccessIssue]
    assert (reader.dead, reader.void) == (0, 0)


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_record_whose_blob_is_gone_or_damaged_is_dead_with_the_reason(bus, store, harm):
    publish(bus, "annotations", "2", annotation(2, SMALL))
    publish(bus, "annotations", "3", annotation(3, 3))
    (key,) = blobs(store)
    store.delete(key) if harm == "gone" else store.put(key, b"other bytes")
    assert [r.record.group for r in read(bus)] == [3]
    dead = TopicReader(bus, "dead", from_begin(bus, "dead")).poll()
    assert [key in d.record.reason for d in dead] == [True]  # pyright: ignore[reportAttributeAccessIssue]


def test_compacted_topics_and_their_limit_refuse_what_is_too_large(bus, inner):
    compact = Topic("small", cleanup="compact", record_bytes_max=SMALL)
    bounded = Topic("bounded", record_bytes_max=2 * SMALL)
    bus.create([compact, bounded])
    with pytest.raises(RecordTooLarge):
        bus.append("small", [AppendEntry(b"k", bytes(SMALL + 1))])
    bus.append("bounded", [AppendEntry(b"k", bytes(2 * SMALL - 1))])
    with pytest.raises(RecordTooLarge):
        bus.append("bounded", [AppendEntry(b"k", bytes(2 * SMALL))])


def test_the_log_is_asked_for_no_more_than_it_carries(tmp_path, store, clock):
    """A broker that caps messages at 2 MiB serves a run whose records are up to 16 MiB."""
    below = SqliteBus(tmp_path / "other", clock)
    bus = ClaimCheck(below, store, clock=clock)
    bus.create(catalogue())
    assert {below.settings(t.name).record_bytes_max for t in catalogue()} == {
        RECORD_BYTES_MAX,  # compacted
        RECORD_BYTES_MAX + KEY_BYTES_MAX,
    }
    assert [bus.settings(topic.name) for topic in catalogue()] == list(catalogue())
    ClaimCheck(below, store).create([Topic("trajectories", 4, record_bytes_max=20 << 20)])
    below.close()


def test_a_run_that_began_with_larger_topics_resumes(tmp_path, store, clock):
    below = SqliteBus(tmp_path / "other", clock)
    below.create(catalogue())  # as releases did that asked for 16 MiB
    bus = ClaimCheck(below, store, clock=clock)
    bus.create(catalogue())
    assert bus.settings("ledger").record_bytes_max == 16 << 20
    below.close()


def test_a_read_stays_within_its_bytes_though_claims_are_small(bus):
    for group in range(6):
        publish(bus, "annotations", "same", annotation(group, SMALL))
    begin = bus.begin("annotations")
    size = len(encode(annotation(0, SMALL)))
    assert len(bus.read("annotations", begin, bytes_max=2 * size)) == 2
    assert len(bus.read("annotations", begin, bytes_max=1)) == 1
    assert len(bus.read("annotations", begin)) == 6


def cut(bus, before: Address) -> None:
    """Truncate `annotations` up to this record."""
    truncate(bus, "annotations", {before.partition: position_before(bus, "annotations", before)})


def test_an_hour_of_blobs_goes_once_truncation_has_passed_every_record_that_names_it(
    bus, store, clock
):
    """Invariant 11."""
    collector = BlobCollector(bus, store, clock)
    publish(bus, "annotations", "same", annotation(1, SMALL))
    assert collector.run() == 0
    clock.now_s += SETTLED_S
    assert collector.run() == 0  # every claim of the hour is below the ends of this moment
    second = publish(bus, "annotations", "same", annotation(2, SMALL))
    assert collector.run() == 0
    cut(bus, second)
    assert collector.run() == 1
    assert [r.record.group for r in read(bus)] == [2]
    assert len(blobs(store)) == 1


@pytest.mark.parametrize("behind_s", [-2 * 86_400.0, 2 * 86_400.0])
def test_no_blob_of_a_writer_whose_clock_is_two_days_off_is_deleted_before_its_record(
    inner, bus, store, clock, behind_s
):
    """Invariant 11: no clocks of two machines are compared."""
    other = ClaimCheck(inner, store, SMALL, lambda: clock.now_s - behind_s)
    collector = BlobCollector(bus, store, clock)
    for group in range(6):
        first = publish(bus, "annotations", "same", annotation(2 * group, 1))
        publish(other, "annotations", "same", annotation(2 * group + 1, SMALL))
        cut(bus, first)
        collector.run()
        clock.now_s += SETTLED_S
        collector.run()
        assert [r.record.group for r in read(bus)] == [2 * group, 2 * group + 1]
        assert len(blobs(store)) <= 2
    cut(bus, publish(bus, "annotations", "same", annotation(12, 1)))
    clock.now_s += SETTLED_S
    collector.run()
    assert blobs(store) == []


def test_an_hour_that_still_gets_blobs_is_not_deleted(inner, bus, store, clock):
    """A writer whose clock stands still names the same hour for ever."""
    slow = ClaimCheck(inner, store, SMALL, lambda: START_S)
    collector = BlobCollector(bus, store, clock)
    for group in range(4):
        at = publish(slow, "annotations", "same", annotation(group, SMALL))
        cut(bus, at)
        collector.run()
        clock.now_s += SETTLED_S
    assert len(blobs(store)) == 4
    assert [r.record.group for r in read(bus)] == [3]


class Fetches:
    """A store that counts bytes and fails on demand."""

    def __init__(self, store: FileStore, error: Exception | None = None) -> None:
        self._store, self._error, self.fetched = store, error, 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if self._error is not None:
            raise self._error
        data = self._store.get(key, start, end)
        self.fetched += len(data)
        return data


def blob(store: FileStore, data: bytes, topic: str = "annotations") -> str:
    key = blob_key(topic, upload_hour(START_S), content_hash(data))
    store.put(key, data)
    return key


def claim_on(data: bytes, key: str, size: int | None = None) -> Claim:
    return Claim(key, len(data) if size is None else size, content_hash(data))


WHOLE = encode(annotation(2, SMALL))
NESTED = encode(claim_on(WHOLE, "blobs/annotations/x/y"))
HOSTILE = {
    "outside": lambda store: claim_on(WHOLE, "../../etc/passwd"),
    "another topic's": lambda store: claim_on(WHOLE, blob(store, WHOLE, "partials")),
    "a weight file": lambda store: claim_on(WHOLE, "weights/v1/model.safetensors"),
    "too long a key": lambda store: claim_on(WHOLE, "blobs/annotations/" + "a" * 1100),
    "negative": lambda store: claim_on(WHOLE, blob(store, WHOLE), -1),
    "shorter than it is": lambda store: claim_on(WHOLE, blob(store, WHOLE), len(WHOLE) - 1),
    "longer than it is": lambda store: claim_on(WHOLE, blob(store, WHOLE), len(WHOLE) + 1),
    "above the topic's limit": lambda store: claim_on(WHOLE, blob(store, WHOLE), 1 << 70),
    "a claim": lambda store: claim_on(NESTED, blob(store, NESTED)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_claim_that_cannot_be_trusted_is_no_record_and_ends_no_reader(what, inner, store, clock):
    publish(inner, "annotations", "2", HOSTILE[what](store))
    publish(inner, "annotations", "3", annotation(3, 3))
    fetches = Fetches(store)
    received = read(ClaimCheck(inner, fetches, SMALL, clock))  # type: ignore[arg-type]
    assert [r.record.group for r in received] == [3]
    assert fetches.fetched <= len(WHOLE)


def test_a_claim_on_a_huge_object_fetches_no_more_than_its_size(inner, store, clock):
    huge = bytes(1 << 20)
    publish(inner, "annotations", "2", claim_on(huge, blob(store, huge), 100))
    fetches = Fetches(store)
    assert read(ClaimCheck(inner, fetches, SMALL, clock)) == []  # type: ignore[arg-type]
    assert fetches.fetched == 101


def test_a_header_with_a_claim_and_another_record_is_no_record(inner, bus):
    other = encode(annotation(2, 0))
    header = CLAIM_START + b',"blob":"b","bytes":1,"hash":"h"},' + other[17 : 16 + other[4]]
    inner.append("annotations", [AppendEntry(b"2", sealed(header))])
    assert read(bus) == []


def test_a_claim_whose_envelope_is_not_its_records_is_no_record(inner, bus, store):
    """Otherwise a zombie's record would pass the fence under its successor's term."""
    dispatch = FencedWriter(inner, "admissions", "dispatch", 1)
    dispatch.open()
    data = encode(Admitted(7, 0, ("7.0",), 60.0, Address(0, 0)), Envelope("dispatch", 0, 5))
    dispatch.append([("7", claim_on(data, blob(store, data, "admissions")))])
    reader = TopicReader(bus, "admissions", from_begin(bus, "admissions"))
    assert reader.poll() == []
    assert (reader.dead, reader.void) == (1, 0)


def test_damage_that_the_store_finds_is_damage_that_the_hash_finds(inner, store, clock):
    """S3 raises `CorruptObject` itself; file: returns the bytes."""
    publish(ClaimCheck(inner, store, SMALL, clock), "annotations", "2", annotation(2, SMALL))
    failing = Fetches(store, CorruptObject("object differs from its hash"))
    assert read(ClaimCheck(inner, failing, SMALL, clock)) == []  # type: ignore[arg-type]


def test_a_store_that_does_not_answer_is_no_verdict(inner, store, clock):
    publish(ClaimCheck(inner, store, SMALL, clock), "annotations", "2", annotation(2, SMALL))
    slow = ClaimCheck(inner, Fetches(store, StoreTimeout("no answer")), SMALL, clock)  # type: ignore[arg-type]
    reader = TopicReader(slow, "annotations", from_begin(slow, "annotations"))
    with pytest.raises(StoreTimeout):
        reader.poll()
    assert reader.positions == from_begin(slow, "annotations")


def test_an_object_of_another_program_among_the_blobs_is_left_alone(bus, store, clock):
    store.put("blobs/notes", b"not ours")
    store.put("blobs/other_topic/2001-01-01T00/" + "0" * 32, b"not ours")
    collector = BlobCollector(bus, store, clock)
    for _ in range(3):
        assert collector.run() == 0
        clock.now_s += SETTLED_S
