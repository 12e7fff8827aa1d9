"""Records of every archived class, drawn by Hypothesis from their own fields, and small logs."""

import io
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from xxhash import xxh3_64_intdigest

from rollstream.storage.archive.files import encode_file
from rollstream.storage.archive.originals import OriginalBytes
from rollstream.storage.archive.reading import partition_ends
from rollstream.storage.archive.rows import ARCHIVED_CLASSES, TOPIC_WRITERS
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.codec import Envelope, encode
from rollstream.streams.records import Admitted, Annotation, Fence, Opened, Record, Trajectory
from rollstream.streams.values import Address, Span, Version

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
}
ARRAYS = {"u4": np.uint32, "u1": np.uint8, "f4": np.float32}


def archived_to(store: ObjectStore, run: str, topic: str) -> dict[int, int]:
    """By partition, the offset after the last archived record."""
    return {partition: end.last + 1 for partition, end in partition_ends(store, run, topic).items()}


def records(cls: type[Record]) -> st.SearchStrategy[Record]:
    """Any record of a class, with NaN in its arrays."""
    parts: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(cls):
        kind = field.encode_name.partition(":")[2]
        drawn = hnp.arrays(ARRAYS[kind], st.integers(0, 5)) if kind else values(field.type)
        parts[field.name] = st.none() | drawn if kind and field.default is None else drawn
    return st.builds(cls, **parts)


def values(type_: Any) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(type_), get_args(type_)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is UnionType:
        return st.one_of(st.none() if one is NoneType else values(one) for one in inner)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if origin is tuple:
        return st.lists(values(inner[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return st.builds(type_, **{f.name: values(f.type) for f in msgspec.structs.fields(type_)})
    return SCALARS[type_]


def any_record(topic: str) -> st.SearchStrategy[Record]:
    return st.one_of(*map(records, ARCHIVED_CLASSES[topic]))


def message(topic: str, offset: int, value: bytes | None, timestamp_ms: int = 1000) -> Message:
    return Message(topic, 0, offset, timestamp_ms, b"key", value)


def log_of(topic: str, given: Sequence[Record]) -> list[Message]:
    """Messages as the topic's writer appends them."""
    writer = TOPIC_WRITERS[topic]
    return [
        message(topic, at, encode(record, Envelope(writer, 1, at) if writer else None))
        for at, record in enumerate(given)
    ]


def through_parquet(topic: str, messages: Sequence[Message]) -> pa.Table:
    """The table of a file after writing and reading."""
    return pq.read_table(io.BytesIO(encode_file(topic, messages, Fence()).data))


def restored(table: pa.Table, topic: str) -> list[bytes | None]:
    """The bytes of every row, the same from a file of release 0.1.0, which has no headers."""
    found = [v for batch in table.to_batches() for v in OriginalBytes(topic).values(batch)]
    older = table.drop_columns(["header"])
    assert found == [v for b in older.to_batches() for v in OriginalBytes(topic).values(b)]
    return found


def sealed(header: bytes, arrays: bytes = b"") -> bytes:
    """A record with this header and a valid checksum."""
    return sealed_as_is(header, bytes(-len(header) % 8) + arrays if arrays else b"")


def sealed_as_is(header: bytes, rest: bytes) -> bytes:
    body = header + rest
    return struct.pack("<4sIQ", b"RSR1", len(header), xxh3_64_intdigest(body)) + body


def trajectory(group: int, tokens: int = 6) -> Trajectory:
    generated = tokens - tokens // 2
    return Trajectory(
        f"{group}.0", group, 0, 1, "remainder", "rollout-0", 2,
        np.arange(tokens, dtype=np.uint32),
        np.repeat(np.array([0, 1], np.uint8), [tokens // 2, generated]),
        np.linspace(-2, 0, generated, dtype=np.float32),
        (Span(0, generated, Version(2, 1)),), "stop", group / 10, Version(3, 1), 10.5, 12.25,
        scores={"format": 0.5},
    )  # fmt: skip


def append(bus: Bus, topic: str, given: Sequence[Record], partition: int = 0) -> None:
    """Append records to a topic of many writers."""
    bus.append(topic, [AppendEntry(b"key", encode(record), partition) for record in given])


def admission(group: int) -> Admitted:
    return Admitted(group, group // 4, (f"{group}.0", f"{group}.1"), 600.0, Address(0, group))


def append_of_term(bus: Bus, term: int, first: int, count: int) -> None:
    """Admissions of a term of dispatch: its sequence numbers `first` on, 0 being `Opened`."""
    entries: list[AppendEntry] = []
    for sequence in range(first, first + count):
        record = admission(sequence) if sequence else Opened("dispatch", term)
        value = encode(record, Envelope("dispatch", term, sequence))
        entries.append(AppendEntry(b"k", value, 0))
    bus.append("admissions", entries)


def private_bytes() -> int:
    (line,) = re.findall(r"Private_Dirty: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return 1024 * int(line)


def retained_bytes() -> int:
    """What pyarrow keeps for its next tables; afterwards it keeps nothing."""
    before = private_bytes()
    cast(Any, pa).default_memory_pool().release_unused()
    return before - private_bytes()


RETAINED_MAX = 8 << 20


def large(number: int) -> Annotation:
    """64 KB that compress to less than one."""
    return Annotation(f"{number}.0", number, "value", np.zeros(1 << 14, np.float32), "s")
