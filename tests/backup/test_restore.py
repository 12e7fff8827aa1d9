"""A restored run has every offset, or nothing is written."""

import dataclasses
import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError, CorruptObject, NewerRelease
from rollstream.keep.backup import BACKUP_KEY, open_backup
from rollstream.keep.restore import read_backup
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.config.recorded_configuration import check_configuration, record_configuration
from rollstream.run.config.run_folder import require_new
from rollstream.storage.identity import DELETED, read_identity, read_or_create_identity
from rollstream.storage.leases import LeaseCandidate, acquire_lease
from rollstream.storage.stores.base import Data
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.json_objects import seal
from rollstream.storage.weights.named_streams import WeightStream
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from testbed.versions import publish_small
from tests.backup.copies import (
    Interrupted,
    backed_up,
    history,
    messages,
    objects,
    restored,
    store_of,
)


def test_a_restored_run_has_every_record_at_its_offset_and_every_object(
    run: Path, tmp_path: Path
) -> None:
    backup = backed_up(run, to := MemoryStore())
    restored(to, tmp_path / "again")
    assert any(any(one.begins) for one in backup.topics), "nothing was truncated"
    assert history(tmp_path / "again") == history(run)
    changed = ("roles/", "probes/")
    assert objects(tmp_path / "again", changed) == objects(run, changed)
    lease = acquire_lease(store_of(run), LeaseCandidate("trainer", "t", "n", 0.0), 0.0)
    again = acquire_lease(store_of(tmp_path / "again"), LeaseCandidate("trainer", "t", "n"), 0.0)
    assert again.term == lease.term
    assert main(["audit", str(tmp_path / "again")]) == main(["audit", str(run)])


def test_named_weight_streams_are_restored_with_their_topics(
    run: Path, bus: Bus, tmp_path: Path
) -> None:
    streams = [WeightStream("draft"), WeightStream("critic")]
    for stream in streams:
        publish_small(bus, store_of(run), "tiny", stream, range(3))
    backup = backed_up(run, to := MemoryStore())
    assert {s.topic.name for s in streams} < {cut.topic.name for cut in backup.topics}
    restored(to, tmp_path / "again")
    changed = ("roles/", "probes/")
    assert objects(tmp_path / "again", changed) == objects(run, changed)
    with closing(open_bus(f"sqlite:{tmp_path}/again/bus")) as again:
        for stream in streams:
            topic = stream.topic.name
            assert again.settings(topic) == stream.topic
            assert values(again, topic) == values(bus, topic)
            writer = publish_small(again, store_of(tmp_path / "again"), "tiny", stream, [3])
            assert writer.highest == Version(3, 2)


def values(bus: Bus, topic: str) -> list[tuple[bytes, bytes | None]]:
    return [(message.key, message.value) for message in messages(bus, topic)[0]]


@pytest.mark.parametrize("prefix", ["log/ledger", "store/weights/v", "folder/config.json"])
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_damaged_backup_is_refused_by_name_and_nothing_is_written(
    run: Path, tmp_path: Path, prefix: str, damage: str
) -> None:
    backup = backed_up(run, to := MemoryStore())
    key = next(one.key for one in backup.objects if one.key.startswith(prefix))
    data = to.get(key)
    if damage == "gone":
        to.delete(key)
    else:
        to.put(key, data[:-1] + (bytes([data[-1] ^ 1]) if damage == "changed" else b""))
    with pytest.raises(CorruptObject, match=f"damaged: object {key}"):
        restored(to, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_damaged_description_is_refused(run: Path, tmp_path: Path) -> None:
    backed_up(run, to := MemoryStore())
    to.put(BACKUP_KEY, to.get(BACKUP_KEY).replace(b'"step":6', b'"step":7'))
    with pytest.raises(CorruptObject, match=BACKUP_KEY):
        restored(to, tmp_path / "again")


def test_a_backup_of_a_newer_release_is_refused(run: Path, tmp_path: Path) -> None:
    backup = backed_up(run, to := MemoryStore())
    to.put(BACKUP_KEY, seal(dataclasses.replace(backup, needs=("later/7",))))
    with pytest.raises(NewerRelease, match="later/7"):
        restored(to, tmp_path / "again")
    to.put(BACKUP_KEY, seal(dataclasses.replace(backup, format=99)))
    with pytest.raises(NewerRelease, match="format 99"):
        restored(to, tmp_path / "again")


@pytest.mark.parametrize("occupied", ["folder", "log", "store"])
def test_an_occupied_target_is_refused(run: Path, tmp_path: Path, occupied: str) -> None:
    c = json.loads((run / "config.json").read_text())
    for name, url in (("bus", f"sqlite:{run}/bus"), ("store", f"file:{run}/store")):
        c[name] = url
    (run / "config.json").write_text(json.dumps(c))
    backup = backed_up(run, to := MemoryStore())
    to.delete(next(one.key for one in backup.objects if "weights" in one.key))  # not read before
    if occupied == "store":
        shutil.rmtree(run / "bus")
    before = objects(run)
    folder = run if occupied == "folder" else tmp_path / "again"
    what = {"folder": "is not empty", "log": "has topics already", "store": "objects already"}
    with pytest.raises(ConfigurationError, match=what[occupied]):
        restored(to, folder)
    assert objects(run) == before


def test_what_is_in_the_way_is_called_unfinished_only_if_it_may_be(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("seed = 1")
    for folder, said in ((own, "is a file; elsewhere"), (tmp_path, "is not empty; elsewhere")):
        with pytest.raises(ConfigurationError, match=said):
            require_new(folder, "elsewhere", "fork")
    (tmp_path / "half" / "bus").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="perhaps a fork that was not finished"):
        require_new(tmp_path / "half", "elsewhere", "fork")
    require_new(tmp_path / "half" / "bus", "elsewhere", "fork")
    require_new(tmp_path / "missing", "elsewhere", "fork")


def test_a_restored_run_keeps_its_settings(run: Path, tmp_path: Path) -> None:
    backed_up(run, to := MemoryStore())
    with pytest.raises(ConfigurationError, match="only hosts, endpoints and options"):
        restored(to, tmp_path / "again", "bus=sqlite:elsewhere")
    with pytest.raises(ConfigurationError, match=r"trainer\.lr"):
        restored(to, tmp_path / "again", "trainer.lr=1.0")
    restored(to, tmp_path / "again", "metrics.port=0")
    assert load(tmp_path / "again" / "config.json").run == "tiny"


def test_no_role_acts_on_a_restore_that_was_interrupted_and_rm_removes_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backed_up(run, to := MemoryStore())
    urls = f"file:{tmp_path}/again/store", f"sqlite:{tmp_path}/again/bus"
    put = FileStore.put

    def fail(store: FileStore, key: str, data: Data) -> str:
        if key.startswith("weights/"):
            raise Interrupted
        return put(store, key, data)

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "put", fail)
        with pytest.raises(Interrupted):
            restored(to, tmp_path / "again")
    store = open_store(urls[0])
    with pytest.raises(ConfigurationError, match="was interrupted"):
        read_or_create_identity(store, "tiny")
    with pytest.raises(ConfigurationError, match="is not empty"):
        restored(to, tmp_path / "again")
    assert main(["rm", urls[0], "--bus", urls[1], "--yes"]) == 0
    assert not (tmp_path / "again" / "bus").exists()
    restored(to, tmp_path / "again")
    identity = read_identity(store_of(tmp_path / "again"))
    assert identity == read_identity(store_of(run))
    assert identity is not None
    assert DELETED not in identity.needs


def test_a_path_without_a_backup_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such backup"):
        open_backup(str(tmp_path / "nowhere"), must_exist=True)
    with pytest.raises(ConfigurationError, match="holds no backup"):
        read_backup(open_backup(str(tmp_path), must_exist=True), str(tmp_path))


def test_a_run_is_backed_up_by_its_urls_without_its_folder(run: Path, tmp_path: Path) -> None:
    """Its settings are those that the trainer recorded in the store."""
    record_configuration(store_of(run), load(run / "config.json"))
    urls = f"file:{run}/store", f"sqlite:{run}/bus"
    assert main(["backup", urls[0], str(tmp_path / "backup"), "--bus", urls[1]]) == 0
    assert main(["backup", urls[0], str(tmp_path / "other")]) == 2
    assert main(["restore", str(tmp_path / "backup"), str(tmp_path / "again")]) == 0
    assert history(tmp_path / "again") == history(run)
    found = load(tmp_path / "again" / "config.json")
    check_configuration(store_of(tmp_path / "again"), found)
