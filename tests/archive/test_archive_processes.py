"""Real processes: archivers killed with -9 beside each other, the role, and the order of
stopping.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollstream.consumers.archive.topic import TopicArchive
from rollstream.consumers.settings import ArchiveSettings
from rollstream.run.supervisor.process import ProcessSpec, last_lines
from rollstream.run.supervisor.supervisor import Supervisor, SupervisorLimits
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.reading import archived_files, table_from
from rollstream.storage.archive.tables import originals_of
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from testbed.repository import ROOT
from testbed.waiting import WAIT_S, let_pass, wait_for
from tests.archive.archive_samples import append, append_of_term, archived_to, trajectory

TOPIC = "trajectories"


def assert_archived_exactly_once(bus: Bus, store: ObjectStore, topic: str) -> None:
    """All rows of all partitions are the log, in order, each once."""
    for partition, end in bus.end(topic).items():
        files = [f for f in archived_files(store, "tiny", topic) if f.partition == partition]
        tables = [table_from(store, file) for file in files]
        offsets = [at for table in tables for at in table.column("offset").to_pylist()]
        assert offsets == list(range(end))
        values = [value for table in tables for value in originals_of(table, topic)]
        log = bus.read(topic, {partition: 0}, records_max=100_000) if end else []
        assert values == [message.value for message in log]


def at_some_moment(chance: random.Random) -> None:
    let_pass(chance.random() * 0.05)


@pytest.mark.slow
def test_archivers_that_merge_killed_again_and_again_leave_every_row_exactly_once(
    tmp_path: Path,
) -> None:
    bus, store = open_bus(f"sqlite:{tmp_path}/bus"), open_store(f"file:{tmp_path}/store")
    bus.create(catalogue(2))
    line = [sys.executable, "-m", "tests.archive.competing_archiver"]
    line += [f"{tmp_path}/bus", f"{tmp_path}/store"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    chance = random.Random(7)
    rivals = [start(), start()]
    try:
        for turn in range(8):
            before = sum(archived_to(store, "tiny", TOPIC).values())
            for group in range(40):
                append(bus, "trajectories", [trajectory(group)], group % 2)
            wait_for(
                lambda: sum(archived_to(store, "tiny", TOPIC).values()) > before,  # noqa: B023
                rivals[turn % 2],
            )
            at_some_moment(chance)
            read = [one.address for one in LogView(None, store, "tiny").topic(TOPIC).records()]
            for partition in (0, 1):
                offsets = [at.offset for at in read if at.partition == partition]
                assert offsets == list(range(len(offsets)))
            assert len(read) >= before
            rivals[turn % 2].kill()
            rivals[turn % 2].wait()
            rivals[turn % 2] = start()
    finally:
        for process in rivals:
            process.kill()
            process.wait()
    last = TopicArchive(bus, store, "tiny", "trajectories", ArchiveSettings())
    last.start()
    last.finish()
    assert_archived_exactly_once(bus, store, "trajectories")
    files = archived_files(store, "tiny", TOPIC)
    assert max(len([f for f in files if f.partition == partition]) for partition in (0, 1)) < 16
    assert any(file.last is not None for file in files)
    bus.close()


def test_a_stopped_role_archives_all_of_the_log_and_a_standby_continues(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    bus, store = open_bus(f"sqlite:{folder}/bus"), open_store(f"file:{folder}/store")
    bus.create(catalogue())
    append_of_term(bus, 1, 0, 5)
    append(bus, "trajectories", [trajectory(group) for group in range(9)], 3)
    (tmp_path / "c.toml").write_text('run = "tiny"\n')
    line = [sys.executable, "-m", "rollstream", "archive", str(tmp_path / "c.toml")]
    line += ["--run", str(folder)]
    first = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE)
    wait_for(lambda: bool(bus.committed("archive", "applied")), first)
    assert os.getpriority(os.PRIO_PROCESS, first.pid) >= 10
    second = subprocess.Popen([*line, "--name", "standby"], cwd=ROOT, stderr=subprocess.PIPE)
    append_of_term(bus, 1, 5, 5)
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 143
    assert_archived_exactly_once(bus, store, "admissions")
    assert_archived_exactly_once(bus, store, "trajectories")
    holder = folder / "store" / "roles" / "archive.json"
    wait_for(lambda: json.loads(holder.read_text())["holder"] == "standby", second)
    append_of_term(bus, 1, 10, 5)
    second.send_signal(signal.SIGTERM)
    assert second.wait(WAIT_S) == 143
    assert_archived_exactly_once(bus, store, "admissions")
    lines = (folder / "metrics" / "archive.jsonl").read_text().splitlines()
    assert {"time_s", "key", "records", "bytes", "seconds"} == set(json.loads(lines[0]))
    bus.close()


def test_the_archive_is_stopped_when_all_others_have_ended(tmp_path: Path) -> None:
    """The archive also holds records that a rollout appends while it stops."""
    note, up = tmp_path / "note", tmp_path / "up"
    slow = f"""
import signal, sys, time, pathlib
def stop(*_):
    time.sleep(0.5)
    pathlib.Path({str(note)!r}).write_text("the last record")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(up)!r}).touch()
time.sleep(600)
"""
    last = f"""
import signal, sys, time, pathlib
def stop(*_):
    print("saw", pathlib.Path({str(note)!r}).read_text(), flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(up)!r} + "2").touch()
time.sleep(600)
"""
    done = f"""
import pathlib, time
while not (pathlib.Path({str(up)!r}).exists() and pathlib.Path({str(up)!r} + "2").exists()):
    time.sleep(0.01)
"""
    seats = [
        ProcessSpec("trainer", [sys.executable, "-c", done], ends="run"),
        ProcessSpec("rollout", [sys.executable, "-c", slow]),
        ProcessSpec("archive", [sys.executable, "-c", last], stops_last=True),
    ]
    supervisor = Supervisor(seats, tmp_path / "logs", limits=SupervisorLimits(tick_s=0.01))
    outcome = supervisor.run(threading.Event(), threading.Event(), lambda states: None)
    assert outcome.kind == "complete"
    assert last_lines(tmp_path / "logs" / "archive.log") == ["saw the last record"]


FREE_MEMORY = """
from rollstream.storage.archive import reading
reading.allocate_tables_with_malloc()
import pyarrow
from tests.archive.archive_samples import private_bytes
print(pyarrow.default_memory_pool().backend_name)
values = [bytes(1000) for _ in range(60_000)]
del values[:-1]  # the last one lies behind all others, which malloc alone would keep
kept = private_bytes()
reading.release_memory()
print(kept - private_bytes())
"""


def test_an_archiver_gives_free_memory_back_that_lies_before_a_live_value() -> None:
    line = [sys.executable, "-c", FREE_MEMORY]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("ARROW_DEFAULT_MEMORY_POOL", None)
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    backend, released = ended.stdout.split()
    assert backend == "system"
    assert int(released) > 50_000_000
