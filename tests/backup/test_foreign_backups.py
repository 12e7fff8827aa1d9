"""A backup that comes from somebody else: a restore writes only below the folder that the user
named, and imports nothing; and a backup has the run's secret, closed to others.
"""

import dataclasses
import json
import stat
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError, CorruptObject, OutsideRun
from rollstream.keep.backup import BACKUP_KEY, BEGUN_KEY, Backup, BackupObject
from rollstream.keep.restore import plan_restore, read_backup
from rollstream.producers.agents.keys import SECRET_KEY, SessionIdentity, run_session_keys
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import seal
from testbed.memory import MemoryStore
from tests.backup.copies import Interrupted, backed_up, restored, store_of


def changed(to: MemoryStore, key: str, data: bytes) -> Backup:
    """The backup with one more object, or another content of it, named by its manifest."""
    backup = read_backup(to, "backup")
    entry = BackupObject(key, len(data), sha256(data).hexdigest())
    others = tuple(one for one in backup.objects if one.key != key)
    after = dataclasses.replace(backup, objects=(*others, entry))
    to.put(BACKUP_KEY, seal(after))
    return after


def test_the_secret_of_the_agents_is_restored_and_closed_to_others(
    run: Path, tmp_path: Path
) -> None:
    """A key that the run gave to a program is accepted by the restored run."""
    session = SessionIdentity("t-0", 1, "rollout-0", 1)
    key = run_session_keys(store_of(run)).issue(session)
    backed_up(run, open_store(f"file:{tmp_path}/backup"))
    restored(open_store(f"file:{tmp_path}/backup"), tmp_path / "again")
    assert run_session_keys(store_of(tmp_path / "again")).identity(key) == session
    for folder in (run / "store", tmp_path / "backup" / "store", tmp_path / "again" / "store"):
        assert stat.S_IMODE((folder / SECRET_KEY).stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / SECRET_KEY).parent.stat().st_mode) == 0o700


OUTSIDE = ("folder/../../taken", "store/../../../taken", "/taken", "folder//taken", "log/../taken")
NOT_OF_RUNS = (
    "folder/store/run.json", "folder/bus/ledger.db", "folder/nonces.json", "folder/.bashrc",
    "store/notes.txt", "store/weights/notes.txt", "other/x",
)  # fmt: skip


def test_a_key_that_leads_out_of_the_target_is_refused(run: Path, tmp_path: Path) -> None:
    backed_up(run, to := MemoryStore())
    manifest = to.get(BACKUP_KEY)
    for key in OUTSIDE:
        to.put(BACKUP_KEY, manifest)
        changed(to, key, b"taken")
        with pytest.raises(CorruptObject, match="which no backup has"):
            restored(to, tmp_path / "again")
        assert not (tmp_path / "again").exists()
        assert not list(tmp_path.rglob("taken"))


def test_objects_that_no_run_writes_are_left_out(run: Path, tmp_path: Path) -> None:
    backed_up(run, to := MemoryStore())
    for key in NOT_OF_RUNS:
        to.put(key, b"foreign")
        changed(to, key, b"foreign")
    restored(to, tmp_path / "again")
    written = [path for path in (tmp_path / "again").rglob("*") if path.is_file()]
    assert not [path for path in written if path.read_bytes() == b"foreign"]


@pytest.mark.parametrize("setting", ["bus", "store"])
def test_a_place_outside_the_folder_is_named_by_the_user_or_refused(
    run: Path, tmp_path: Path, setting: str
) -> None:
    backed_up(run, to := MemoryStore())
    url = {"bus": f"sqlite:{tmp_path}/mine", "store": f"file:{tmp_path}/mine"}[setting]
    settings = json.loads(to.get("folder/config.json")) | {setting: url}
    to.put("folder/config.json", data := json.dumps(settings).encode())
    changed(to, "folder/config.json", data)
    with pytest.raises(ConfigurationError, match=f"name it yourself: --set {setting}="):
        restored(to, tmp_path / "again")
    assert not (tmp_path / "mine").exists()
    restored(to, tmp_path / "again", f"{setting}={url}")
    assert (tmp_path / "mine").is_dir()


def test_no_module_that_a_backup_names_is_imported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    backed_up(run, to := MemoryStore())
    settings = json.loads(to.get("folder/config.json"))
    settings.setdefault("trainer", {})["advantage"] = "hostile_module:function"
    settings["task"] = {"name": "hostile_module:Task"}
    to.put("folder/config.json", data := json.dumps(settings).encode())
    changed(to, "folder/config.json", data)
    restored(to, tmp_path / "again")
    assert "hostile_module" not in sys.modules


@pytest.mark.parametrize(
    ("begin", "end", "partitions"),
    [
        (1 << 40, (1 << 40) + 9, None),
        (9, 3, None),
        (-1, 3, None),
        (0, 1 << 63, None),
        (0, 3, 0),
        (0, 3, 1_000_000_000),
    ],
)
def test_offsets_that_no_run_has_are_not_filled(
    run: Path, tmp_path: Path, begin: int, end: int, partitions: int | None
) -> None:
    backup = backed_up(run, to := MemoryStore())
    (cut,) = (one for one in backup.topics if one.topic.name == "trajectories")
    count = cut.topic.partitions
    topic = dataclasses.replace(cut.topic, partitions=count if partitions is None else partitions)
    false = dataclasses.replace(cut, topic=topic, begins=(begin,) * count, ends=(end,) * count)
    topics = tuple(false if one is cut else one for one in backup.topics)
    to.put(BACKUP_KEY, seal(dataclasses.replace(backup, topics=topics)))
    with pytest.raises(CorruptObject, match="topic trajectories"):
        restored(to, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_size_that_is_not_true_is_refused(run: Path, tmp_path: Path) -> None:
    backup = backed_up(run, to := MemoryStore())
    false = tuple(
        dataclasses.replace(one, bytes=one.bytes + 1) if one.key.startswith("store/") else one
        for one in backup.objects
    )
    to.put(BACKUP_KEY, seal(dataclasses.replace(backup, objects=false)))
    with pytest.raises(CorruptObject, match="is damaged"):
        restored(to, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_file_of_the_user_in_an_interrupted_backup_stays(run: Path) -> None:
    def stop(part: str) -> None:
        if part.startswith("store/"):
            raise Interrupted

    to = MemoryStore()
    with pytest.raises(Interrupted):
        backed_up(run, to, progress=stop)
    assert [entry.key for entry in to.list(BEGUN_KEY)]
    to.put("notes/readme.txt", b"mine")
    to.put("store/weights/v00000900-t0001/config.json", b"of an earlier attempt")
    backed_up(run, to)
    assert to.get("notes/readme.txt") == b"mine"
    assert not list(to.list("store/weights/v00000900"))


def test_what_was_left_out_is_in_the_plan(run: Path, tmp_path: Path) -> None:
    backed_up(run, to := MemoryStore())
    to.put("store/weights/notes.txt", b"mine")
    changed(to, "store/weights/notes.txt", b"mine")
    plan = plan_restore(to, "backup", tmp_path / "again", (), tmp_path)
    assert plan.left_out == ("store/weights/notes.txt",)


def test_a_host_that_only_the_backup_names_is_refused_before_it_is_asked(
    run: Path, tmp_path: Path
) -> None:
    backed_up(run, to := MemoryStore())
    settings = json.loads(to.get("folder/config.json")) | {"bus": "kafka://127.0.0.1:1/one"}
    to.put("folder/config.json", data := json.dumps(settings).encode())
    changed(to, "folder/config.json", data)
    with pytest.raises(ConfigurationError, match="name it yourself: --set bus=kafka"):
        plan_restore(to, "backup", tmp_path / "again", (), tmp_path)


def test_a_model_folder_behind_a_link_out_of_the_run_is_refused_by_name(
    run: Path, tmp_path: Path
) -> None:
    """It is neither copied, as it may be a folder of the user, nor left out in silence."""
    (run / "model").rename(tmp_path / "mine")
    (run / "model").symlink_to(tmp_path / "mine")
    with pytest.raises(OutsideRun, match=f"leads to {tmp_path}/mine"):
        backed_up(run, MemoryStore())
