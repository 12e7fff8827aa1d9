"""A broker is killed with -9 and its disk is gone, the bucket is whole: a fork from the store's URL
continues from checkpoint, versions and archive, and the fork and the rest of the run are clean.
"""

import json
import shutil
import uuid
from pathlib import Path

import pytest

from rollstream.look.index.parentage import read_parentage
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import open_run_view
from rollstream.run.config.config import load
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.checkpoints import newest_checkpoint
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, GroupClosed, StepDone, Take
from testbed.run_driver import HERE, RunDriver, set_words
from testbed.run_process import read, started
from testbed.servers import kafka_broker, versity
from testbed.servers.kafka_broker import KafkaBroker

MORE = ["trainer.steps=400", "checkpoints.every=3", "archive.roll_s=1"]


@pytest.mark.long
def test_a_run_whose_broker_lost_its_disk_continues_as_a_fork(tmp_path: Path, model: Path) -> None:
    folder, fork, store_url = tmp_path / "run", tmp_path / "fork", versity.new_url()
    broker = KafkaBroker()
    try:
        broker.start()
        broker.wait_ready()
        urls = [f"bus=kafka://{broker.server}/{uuid.uuid4().hex[:8]}", f"store={store_url}"]
        with started(folder, model, [*MORE, *urls]) as run:
            run.wait_for_step(7)
            broker.kill()
            run.newest().kill()
    finally:
        broker.close()  # removes its log folder
    shutil.rmtree(folder)  # the machine is gone, too

    new = [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}"]
    settings = [*new, "trainer.steps=400", "evaluation.enabled=false", "archive.roll_s=1"]
    words = (store_url, "--at", "latest", "--out", str(fork), *set_words(settings), "--json")
    printed = json.loads(HERE.run("fork", *words).stdout)
    checkpoint = newest_checkpoint(open_store(store_url)).checkpoint
    assert checkpoint is not None
    step = printed["step"]
    assert step == checkpoint.id.step >= 6
    lost = printed["recovery"]
    assert max(step, lost["archived_step"]) <= lost["reached"]
    assert lost["admitted_since"] >= 0
    assert lost["archived_records"] > 0

    with RunDriver(fork) as run:
        run.start()
        run.wait_for_step(step + 4)
        run.newest().stop()
    audit = run.audit()
    assert audit["violations"] == 0, audit
    done = {record.step for record in read(fork, "ledger", StepDone)}
    assert min(done) == step + 1
    left = HERE.run("audit", store_url, "--json", code=None)
    assert json.loads(left.stdout)["violations"] == 0, left.stdout
    assert_prompts_continue(store_url, fork, step, is_archived=lost["archived_step"] >= step)


def assert_prompts_continue(store_url: str, fork: Path, step: int, is_archived: bool) -> None:
    """What had been trained or closed up to the checkpoint is not asked again; all else is, as far
    as the archive shows: its last seconds are lost with the broker.
    """
    parentage = read_parentage(open_store(load(fork / "config.json").store))
    assert parentage is not None
    ended: set[int] = set()
    with open_run_view(locate_run(store_url)) as log:
        reader = TopicReader(log, "ledger", from_begin(log, "ledger"))
        for record in (received.record for received in reader.read_to(log.end("ledger"))):
            if isinstance(record, Take) and record.step <= step:
                ended |= {group.group for group in record.groups}
            if isinstance(record, GroupClosed) and record.step <= step:
                ended.add(record.group)
    admitted = [record.group for record in read(fork, "admissions", Admitted)]
    assert admitted == sorted(set(admitted))
    assert not ended & set(admitted)
    if is_archived:
        assert ended | set(admitted) == set(range(max(admitted) + 1))
    assert {g.group for t in read(fork, "ledger", Take) for g in t.groups} <= set(admitted)
    assert {c.group for c in read(fork, "ledger", GroupClosed)} <= set(admitted)
