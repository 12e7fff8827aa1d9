"""A run is backed up while it trains, by a command that is killed with -9 and repeated; then log
and store are lost. The restored run resumes from the cut to the recorded hashes, and its audit is
clean.
"""

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rollstream.keep.backup import open_backup
from rollstream.keep.restore import read_backup
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import bus_url
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from rollstream.streams.records import StepDone, Take
from testbed.run_driver import HERE, RunDriver, set_words
from testbed.run_process import read, started
from testbed.servers import kafka_broker, versity
from testbed.servers.kafka_broker import KafkaBroker
from tests.support.killed_at import run_killed_at

MORE = [
    "trainer.steps=100000", "checkpoints.every=3", "archive.roll_s=1",
    "task.name=tests.support.uneven_task:Uneven",
]  # fmt: skip


def answer(*words: str) -> dict:
    return json.loads(HERE.run(*words, "--json").stdout.splitlines()[0])


@contextmanager
def places(kind: str, folder: Path) -> Iterator[tuple[list[str], str, list[str], str]]:
    """Settings of the run, where its backup goes, settings of the restored run, and the method
    behind which the backup is killed. What the run wrote is gone at the end.
    """
    if kind == "sqlite and files":
        destination = str(folder.parent / "backup")
        yield [], destination, [], "rollstream.storage.stores.file:FileStore.put"
        shutil.rmtree(folder)
        return
    broker, prefix, store = KafkaBroker(), uuid.uuid4().hex[:8], versity.new_url()
    try:
        broker.start()
        broker.wait_ready()
        new = kafka_broker.new_url().rpartition("/")[0]
        urls = [f"bus=kafka://{broker.server}/{prefix}", f"store={store}"]
        put = "rollstream.storage.stores.s3.store:S3Store.put"
        yield urls, versity.new_url(), [f"bus={new}/{prefix}"], put
    finally:
        broker.close()  # removes its log
    objects = open_store(store)
    for entry in list(objects.list()):
        objects.delete(entry.key)
    shutil.rmtree(folder)


def hashes(folder: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for done in read(folder, "ledger", StepDone):
        found.setdefault(done.step, set()).add(done.state_hash)
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite and files", "kafka and s3"])
def test_a_living_run_is_backed_up_lost_and_restored(
    tmp_path: Path, model: Path, kind: str
) -> None:
    folder, again = tmp_path / "run", tmp_path / "again"
    with places(kind, folder) as (urls, destination, new, put):
        with started(folder, model, [*MORE, *urls]) as run:
            run.wait_for_step(8)
            run_killed_at(put, 9, ["backup", str(folder), destination])
            refused = HERE.run("restore", destination, str(again), code=2)
            assert "incomplete" in refused.stderr
            reported = answer("backup", str(folder), destination)
            run.wait_for_step(reported["step"] + 3)
        trained = hashes(folder)

    settings = set_words(new)
    restored = answer("restore", destination, str(again), *settings)
    assert (restored["step"], restored["checkpoint"]) == (reported["step"], reported["checkpoint"])
    assert_offsets_are_kept(destination, again)
    with RunDriver(again) as resumed:
        resumed.start()
        resumed.wait_for_step(reported["step"] + 5)
        resumed.newest().stop()
    (begun, *_) = re.findall(r"resumes after step (\d+)", (again / "logs/trainer.log").read_text())
    assert reported["checkpoint"].startswith(f"s{int(begun):08d}-")
    found = hashes(again)
    assert set(found) >= set(range(int(begun) + 1, reported["step"] + 5))
    assert all(len(one) == 1 for one in found.values()), "a repeated step differs"
    assert {step: one for step, one in found.items() if step <= reported["step"]}.items() <= (
        trained.items()
    )
    used = [m.trajectory for take in read(again, "ledger", Take) for m in take.members]
    assert len(set(used)) == len(used)
    audit = resumed.audit()
    assert audit["violations"] == 0, audit
    if new:
        occupied = HERE.run("restore", destination, str(tmp_path / "other"), *settings, code=2)
        assert "has topics already" in occupied.stderr


def assert_offsets_are_kept(destination: str, again: Path) -> None:
    backup = read_backup(open_backup(destination), destination)
    assert any(any(one.begins) for one in backup.topics), "the log was never truncated"
    with closing(open_bus(bus_url(load(again / "config.json"), again))) as bus:
        for one in backup.topics:
            if one.topic.cleanup == "safe":
                assert bus.begin(one.topic.name) == dict(enumerate(one.begins))
                assert bus.end(one.topic.name) == dict(enumerate(one.ends))
