"""Two releases in one run: `upgrade_skew` counts records that are lost, trained twice or misread
where one release lacks a record kind, a feature or a format (goal 0; docs/how-to/upgrade.md).

The older release is this code. What it lacks comes from a newer one: each record kind under its
next schema name, an `Opened` that needs an unknown feature, and each object of the store in its
next format. The run is that of `testbed/recorded`, killed within a step; every role that reads the
record or the object is started on it, with the real bus and store. Commands that only read give the
answer that they give without the newer record, or refuse.
"""

import io
import json
import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.upgrade.newer_run import (
    CopiedRun,
    append_newer,
    copied_run,
    make_newer,
    newer_record,
    records_of,
)
from rollstream.errors import NewerRelease, RollstreamError
from rollstream.look.index.parentage import read_parentage
from rollstream.run.cli.main import main
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.run.roles.context import RoleLaunch
from rollstream.run.roles.roles import run_role
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import AppendEntry, Bus, Message
from rollstream.streams.dead_letters import DeadLetterReader
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Take
from rollstream.streams.topics import DEAD, catalogue

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
    "relay": ("weights",),
    "eval": ("weights",),
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
    "relay": ("run.json", "manifest"),
    "eval": ("run.json", "manifest"),
}
ARCHIVED = ("trajectories", "annotations", "ledger", "admissions", "applied")
"""Topics whose newer records the archive keeps as they are."""
READERS = {
    "query": ("admissions", "ledger", "trajectories", "annotations", "applied"),
    "replay": ("admissions", "ledger", "trajectories"),
    "fork": ("prompts", "admissions", "ledger", "trajectories"),
}
"""Topics that each command reads. Audit, which reads all, cannot report that everything is kept."""
READER_OBJECTS = {"replay": ("checkpoint",), "fork": ("run.json", "checkpoint", "manifest")}
LEASES = {"train": "trainer", "dispatch": "dispatch", "prompts": "prompts", "archive": "archive"}
ROWS_MAX = 1000  # of one archived file; the run has fewer records
WAIT_S = 20.0  # seconds for a role that neither refuses nor dead-letters


def cases(quick: bool) -> Iterator[Case]:
    """Every combination; with `quick` one kind of each topic."""
    logging.disable(logging.ERROR)
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
    for topic in ARCHIVED[: 1 if quick else None]:
        _note(_copied(topic), f"archive {topic}", ends, wrong)
    _note(_passed_over(), "score trajectories", ends, wrong)
    for command, topics in READERS.items():
        for topic in topics:
            _note(_read(command, topic), f"{command} {topic}", ends, wrong)
    for command, keys in READER_OBJECTS.items():
        for key in keys:
            _note(_read_object(command, key), f"{command} {key}", ends, wrong)
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
        world = copied_run(Path(scratch))
        append_newer(world.bus, topic, schema)
        error = _run(world, role)
        return _judged(world, error, must_refuse=True)


def _of_many(role: str, topic: str) -> str:
    """The role continues, and dead-letters the record once."""
    with tempfile.TemporaryDirectory() as scratch:
        world = copied_run(Path(scratch))
        world.bus.append(topic, [AppendEntry(b"newer", newer_record(topic), 0)])
        error = _run(world, role, until=lambda: records_of(world.bus, DEAD) == 1)
        if error is None and records_of(world.bus, DEAD) == 1:
            return _judged(world, error, must_refuse=False)
        return f"{records_of(world.bus, DEAD)} dead letters, {error!r}"


def _of_store(role: str, key: str) -> str:
    """An object in its next format is refused and stays unchanged."""
    with tempfile.TemporaryDirectory() as scratch:
        world = copied_run(Path(scratch))
        key = make_newer(world, key)
        before = world.store.get(key)
        error = _run(world, role)
        if world.store.get(key) != before:
            return "the object was replaced"
        return _judged(world, error, must_refuse=True)


def _audited(topic: str) -> str:
    """Audit of a log with a newer record cannot report that everything is kept."""
    with tempfile.TemporaryDirectory() as scratch:
        world = copied_run(Path(scratch))
        append_newer(world.bus, topic, OF_ONE_ROLE[topic][0])
        world.bus.close()
        code, _ = _command(["audit", str(world.folder)])
        return "refuses" if code else "audit says that all is kept"


def _command(line: list[str]) -> tuple[int, str]:
    """Exit code and output of a command."""
    out, err, told = sys.stdout, sys.stderr, io.StringIO()
    sys.stdout = sys.stderr = told
    try:
        return main(line), told.getvalue()
    finally:
        sys.stdout, sys.stderr = out, err


def _read(command: str, topic: str) -> str:
    """The command's answer is that of the run without the newer record, or a refusal by name."""
    with tempfile.TemporaryDirectory() as scratch:
        world = copied_run(Path(scratch))
        world.bus.close()
        before = _answer(world, command, topic, Path(scratch) / "before")
        bus = open_run_log_for_writing(world.configuration, world.folder)
        _append(bus, topic)
        bus.close()
        return _compared(before, _answer(world, command, topic, Path(scratch) / "after"))


def _append(bus: Bus, topic: str) -> None:
    """Append a newer record to a topic of one or of many writers."""
    if topic in OF_ONE_ROLE:
        append_newer(bus, topic, OF_ONE_ROLE[topic][0])
    else:
        bus.append(topic, [AppendEntry(b"newer", newer_record(topic), 0)])


def _read_object(command: str, key: str) -> str:
    """The same for an object in its next format."""
    with tempfile.TemporaryDirectory() as scratch:
        world = copied_run(Path(scratch))
        before = _answer(world, command, "ledger", Path(scratch) / "before")
        make_newer(world, key)
        world.bus.close()
        return _compared(before, _answer(world, command, "ledger", Path(scratch) / "after"))


def _compared(before: tuple[int, str], after: tuple[int, str]) -> str:
    if after[0]:
        is_named = "newer" in after[1] or "release" in after[1]
        return "refuses" if is_named else f"ended: {after[1]}"
    return "agrees" if after == before else f"read otherwise: {after[1]}, before {before[1]}"


def _answer(world: CopiedRun, command: str, topic: str, out: Path) -> tuple[int, str]:
    """Exit code, and the result or, after a failure, the message."""
    run = str(world.folder)
    if command == "query":
        asked = f"SELECT count(*) AS n FROM {topic} WHERE reason IS NULL AND NOT void"
        return _command(["query", asked, "--run", run, "--json"])
    if command == "replay":
        steps = ["--from-step", "3", "--to-step", "7", "--out", str(out), "--json"]
        code, told = _command(["replay", run, *steps])
        if code:
            return code, told
        found = json.loads(told.splitlines()[-1])
        return 0, f"{found['compared']} steps compared, {found['differing']} differ"
    settings = ["--set", "trainer.steps=99"]
    code, told = _command(["fork", run, "--at", "latest", "--out", str(out), *settings])
    if code:
        return code, told
    parentage = read_parentage(open_store(f"file:{out / 'store'}"))
    return 0, "" if parentage is None else str(parentage.prompts)


def _copied(topic: str) -> str:
    """The archive keeps bytes that it cannot decode, or refuses."""
    with tempfile.TemporaryDirectory() as scratch:
        world = copied_run(Path(scratch))
        _append(world.bus, topic)
        new = {m.value for p in world.bus.end(topic) for m in _messages(world.bus, topic, p)}
        error = _run(world, "archive", until=lambda: new <= _archived(world, topic))
        if isinstance(error, NewerRelease):
            return "refuses"
        return "agrees" if new <= _archived(world, topic) else f"bytes are lost: {error!r}"


def _messages(bus: Bus, topic: str, partition: int) -> list[Message]:
    """The last record of the partition."""
    end = bus.end(topic)[partition]
    return bus.read(topic, {partition: end - 1}, records_max=1) if end else []


def _archived(world: CopiedRun, topic: str) -> set[bytes | None]:
    from rollstream.storage.archive.originals import FileMessages
    from rollstream.storage.archive.reading import archived_files

    files = archived_files(world.store, world.configuration.run, topic)
    found = [FileMessages(world.store, f.topic, f).since(f.first, ROWS_MAX) for f in files]
    return {message.value for messages in found for message in messages}


def _passed_over() -> str:
    """A scorer passes over a trajectory that it cannot read: the trainer dead-letters it."""
    with tempfile.TemporaryDirectory() as scratch:
        world = copied_run(Path(scratch))
        world.bus.append("trajectories", [AppendEntry(b"newer", newer_record("trajectories"), 0)])

        def is_read() -> bool:
            at = world.bus.committed("scoring", "trajectories").get(0)
            return at is not None and at.offset == world.bus.end("trajectories")[0]

        error = _run(world, "score", until=is_read)
        if not is_read():
            return f"not read: {error!r}"
        return _judged(world, error, must_refuse=False)


def _judged(world: CopiedRun, error: BaseException | None, *, must_refuse: bool) -> str:
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
    world: CopiedRun, role: str, until: Callable[[], bool] = lambda: False
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


def _nonce(world: CopiedRun, role: str) -> str | None:
    """The nonce of the killed holder, as its supervisor passes it on."""
    if role not in LEASES:
        return None
    return str(json.loads(world.store.get(f"roles/{LEASES[role]}.json")).get("nonce"))
