"""A copy of the recorded run (`testbed/recorded`) to which a newer release has written: records
under their next schema name, an `Opened` that needs an unknown feature, and objects of the store in
their next format.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.run.config.settings import Configuration
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import encode_json as encode_object, seal
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import Envelope, encode
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import SCHEMAS_BY_TOPIC, Opened, WeightsAnnounced
from rollstream.streams.topics import DEAD, catalogue
from testbed.recorded import RUN_OF_0_1_0, unpack

NEED = "a_feature_of_tomorrow"


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """A copy of the archived run."""

    folder: Path
    configuration: Configuration
    bus: Bus
    store: ObjectStore


def copied_run(folder: Path) -> CopiedRun:
    unpack(RUN_OF_0_1_0, folder / "run")
    overrides = [
        "metrics.enabled=false",
        "archive.roll_s=0.5",
        "rollouts.niceness=0",
        "evaluation.every=1",
        "evaluation.prompts=1",
        "evaluation.samples=1",
    ]
    configuration = load(folder / "run" / "config.json", overrides, {})
    bus = open_run_log_for_writing(configuration, folder / "run")
    bus.create([topic for topic in catalogue() if topic.name == DEAD])  # 0.1.0 had none
    return CopiedRun(
        folder / "run", configuration, bus, open_store(f"file:{folder / 'run' / 'store'}")
    )


def append_newer(bus: Bus, topic: str, schema: str) -> None:
    """The next record that the present holder of a newer release would have written."""
    reader = TopicReader(bus, topic, from_begin(bus, topic))
    reader.read_to(bus.end(topic))
    role, entries = bus.settings(topic).writer, list[AppendEntry]()
    for partition, at in reader.positions.items():
        fence = at.fence
        if schema == "opened/1":
            opened = Opened(role, fence.term + 1, "9.0", (NEED,), (NEED,))
            value = encode(opened, Envelope(role, fence.term + 1, 0))
        else:
            name = f"{schema.partition('/')[0]}/9"
            envelope = {"role": role, "term": fence.term, "sequence": fence.sequence}
            header = {"record": {"schema": name}, "envelope": envelope}
            value = _sealed(json.dumps(header).encode())
        entries.append(AppendEntry(b"newer", value, partition))
    bus.append(topic, entries)


def newer_record(topic: str) -> bytes:
    """A record of the topic's first schema under its next name."""
    name = f"{min(SCHEMAS_BY_TOPIC[topic]).partition('/')[0]}/9"
    return _sealed(json.dumps({"record": {"schema": name}}).encode())


def _sealed(header: bytes) -> bytes:
    prefix = b"RSR1" + len(header).to_bytes(4, "little")
    return prefix + xxh3_64_intdigest(header).to_bytes(8, "little") + header


def make_newer(world: CopiedRun, key: str) -> str:
    """Put the object in its next format; returns its key."""
    prefix = {"checkpoint": "checkpoints/", "manifest": "weights/"}.get(key)
    if prefix is not None:
        found = [e.key for e in world.store.list(prefix) if e.key.endswith("/manifest.json")]
        key = max(found)
    _renumber(world, key)
    if prefix == "weights/":
        _announce(world, key)
    return key


def _renumber(world: CopiedRun, key: str) -> None:
    if key == "run.json":
        value = {"id": "0" * 16, "run": world.configuration.run, "format": 9}
        world.store.put(key, encode_object(value))
        return
    value = json.loads(world.store.get(key))
    if "body" in value:
        world.store.put(key, seal({**value["body"], "format": 9}))
    else:
        world.store.put(key, encode_object({**value, "format": 9}))


def _announce(world: CopiedRun, key: str) -> None:
    """The hash of the newer manifest, as pointer and topic would name it."""
    named = content_hash(world.store.get(key))
    pointer = json.loads(world.store.get("weights/latest.json"))
    world.store.put("weights/latest.json", encode_object({**pointer, "manifest_hash": named}))
    reader = TopicReader(world.bus, "weights", from_begin(world.bus, "weights"))
    last = reader.read_to(world.bus.end("weights"))[-1]
    assert isinstance(last.record, WeightsAnnounced)
    fence = reader.positions[0].fence
    envelope = Envelope("trainer", fence.term, fence.sequence)
    value = encode(replace(last.record, manifest_hash=named), envelope)
    world.bus.append("weights", [AppendEntry(last.key.encode(), value, 0)])


def records_of(bus: Bus, topic: str) -> int:
    return sum(bus.end(topic).values())
