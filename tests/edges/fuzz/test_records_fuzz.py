"""Records of every schema with odd fields and damaged bytes: a record, or `DecodeError`; and what
decodes can be judged, archived and kept as a dead letter.
"""

import json
import struct

import numpy as np
from hypothesis import given, strategies as st
from xxhash import xxh3_64_intdigest

from rollstream.errors import DecodeError
from rollstream.storage.archive.tables import originals_of, table_of
from rollstream.storage.claim_check import ClaimCheck, blob_key
from rollstream.storage.stores.base import content_hash
from rollstream.streams.admissible import TrainingBounds, malformed_partial, refusal
from rollstream.streams.bus import AppendEntry, Message
from rollstream.streams.codec import Envelope, decode, encode, envelope_of
from rollstream.streams.dead_letters import DeadLetterReader, DeadLetterWriter
from rollstream.streams.records import Claim, Dead, Partial, Trajectory
from rollstream.streams.topics import ARCHIVED_TOPICS, catalogue
from testbed.memory import MemoryBus, MemoryStore
from testbed.sample_records import SAMPLES
from tests.edges.fuzz.damage import changed_bytes, changed_json, checked, examples

ENCODED = [encode(sample) for sample in SAMPLES]
ENCODED += [encode(sample, Envelope("trainer", 3, 17)) for sample in SAMPLES]
PARTIALS = [data for data in ENCODED if type(decode(data).record) in (Partial, Trajectory)]


def resealed(head: bytes, arrays: bytes) -> bytes:
    body = head + (bytes(-len(head) % 8) + arrays if arrays else b"")
    return struct.pack("<4sIQ", b"RSR1", len(head), xxh3_64_intdigest(body)) + body


def _damaged(draw: st.DrawFn, samples: list[bytes]) -> bytes:
    """A record with another header or other arrays, and usually the right checksum: without it
    every change ends at the first check.
    """
    data = draw(st.sampled_from(samples))
    length = struct.unpack_from("<I", data, 4)[0]
    head, arrays = data[16 : 16 + length], data[(16 + length + 7) // 8 * 8 :]
    match draw(st.sampled_from(["fields", "fields", "header", "arrays", "all"])):
        case "fields":
            head = json.dumps(changed_json(draw, json.loads(head)), separators=(",", ":")).encode()
        case "header":
            head = changed_bytes(draw, head)
        case "arrays":
            arrays = changed_bytes(draw, arrays)
        case _:
            return changed_bytes(draw, data)
    return resealed(head, arrays)


@st.composite
def damaged_records(draw: st.DrawFn) -> bytes:
    return _damaged(draw, ENCODED)


@st.composite
def damaged_partials(draw: st.DrawFn) -> bytes:
    return _damaged(draw, PARTIALS)


@given(damaged_records())
@examples(250)
def test_any_bytes_decode_or_are_refused_as_a_record(data: bytes) -> None:
    decoded = checked(lambda: decode(data))
    checked(lambda: envelope_of(data))
    if decoded is not None:
        encode(decoded.record, decoded.envelope)


@given(damaged_partials())
@examples(250)
def test_a_record_that_decodes_can_be_judged(data: bytes) -> None:
    try:
        record = decode(data).record
    except DecodeError:
        return
    if isinstance(record, Partial):
        assert isinstance(malformed_partial(record), str)
    if isinstance(record, Trajectory):
        judged = refusal(record, TrainingBounds(1 << 20, 1 << 20, True))
        assert judged is None or str(judged)


@given(damaged_records(), st.sampled_from(ARCHIVED_TOPICS))
@examples(120)
def test_any_bytes_of_a_topic_are_archived_and_come_back(data: bytes, topic: str) -> None:
    table = table_of(topic, [Message(topic, 0, 5, 1000, b"k\xff", data)])
    assert list(originals_of(table, topic)) == [data]


@given(damaged_records(), st.text(max_size=300))
@examples(60)
def test_any_bytes_become_one_dead_letter(data: bytes, reason: str) -> None:
    bus = MemoryBus()
    bus.create(catalogue())
    bus.append("partials", [AppendEntry(b"k", data, partition=0)])
    message = Message("partials", 0, 0, 1000, b"k\xff", data)
    DeadLetterWriter(bus, "partials").append([(message, reason)])
    (letter,) = DeadLetterReader(bus, ()).read()
    assert isinstance(letter, Dead)
    assert letter.original.tobytes() == data


SIZES = st.sampled_from([0, 1, -1, 20, 21, 1 << 40, 1 << 63, 10**400])


@given(SIZES, st.sampled_from(["trajectories", "ledger", "..", ""]), damaged_records(), st.data())
@examples(60)
def test_a_claim_of_anybody_is_redeemed_or_returned_as_it_is(
    size: int, topic: str, value: bytes, data: st.DataObject
) -> None:
    store, log = MemoryStore(), MemoryBus()
    bus = ClaimCheck(log, store)
    bus.create(catalogue())
    key = blob_key("trajectories", "2026-11-21T13", content_hash(value))
    store.put(key, value)
    named = data.draw(st.sampled_from([key, key, blob_key(topic, "x", "y"), "../../x", ""]))
    size = data.draw(st.sampled_from([size, len(value)]))
    claim = encode(Claim(blob=named, bytes=size, hash=content_hash(value)))
    log.append("trajectories", [AppendEntry(b"k", claim, partition=0)])
    (message,) = bus.read("trajectories", {0: 0})
    assert message.value in (claim, value)


def test_lengths_that_no_array_has_take_no_memory() -> None:
    samples = [sample for sample in SAMPLES if "tokens" in sample.__struct_fields__]
    for sample in samples:
        data = encode(sample)
        length = struct.unpack_from("<I", data, 4)[0]
        head = json.loads(data[16 : 16 + length])
        key = next(k for k in head["record"] if k.startswith("tokens:"))
        for count in (1 << 40, 1 << 62, 10**30, -1, 1e300):
            head["record"][key] = count
            other = resealed(json.dumps(head).encode(), np.zeros(8, np.uint8).tobytes())
            assert checked(lambda other=other: decode(other)) is None
