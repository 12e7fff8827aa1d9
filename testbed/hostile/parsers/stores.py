"""Parsers of a run's log, store and archive: records, rows, manifests, states, weights, Parquet."""

import io
import json
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from xxhash import xxh3_64_intdigest

from rollstream.consumers.dispatch.persistence import PersistedState
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.errors import RollstreamError
from rollstream.producers.agents.episode import unusable_chain
from rollstream.producers.rollout.chain import ChainRequest, read_chains
from rollstream.storage.archive.file_names import archive_key, parse_archive_key
from rollstream.storage.archive.files import encode_file
from rollstream.storage.archive.reading import file_end, table_from
from rollstream.storage.archive.tables import records_of
from rollstream.storage.identity import RunIdentity
from rollstream.storage.stores.base import content_hash
from rollstream.storage.stores.json_objects import decode_json, encode_json, seal, unseal
from rollstream.storage.terms import NameRecord, RoleRecord, TermGeneration
from rollstream.storage.weights.checkpoints import (
    CheckpointId,
    CheckpointManifest,
    checkpoint_manifest,
    checkpoint_state,
    open_checkpoint,
    stored_checkpoints,
    write_checkpoint,
)
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.manifest import FileEntry
from rollstream.storage.weights.pointer import Pointer
from rollstream.storage.weights.verify import verify_version
from rollstream.streams.admissible import TrainingBounds, malformed_partial, refusal
from rollstream.streams.bus import AppendEntry
from rollstream.streams.codec import Envelope, decode, encode, envelope_of
from rollstream.streams.records import Fence, Partial, Position, Trajectory
from rollstream.streams.sqlite.bus import SqliteBus
from rollstream.streams.sqlite.database import PAGE_BYTES
from rollstream.streams.sqlite.topic_log import pack_rows, unpack_row
from rollstream.streams.topics import Topic, catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import publish
from testbed.hostile.agents import hostile_state, partial
from testbed.hostile.damage import changed_bytes, changed_json, damaged_json
from testbed.hostile.parsers.parser import FuzzedParser
from testbed.memory import MemoryBus, MemoryStore
from testbed.sample_records import SAMPLES

ENCODED = [encode(one, envelope) for one in SAMPLES for envelope in (None, Envelope("t", 3, 17))]
OBJECTS: tuple[Any, ...] = (
    Pointer("r", 2, Version(3, 1), "weights/v00000003-t0001/manifest.json", "0" * 32, None),
    RoleRecord("trainer", 2, "host/7", "abc", 4, 10.0, False),
    NameRecord("rollouts", "r0", 3),
    TermGeneration("rollouts", 3),
    RunIdentity("0" * 16, "r", "1" * 32, "0.3", ("redundancy",)),
    PersistedState(1, {"trajectories": {}}, orders=()),
)
AT = {"trajectories": {"0": Position(7, Fence(0, 0))}}
STATE = TrainerState(3, 3, Position(5, Fence(1, 2)), AT, (), {"dead": 1}, "0" * 32).encode()


def store_parsers() -> Iterator[FuzzedParser]:
    """Yields the parsers of what lies in a log, a store or an archive. What has a hash gets the
    right one of what it became, as a hostile writer would do.
    """
    yield FuzzedParser("record", _record, lambda data, folder: _judged(data))
    yield FuzzedParser("JSON object", _object, lambda one, folder: _object_read(*one))
    yield FuzzedParser(
        "sealed object",
        lambda drawn: changed_bytes(drawn, seal(OBJECTS[0])),
        lambda data, folder: unseal(data, Pointer, "key"),
    )
    yield FuzzedParser("state of a checkpoint", _state, lambda data, folder: _state_read(data))
    yield FuzzedParser("checkpoint", _checkpoint, lambda store, folder: _checkpoint_read(store))
    yield FuzzedParser("state of an episode", _episode, lambda one, folder: _resumed(one))
    yield FuzzedParser("row of a log", _row, lambda row, folder: unpack_row("t", 0, row))
    yield FuzzedParser("file of a log", lambda drawn: drawn, _log_read)
    yield FuzzedParser("archive file", _archive_file, lambda one, folder: _archive_read(*one))


def resealed(head: bytes, arrays: bytes) -> bytes:
    """Returns a record of this header and these arrays, with the right checksum."""
    body = head + (bytes(-len(head) % 8) + arrays if arrays else b"")
    return struct.pack("<4sIQ", b"RSR1", len(head), xxh3_64_intdigest(body)) + body


def _record(drawn: Random) -> bytes:
    data = drawn.choice(ENCODED)
    length = struct.unpack_from("<I", data, 4)[0]
    head, arrays = data[16 : 16 + length], data[(16 + length + 7) // 8 * 8 :]
    match drawn.randrange(5):
        case 0 | 1:
            head = json.dumps(changed_json(drawn, json.loads(head)), separators=(",", ":")).encode()
        case 2:
            head = changed_bytes(drawn, head)
        case 3:
            arrays = changed_bytes(drawn, arrays)
        case _:
            return changed_bytes(drawn, data)
    return resealed(head, arrays)


def _judged(data: bytes) -> None:
    envelope_of(data)
    decoded = decode(data)
    encode(decoded.record, decoded.envelope)
    if isinstance(decoded.record, Partial):
        malformed_partial(decoded.record)
    if isinstance(decoded.record, Trajectory):
        refusal(decoded.record, TrainingBounds(1 << 20, 1 << 20, True))


def _object(drawn: Random) -> tuple[Any, bytes]:
    sample = drawn.choice(OBJECTS)
    return sample, damaged_json(drawn, json.loads(encode_json(sample)))


def _object_read(sample: Any, data: bytes) -> object:
    return decode_json(data, cast("type[Any]", type(sample)), "key")


# ---- checkpoints ---------------------------------------------------------------------------------

ID = CheckpointId(1, 4)
WRITTEN = MemoryStore()
write_checkpoint(WRITTEN, 4, 1, {"w": torch.arange(6.0)}, STATE)
STATE_KEY, MANIFEST_KEY = f"{ID.folder}/state.json", f"{ID.folder}/manifest.json"


def _copied(changes: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for entry in WRITTEN.list(""):
        store.put(entry.key, changes.get(entry.key, WRITTEN.get(entry.key)))
    return store


def _state(drawn: Random) -> MemoryStore:
    """A checkpoint with another state, whose hash its manifest has."""
    data = damaged_json(drawn, STATE)
    manifest = unseal(WRITTEN.get(MANIFEST_KEY), CheckpointManifest, MANIFEST_KEY)
    entry = FileEntry("state.json", len(data), content_hash(data))
    return _copied({STATE_KEY: data, MANIFEST_KEY: seal(replace(manifest, state=entry))})


def _state_read(store: MemoryStore) -> None:
    TrainerState.decode(checkpoint_state(store, ID)).intake_positions()


def _checkpoint(drawn: Random) -> MemoryStore:
    key = drawn.choice([entry.key for entry in WRITTEN.list("")])
    data = WRITTEN.get(key)
    if key != MANIFEST_KEY:
        return _copied({key: changed_bytes(drawn, data)})
    manifest = json.loads(encode_json(unseal(data, CheckpointManifest, key)))
    with suppress(UnicodeEncodeError, OverflowError):  # no encoder writes it, and no hash fits
        if drawn.randrange(4):
            return _copied({key: seal(changed_json(drawn, manifest))})
    return _copied({key: changed_bytes(drawn, data)})


def _checkpoint_read(store: MemoryStore) -> None:
    stored_checkpoints(store)
    checkpoint_manifest(store, ID)
    dict(open_checkpoint(store, ID).tensors)


# ---- the log -------------------------------------------------------------------------------------

ENTRIES = [AppendEntry(b"k%d" % n, b"v" * n) for n in range(4)]
VALUES = (None, 0, 1, -1, 3, 1 << 40, (1 << 63) - 1, 1.5, "", "1", b"", bytes(8), b"\xff" * 30)
SETTINGS = {"name": "t", "partitions": 2, "compacted": False, "retention_s": None,
            "record_bytes_max": 1000, "writer": ""}  # fmt: skip


def _episode(drawn: Random) -> Partial:
    return partial("0.0", hostile_state(drawn.randrange(1 << 30), 0))


def _resumed(one: Partial) -> None:
    """Reads the chain that ends with this partial, as a rollout that takes the episode up."""
    bus = MemoryBus()
    bus.create(catalogue(1))
    at = publish(bus, "partials", one.trajectory, one)
    chain = read_chains(bus, [ChainRequest(one.trajectory, at, at, 0, 1000)])[one.trajectory]
    if isinstance(chain, RollstreamError):
        raise chain
    unusable_chain(chain)


def _row(drawn: Random) -> tuple[Any, ...]:
    row: list[Any] = list(drawn.choice(list(pack_rows(ENTRIES, 5, 17, 1000))))
    for _ in range(drawn.randint(1, 3)):
        row[drawn.randint(1, 5)] = drawn.choice(VALUES)
    return tuple(row)


def _log_read(drawn: Random, folder: Path) -> None:
    """Makes a log, damages its file, and reads it."""
    with closing(SqliteBus(folder)) as bus:
        bus.create([Topic("t", 2)])
        bus.append("t", ENTRIES)
    (path,) = (path for path in folder.iterdir() if path.name.startswith("t."))
    whole = path.read_bytes()  # a damaged first page is an unfinished file, for which readers wait
    path.write_bytes(whole[:PAGE_BYTES] + changed_bytes(drawn, whole[PAGE_BYTES:]))
    with closing(SqliteBus(folder)) as bus:
        at, end = bus.begin("t")[0], bus.end("t")[0]
        while at < end and (messages := bus.read("t", {0: at})):
            at = messages[-1].offset + 1


# ---- the archive ---------------------------------------------------------------------------------

ARCHIVED = "trajectories"
TRAJECTORIES = [one for one in SAMPLES if isinstance(one, Trajectory)]
_arrow: Any = pa


def _archived() -> bytes:
    from rollstream.streams.bus import Message

    messages = [
        Message(ARCHIVED, 0, number, 1000, b"k", encode(one))
        for number, one in enumerate((TRAJECTORIES * 6)[:6])
    ]
    return bytes(encode_file(ARCHIVED, messages, Fence(1, 0)).data)


FILE = _archived()
TABLE: Any = pq.read_table(io.BytesIO(FILE))
COLUMNS: tuple[Any, ...] = tuple(
    _arrow.array([each] * len(TABLE))
    for each in ("x", b"\xff", 1, -1, 1 << 62, 1.5, True, None, ["x"], [1], {"a": 1})
)


def _archive_file(drawn: Random) -> tuple[str, bytes]:
    key = archive_key(ARCHIVED, "r", 0, 0, 1000)
    match drawn.randrange(3):
        case 0:
            footer = int.from_bytes(FILE[-8:-4], "little")
            tail = changed_bytes(drawn, FILE[-8 - footer : -8])
            return key, FILE[: -8 - footer] + tail + len(tail).to_bytes(4, "little") + b"PAR1"
        case 1:
            return key, changed_bytes(drawn, FILE[:-8]) + FILE[-8:]
        case _:
            sink, table = io.BytesIO(), TABLE
            for _ in range(drawn.randint(1, 2)):
                at = drawn.randrange(table.num_columns)
                table = table.set_column(at, table.column_names[at], drawn.choice(COLUMNS))
            pq.write_table(table.replace_schema_metadata(), sink)
            return key, sink.getvalue()


def _archive_read(key: str, data: bytes) -> None:
    store, file = MemoryStore(), parse_archive_key(key, len(data))
    assert file is not None
    store.put(key, data)
    file_end(store, file)
    list(records_of(table_from(store, file), with_void=True))


# ---- versions of the weights ---------------------------------------------------------------------


def weights_parser(store: MemoryStore) -> FuzzedParser:
    """Returns the reader of the versions of this store, each with a damaged object."""
    keys = [entry.key for entry in store.list("weights/")]
    names = {key.split("/")[1] for key in keys if key.endswith("/manifest.json")}
    versions = [Version(int(name[1:9]), int(name[11:])) for name in sorted(names)]

    def damaged(drawn: Random) -> MemoryStore:
        key = drawn.choice([key for key in keys if key.endswith("manifest.json")] * 3 + keys)
        data, other = store.get(key), MemoryStore()
        if key.endswith("manifest.json"):
            data = json.dumps(changed_json(drawn, json.loads(data))).encode()
        else:
            data = changed_bytes(drawn, data)
        for each in keys:
            other.put(each, data if each == key else store.get(each))
        return other

    def read(other: MemoryStore, folder: Path) -> None:
        for version in versions:
            fetch_tensors(other, version)
            verify_version(other, version)

    return FuzzedParser("version of the weights", damaged, read)
