"""Two releases in one run: `upgrade_skew` counts records that are lost, trained twice or misread
where one release lacks a record kind, a feature or a format (goal 0; docs/how-to/upgrade.md).

The older release is this code. What it lacks comes from a newer one: each record kind under its
next schema name, an `Opened` that needs an unknown feature, and each object of the store in its
next format. The run is that of `testbed/recorded`, killed within a step; every role that reads the
record or the object is started on it, with the real bus and store.
"""

import io
import json
import logging
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from benchmarks.case import Case, alone
from rollstream.cli.main import main
from rollstream.config.config import load
from rollstream.config.run_folder import open_run_log_for_writing
from rollstream.config.settings import Configuration
from rollstream.errors import NewerRelease, RollstreamError
from rollstream.roles.context import RoleLaunch
from rollstream.roles.roles import run_role
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import encode_json as encode_object, seal
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.codec import Envelope, encode
from rollstream.streams.dead_letters import DeadLetterReader
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import SCHEMAS_BY_TOPIC, Opened, Take, WeightsAnnounced
from rollstream.streams.topics import DEAD, catalogue
from testbed.recorded import RUN_OF_0_1_0 as RUN

OF_ONE_ROLE = {
    "prompts": ("prompt/1", "opened/1"),
    "admissions": ("admitted/1", "opened/1"),
    "assignments": ("assignment/1", "opened/1"),
    "weights": ("weights/1", "opened/1"),
    "ledger": ("configured/1", "take/1", "step_done/1", "group_closed/1", "superseded/1",
               "take_failed/1", "take_retried/1", "opened/1"),
}  # fmt: skip
READS = {
    "prompts": ("prompts",),
    "dispatch": ("prompts", "admissions", "assignments", "weights", "ledger"),
    "train": ("admissions", "ledger"),
    "rollout": ("weights", "assignments"),
}
"""Topics of one role that each role acts on."""
SHARED = {"dispatch": ("status", "partials"), "train": ("trajectories", "annotations")}
"""Topics of many writers whose unreadable records each role dead-letters."""
OBJECTS = {
    "train": ("weights/latest.json", "roles/trainer.json", "run.json", "checkpoint", "manifest"),
    "dispatch": ("dispatch/state.json", "roles/dispatch.json", "run.json"),
    "prompts": ("roles/prompts.json", "run.json"),
    "archive": ("roles/archive.json", "run.json"),
    "rollout": ("roles/rollouts/rollout-0.json", "run.json", "manifest"),
    "score": ("run.json",),
}
LEASES = {"train": "trainer", "dispatch": "dispatch", "prompts": "prompts", "archive": "archive"}
WAIT_S = 20.0  # seconds for a role that neither refuses nor dead-letters
NEED = "a_feature_of_tomorrow"


@dataclass(frozen=True, slots=True)
class World:
    """A copy of the archived run."""

    folder: Path
    configuration: Configuration
    bus: Bus
    store: ObjectStore


def cases(quick: bool) -> Iterator[Case]:
    """Every combination; with `quick` one kind of each topic."""
    logging.disable(logging.WARNING)
    began, ends = time.monotonic(), Counter[str]()
    wrong: list[str] = []
    for role, topics in READS.items():
        for topic in topics:
            for schema in OF_ONE_ROLE[topic][: 1 if quick else None]:
                _note(_of_one_role(role, topic, schema), f"{role} {topic} {schema}", ends, wrong)
    for role, topics in SHARED.items():
        for topic in topics:
            _note(_of_many(role, topic), f"{role} {topic}", ends, wrong)
    for role, keys in OBJECTS.items():
        for key in keys:
            _note(_of_store(role, key), f"{role} {key}", ends, wrong)
    for topic in OF_ONE_ROLE:
        _note(_audited(topic), f"audit {topic}", ends, wrong)
    _note(_copied(), "archive", ends, wrong)
    logging.disable(logging.NOTSET)
    for line in wrong:
        print(f"upgrade_skew: {line}", file=sys.stderr)
    note = f"{sum(ends.values())} combinations: {ends['refuses']} refuse, {ends['agrees']} agree; "
    note += f"{time.monotonic() - began:.0f} s"
    yield alone("upgrade_skew", len(wrong), "combinations", at_most=0, note=note)


def _note(end: str, what: str, ends: Counter[str], wrong: list[str]) -> None:
    ends[end] += 1
    if end not in ("refuses", "agrees"):
        wrong.append(f"{what}: {end}")


def _of_one_role(role: str, topic: str, schema: str) -> str:
    """Appends a record of the newer release to a topic of one role."""
    with tempfile.TemporaryDirectory() as scratch:
        world = _world(Path(scratch))
        _append_newer(world.bus, topic, schema)
        error = _run(world, role)
        return _judged(world, error, must_refuse=True)


def _of_many(role: str, topic: str) -> str:
    """The role continues, and dead-letters the record once."""
    with tempfile.TemporaryDirectory() as scratch:
        world = _world(Path(scratch))
        header = json.dumps(
            {"record": {"schema": f"{min(SCHEMAS_BY_TOPIC[topic])[:-1]}2"}}
        ).encode()
        world.bus.append(topic, [AppendEntry(b"newer", _sealed(header), 0)])
        error = _run(world, role, until=lambda: _ends(world.bus, DEAD) == 1)
        if error is None and _ends(world.bus, DEAD) == 1:
            return _judged(world, error, must_refuse=False)
        return f"{_ends(world.bus, DEAD)} dead letters, {error!r}"


def _of_store(role: str, key: str) -> str:
    """An object in its next format is refused and stays unchanged."""
    with tempfile.TemporaryDirectory() as scratch:
        world = _world(Path(scratch))
        prefix = {"checkpoint": "checkpoints/", "manifest": "weights/"}.get(key)
        if prefix is not None:
            found = [e.key for e in world.store.list(prefix) if e.key.endswith("/manifest.json")]
            key = max(found)
        _renumber(world, key)
        if prefix == "weights/":
            _announce(world, key)
        before = world.store.get(key)
        error = _run(world, role)
        if world.store.get(key) != before:
            return "the object was replaced"
        return _judged(world, error, must_refuse=True)


def _audited(topic: str) -> str:
    """Audit of a log with a newer record cannot report that everything is kept."""
    with tempfile.TemporaryDirectory() as scratch:
        world = _world(Path(scratch))
        _append_newer(world.bus, topic, OF_ONE_ROLE[topic][0])
        world.bus.close()
        out, err = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = io.StringIO()
        try:
            code = main(["audit", str(world.folder)])
        finally:
            sys.stdout, sys.stderr = out, err
        return "refuses" if code else "audit says that all is kept"


def _copied() -> str:
    """The archive keeps bytes that it cannot decode, or refuses."""
    with tempfile.TemporaryDirectory() as scratch:
        world = _world(Path(scratch))
        header = json.dumps({"record": {"schema": "trajectory/2"}}).encode()
        value = _sealed(header)
        world.bus.append("trajectories", [AppendEntry(b"newer", value, 0)])
        before = len(list(world.store.list("archive/topic=trajectories")))
        _run(world, "archive", until=lambda: _archived(world) > before)
        from rollstream.storage.archive.originals import FileMessages
        from rollstream.storage.archive.reading import archived_files

        files = archived_files(world.store, world.configuration.run, "trajectories")
        found = [FileMessages(world.store, f.topic, f).since(f.first, 100) for f in files]
        kept = [message.value for messages in found for message in messages]
        return "agrees" if value in kept else "the archive lost its bytes"


def _archived(world: World) -> int:
    return len(list(world.store.list("archive/topic=trajectories")))


def _judged(world: World, error: BaseException | None, *, must_refuse: bool) -> str:
    """How a combination ended; the log shows what was lost or trained twice."""
    written = {topic.name for topic in catalogue() if topic.writer}
    lost = [d.source for d in DeadLetterReader(world.bus, written).read() if d.source in written]
    if lost:
        return f"lost: a record of {lost[0]} was dead-lettered"
    if any(count > 1 for count in _trained(world.bus).values()):
        return "trained twice"
    if must_refuse:
        return "refuses" if isinstance(error, NewerRelease) else f"read otherwise: {error!r}"
    return "agrees" if error is None else f"ended: {error!r}"


def _trained(bus: Bus) -> Counter[str]:
    """How often the takes that this release reads name each trajectory."""
    found: Counter[str] = Counter()
    reader = TopicReader(bus, "ledger", from_begin(bus, "ledger"))
    try:
        while received := reader.poll(records_max=1):
            if isinstance(received[0].record, Take):
                found.update(member.trajectory for member in received[0].record.members)
    except NewerRelease:
        pass
    return found


def _run(
    world: World, role: str, until: Callable[[], bool] = lambda: False
) -> BaseException | None:
    """The role's exit code; it is stopped once `until` holds, or after a while."""
    stop, errors = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            launch = RoleLaunch(
                role=role, configuration=world.configuration, folder=world.folder,
                name=_name(role), stop=stop, nonce="skew", handed_nonce=_nonce(world, role),
            )  # fmt: skip
            run_role(launch)
        except (RollstreamError, SystemExit) as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    give_up = time.monotonic() + WAIT_S
    while thread.is_alive() and not until() and time.monotonic() < give_up:
        thread.join(0.05)
    stop.set()
    thread.join(WAIT_S)
    return errors[0] if errors else None


def _name(role: str) -> str:
    return "rollout-0" if role == "rollout" else LEASES.get(role, role)


def _nonce(world: World, role: str) -> str | None:
    """The nonce of the killed holder, as its supervisor passes it on."""
    if role not in LEASES:
        return None
    return str(json.loads(world.store.get(f"roles/{LEASES[role]}.json")).get("nonce"))


def _world(folder: Path) -> World:
    with RUN.open("rb") as file:
        data = zstandard.ZstdDecompressor().stream_reader(file).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder / "run", filter="data")
    overrides = ["metrics.enabled=false", "archive.roll_s=0.5", "rollouts.niceness=0"]
    configuration = load(folder / "run" / "config.json", overrides, {})
    bus = open_run_log_for_writing(configuration, folder / "run")
    return World(folder / "run", configuration, bus, open_store(f"file:{folder / 'run' / 'store'}"))


def _append_newer(bus: Bus, topic: str, schema: str) -> None:
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


def _sealed(header: bytes) -> bytes:
    prefix = b"RSR1" + len(header).to_bytes(4, "little")
    return prefix + xxh3_64_intdigest(header).to_bytes(8, "little") + header


def _renumber(world: World, key: str) -> None:
    if key == "run.json":
        value = {"id": "0" * 16, "run": world.configuration.run, "format": 9}
        world.store.put(key, encode_object(value))
        return
    value = json.loads(world.store.get(key))
    if "body" in value:
        world.store.put(key, seal({**value["body"], "format": 9}))
    else:
        world.store.put(key, encode_object({**value, "format": 9}))


def _announce(world: World, key: str) -> None:
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


def _ends(bus: Bus, topic: str) -> int:
    return sum(bus.end(topic).values())
