"""Seeded hostile records for the topics of many writers: malformed, out of bounds, misplaced, or
naming things that do not exist.

The same (seed, number) gives the same record. A record never names a trajectory, an attempt or a
(rollout, term) that the run itself has: a well-formed lie in the name of a living participant is a
matter of access control (docs/reference/kafka.md), not of validation.
"""

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import fields
from xxhash import xxh3_64_intdigest

from rollstream.streams.codec import encode
from rollstream.streams.records import SCHEMAS, Record
from testbed.sample_records import SAMPLES

NATURAL = {
    "trajectories": ("trajectory/1",),
    "annotations": ("annotation/1",),
    "partials": ("partial/1",),
    "status": ("rollout_status/1", "relay_status/1"),
    "applied": ("applied/1",),
}
"""The topics of many writers and the schemas that belong there."""

INTS = (
    -1, 0, 1, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**70, -(2**31),
    -(2**63), -(2**70),
)  # fmt: skip
FLOATS = (0.0, -0.0, 5e-324, 1e-40, 1e-7, -1.0, 1e7, 1e38, 1e39, 1e300, -1e300)
TEXTS = (
    "", " ", "\x00", "../../etc/passwd", "a" * 70_000, "\U0001f4a5", "\u202e", "%s%n{0}",
    "999999999.0", "x/y", "-1.-1", "NaN", "http://127.0.0.1:1/",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, [], {}, [[]], {"a": 1}, [1, 2, 3])
GROUP = 1_000_000_000  # far above the groups that a run admits
_PREFIX = struct.Struct("<4sIQ")
_NAMES = ("trajectory", "rollout", "relay", "scorer")
_SAMPLES: dict[str, Record] = {record.schema(): record for record in SAMPLES}


@dataclass(frozen=True, slots=True)
class Hostile:
    """One message; `partition` None derives it from the key. `kind` names its fault."""

    topic: str
    key: bytes
    value: bytes
    partition: int | None
    kind: str


def hostile_records(seed: int, count: int, partitions: int = 4) -> Iterator[Hostile]:
    """Returns `count` records over all topics of many writers; `partitions` is the count of the
    spread topics.
    """
    topics = tuple(NATURAL)
    kinds = tuple(_KINDS)
    for number in range(count):
        drawn = random.Random(f"{seed} {number}")
        topic, kind = drawn.choice(topics), drawn.choice(kinds)
        value = _KINDS[kind](drawn, topic, number)
        spread = 1 if topic in ("status", "applied") else partitions
        partition = drawn.randrange(spread) if drawn.random() < 0.5 else None
        # A key of its own: compaction of `status` must not remove it before it was read.
        key = f"hostile-{number}".encode() + (b"\xff\x00" if drawn.random() < 0.1 else b"")
        yield Hostile(topic, key, value, partition, kind)


# ---- kinds ---------------------------------------------------------------------------------------


def _absent(drawn: random.Random, topic: str, number: int) -> bytes:
    """A valid record of a group, a trajectory and a rollout that do not exist."""
    return _assembled(*_sample(drawn, topic, number))


def _field(drawn: random.Random, topic: str, number: int) -> bytes:
    """One to three fields at or beyond their bounds, or of another type."""
    header, arrays = _sample(drawn, topic, number)
    record = header["record"]
    for _ in range(drawn.randint(1, 3)):
        name = drawn.choice([key for key in record if key != "schema"])
        record[name] = _odd(drawn, record[name])
    return _assembled(header, arrays)


def _values(drawn: random.Random, topic: str, number: int) -> bytes:
    """Arrays of random bytes, of a length that contradicts other fields."""
    header, arrays = _sample(drawn, topic, number)
    keys = [key for key in header["record"] if ":" in key]
    if keys and drawn.random() < 0.5:  # the right length with other content
        return _assembled(header, drawn.randbytes(len(arrays)))
    arrays = b""
    for key in keys:
        count = drawn.choice((0, 1, 2, 7, 1000))
        header["record"][key] = count
        arrays += bytes(-len(arrays) % 8) + drawn.randbytes(count * int(key[-1]))
    return _assembled(header, arrays)


def _spans(drawn: random.Random, topic: str, number: int) -> bytes:
    """Spans that overlap, leave gaps, are out of order or name versions that never existed."""
    header, arrays = _sample(drawn, topic, number)
    if "spans" in header["record"]:
        header["record"]["spans"] = [
            {"start": drawn.choice(INTS), "end": drawn.choice(INTS), "version": _version(drawn)}
            for _ in range(drawn.choice((0, 1, 2, 50)))
        ]
    if "version" in header["record"]:
        header["record"]["version"] = _version(drawn)
    return _assembled(header, arrays)


def _misplaced(drawn: random.Random, topic: str, number: int) -> bytes:
    """A valid record of another topic, `Opened` and ledger records included."""
    other = drawn.choice([s for s in _SAMPLES if s not in NATURAL[topic]])
    return _assembled(*_parts(_SAMPLES[other], number))


def _forged(drawn: random.Random, topic: str, number: int) -> bytes:
    """A record with the envelope of a single-holder role, of any term and sequence."""
    header, arrays = _sample(drawn, topic, number)
    role = drawn.choice(("trainer", "dispatch", "prompts", "x"))
    term, sequence = drawn.choice(INTS), drawn.choice(INTS)
    header["envelope"] = {"role": role, "term": term, "sequence": sequence}
    return _assembled(header, arrays)


def _unknown(drawn: random.Random, topic: str, number: int) -> bytes:
    """An unknown schema: a later version, or no name at all."""
    header, arrays = _sample(drawn, topic, number)
    schema = drawn.choice(("trajectory/2", "partial/99", "status/1", "", "x", "take/7", 5, None))
    header["record"]["schema"] = schema
    return _assembled(header, arrays)


def _lacking(drawn: random.Random, topic: str, number: int) -> bytes:
    """A record without one of its fields, or with unknown fields and arrays."""
    header, arrays = _sample(drawn, topic, number)
    record = header["record"]
    if drawn.random() < 0.5:
        record.pop(drawn.choice([key for key in record if key != "schema"]))
    else:
        record["unknown"] = drawn.choice((*OTHERS, *INTS))
        record[f"more:u{drawn.choice((1, 2, 4, 8))}"] = drawn.choice((0, 3, -1, 2**40, 2**70, "x"))
    return _assembled(header, arrays)


def _damaged(drawn: random.Random, topic: str, number: int) -> bytes:
    """A record with bits flipped, bytes cut off or added, or random bytes."""
    value = bytearray(_absent(drawn, topic, number))
    how = drawn.randrange(5)
    if how == 0:
        return drawn.randbytes(drawn.choice((0, 1, 15, 16, 17, 300)))
    if how == 1:
        return bytes(value[: drawn.randrange(len(value))])
    if how == 2:
        return bytes(value) + drawn.randbytes(drawn.choice((1, 8, 100)))
    if how == 3:  # a header of another length under a valid checksum
        struct.pack_into("<I", value, 4, drawn.choice((0, 1, len(value), 2**31, 2**32 - 1)))
        return bytes(value)
    at = drawn.randrange(len(value))
    value[at] ^= 1 << drawn.randrange(8)
    return bytes(value)


def _nested(drawn: random.Random, topic: str, number: int) -> bytes:
    """JSON that is deeply nested, repeats its keys or is invalid."""
    depth = drawn.choice((100, 5000))
    header = drawn.choice(
        (
            b'{"record":' + b"[" * depth + b"]" * depth + b"}",
            b'{"record":{"schema":"claim/1","blob":"b","bytes":1,"hash":"h"},'
            b'"record":{"schema":"opened/1","role":"trainer","term":1}}',
            b'{"record":{"schema":"opened/1","role":"trainer","term":1},"record":1}',
            b'{"record":{"schema":"trajectory/1","reward":NaN}}',
            b"[]", b"null", b'"', b"\xff\xfe", b"{}",
        )
    )  # fmt: skip
    return _framed(header, b"")


def _claim(drawn: random.Random, topic: str, number: int) -> bytes:
    """Claims of objects that do not exist or belong to others, or with invalid keys."""
    blob = drawn.choice(
        (
            f"blobs/{topic}/2026-01-01T00/{number:032x}", f"blobs/ledger/2026-01-01T00/{number:x}",
            "../../etc/passwd", "/etc/passwd", "", "weights/latest.json", "roles/trainer.json",
            f"blobs/{topic}/../../weights/latest.json", f"blobs/{topic}/", "a" * 5000, "\x00",
            f"blobs/{topic}/2026-01-01T00/\U0001f4a5", "blobs",
        )
    )  # fmt: skip
    record = {
        "schema": "claim/1",
        "blob": blob,
        "bytes": drawn.choice(INTS),
        "hash": drawn.choice(("", "0" * 32, "x", "f" * 5000)),
    }
    if drawn.random() < 0.1:
        record[drawn.choice(("blob", "bytes", "hash"))] = drawn.choice(OTHERS)
    return _assembled({"record": record}, b"")


def _chain(drawn: random.Random, topic: str, number: int) -> bytes:
    """Partials that continue themselves, later partials or missing ones."""
    header, arrays = _parts(_SAMPLES["partial/1"], number)
    record = header["record"]
    partition, offset = drawn.choice((0, 1, 99, -1, 2**31)), drawn.choice(INTS)
    record["previous"] = {"partition": partition, "offset": offset}
    record["start"] = drawn.choice(INTS)
    if drawn.random() < 0.5:  # of an existing trajectory, in an attempt that was never assigned
        group = drawn.randrange(20)
        record |= {"trajectory": f"{group}.{drawn.randrange(2)}", "group": group}
        record["attempt"] = drawn.choice((1_000_000, 2**53, 2**63 - 1))
        record["last"] = drawn.random() < 0.5
    return _assembled(header, arrays)


def _real_group(drawn: random.Random, topic: str, number: int) -> bytes:
    """A completion for an existing group that names no trajectory of it."""
    header, arrays = _sample(drawn, topic, number)
    if "group" in header["record"]:
        header["record"]["group"] = drawn.randrange(20)
    return _assembled(header, arrays)


def _restarted(drawn: random.Random, topic: str, number: int) -> bytes:
    """An existing rollout in a term that it never took."""
    header, arrays = _sample(drawn, topic, number)
    record = header["record"]
    term = drawn.choice((1_000, 2**31, 2**62))
    if "rollout" in record:
        record["rollout"] = f"rollout-{drawn.randrange(2)}"
        record["term" if "term" in record else "rollout_term"] = term
    return _assembled(header, arrays)


_KINDS: dict[str, Callable[[random.Random, str, int], bytes]] = {
    "absent": _absent, "field": _field, "values": _values, "spans": _spans,
    "misplaced": _misplaced, "forged": _forged, "unknown": _unknown, "lacking": _lacking,
    "damaged": _damaged, "nested": _nested, "claim": _claim, "chain": _chain,
    "real group": _real_group, "restarted": _restarted,
}  # fmt: skip


# ---- bytes ---------------------------------------------------------------------------------------


def _sample(drawn: random.Random, topic: str, number: int) -> tuple[dict[str, Any], bytes]:
    return _parts(_SAMPLES[drawn.choice(NATURAL[topic])], number)


def _parts(record: Record, number: int) -> tuple[dict[str, Any], bytes]:
    """A JSON header with unknown names and all fields present, and the arrays' bytes."""
    value = encode(record)
    length = _PREFIX.unpack_from(value)[1]
    header = json.loads(value[_PREFIX.size : _PREFIX.size + length])
    arrays = value[(_PREFIX.size + length + 7) & -8 :]
    fields_of = header["record"]
    for field in fields(SCHEMAS[record.schema()]):
        fields_of.setdefault(field.encode_name, getattr(record, field.name, None))
    for name in _NAMES:
        if name in fields_of:
            fields_of[name] = f"hostile-{number}"
    if "group" in fields_of:
        fields_of["group"] = GROUP + number
    return header, arrays


def _version(drawn: random.Random) -> dict[str, int]:
    return {"number": drawn.choice(INTS), "term": drawn.choice(INTS)}


def _odd(drawn: random.Random, value: object) -> Any:
    """Another value for a field: of its type at the bounds, or of another type."""
    if drawn.random() < 0.2:
        return drawn.choice((*OTHERS, *INTS, *FLOATS, *TEXTS))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return drawn.choice(INTS)
    if isinstance(value, float) or value is None:
        return drawn.choice(FLOATS)
    if isinstance(value, str):
        return drawn.choice(TEXTS)
    if isinstance(value, list):
        many: list[Any] = value * drawn.choice((0, 2, 1000))  # pyright: ignore[reportUnknownVariableType]
        return many[:3000]  # a field may be drawn twice
    if isinstance(value, dict):
        return {f"k{i}": drawn.choice(FLOATS) for i in range(drawn.choice((0, 3, 3000)))}
    return drawn.choice(OTHERS)


def _assembled(header: dict[str, Any], arrays: bytes) -> bytes:
    return _framed(json.dumps(header, default=_plain).encode(errors="surrogatepass"), arrays)


def _plain(value: object) -> Any:
    """Restores a field's default that `encode` left out."""
    return msgspec.to_builtins(value)


def _framed(header: bytes, arrays: bytes) -> bytes:
    """The record's frame around a header and arrays, with valid length and checksum."""
    padding = bytes(-len(header) % 8) if arrays else b""
    body = header + padding + arrays
    return _PREFIX.pack(b"RSR1", len(header), xxh3_64_intdigest(body)) + body
