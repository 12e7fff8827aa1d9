"""A removal deletes nothing that is not the run's: no folder or store without `run.json`, no file
of the user beside the run's, nothing behind a link that leaves the run.
"""

import io
import json
import shutil
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.keep import removal
from rollstream.keep.run_place import RunPlace, find_run_place, read_removal
from rollstream.look.query.own_runs import remember_urls
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.storage.identity import read_identity, read_or_create_identity
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.checkpoints import delete_checkpoints, stored_checkpoints
from rollstream.storage.weights.retention import (
    RetentionPlan,
    delete_versions,
    listed_versions,
)
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Configured
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter
from tests.own.test_own_objects import FOREIGN
from tests.support.kept_run import made


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made(tmp_path_factory.mktemp("finished"), archive=True)
    (folder / "trainer.jsonl").unlink()  # written by the test's own trainer
    read_or_create_identity(open_store(f"file:{folder}/store"), "tiny")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def fill(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return contents(folder)


PROJECT = (
    "model/config.json", "model/model.safetensors", "weights/latest.json", "logs/train.log",
    "archive/topic=ledger/run=tiny/date=2026-01-01/ledger-00000-00000000000000000000.parquet",
    "metrics/eval.jsonl", "weights/v00000001-t0001/manifest.json", "report.html",
    "checkpoints/s00000001-t0001/state.json", "roles/trainer.json", "prompts.db", "weights.db",
)  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"run": "tiny"}, {"run": "tiny", "store": "file:."}])
def test_a_folder_without_run_json_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    before = fill(tmp_path, PROJECT)
    for named in (str(tmp_path), f"file:{tmp_path}", f"sqlite:{tmp_path}"):
        assert main(["rm", named, "--yes"]) == 2, named
        assert "so nothing" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_users_database_with_the_name_of_a_topic_stays(run: Path) -> None:
    (run / "bus" / "prompts.db").unlink()
    before = fill(run / "bus", ("prompts.db",))["prompts.db"]
    assert main(["rm", f"sqlite:{run}/bus", "--yes"]) == 0
    assert contents(run / "bus") == {"prompts.db": before}


def test_files_of_the_user_beside_the_runs_stay_and_are_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(run / "store", tuple(key for key in FOREIGN if not key.startswith("exp/")))
    fill(run, ("logs/notes.txt", "model/notes.md", "data/rows.jsonl"))
    before = {path: text for path, text in contents(run).items() if text.startswith(b"mine")}
    assert main(["rm", str(run), "--yes"]) == 0
    assert contents(run) == before
    shown = capsys.readouterr().out
    assert f"{len(FOREIGN) - 2} objects" in shown
    assert "weights/v00000003-t0001/notes.txt" in shown
    assert "3 files that no run writes" in shown


def test_a_run_moved_to_another_disk_is_removed_there_and_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("store/checkpoints", "store/archive/topic=ledger", "bus"):
        other = tmp_path / "disk" / name.replace("/", "-")
        shutil.move(run / name, other)
        (run / name).symlink_to(other)
        assert main(["trust", str(run), "--folder", str(other)]) == 0
    capsys.readouterr()
    fill(tmp_path / "disk", ("store-checkpoints/notes.txt",))
    assert main(["rm", str(run), "--yes"]) == 0
    assert contents(tmp_path / "disk").keys() == {"store-checkpoints/notes.txt"}
    assert not run.exists()
    shown = capsys.readouterr().out
    assert f"leads to {tmp_path}/disk/store-checkpoints: the run's objects there go" in shown
    assert "store-checkpoints" in shown


def test_a_store_that_is_a_link_goes_with_what_it_leads_to(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "store", tmp_path / "moved")
    (run / "store").symlink_to(tmp_path / "moved")
    assert main(["rm", str(run), "--yes"]) == 2, "nobody named where the link leads"
    assert (tmp_path / "moved" / "run.json").exists()
    assert main(["trust", str(run), "--folder", str(tmp_path / "moved")]) == 0
    assert main(["rm", str(run), "--yes"]) == 0
    assert not run.exists()
    assert not (tmp_path / "moved").exists()


@pytest.mark.parametrize(
    ("link", "names"),
    [
        ("store/pins", ("app.json",)),
        ("store/weights/v00000009-t0009", ("config.json", "manifest.json", "model.safetensors")),
        ("store/agents", ("secret",)),
        ("logs", ("system.log",)),
        ("metrics", ("rows.jsonl",)),
        ("model", ("config.json", "model.safetensors")),
    ],
)
def test_nothing_behind_a_link_of_somebody_else_is_deleted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str, names: tuple[str, ...]
) -> None:
    before = fill(tmp_path / "mine", names)
    if (run / link).exists():
        shutil.rmtree(run / link)
    (run / link).parent.mkdir(parents=True, exist_ok=True)
    (run / link).symlink_to(tmp_path / "mine")
    assert main(["rm", str(run), "--yes"]) == 0
    assert contents(tmp_path / "mine") == before
    assert not run.exists()
    assert f"what it leads to stays: {tmp_path}/mine" in capsys.readouterr().out


def test_a_link_into_another_runs_store_is_not_followed(
    run: Path, finished: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(finished, tmp_path / "other")
    identity = json.loads((other / "store/run.json").read_text())
    (other / "store/run.json").write_text(json.dumps(identity | {"id": "another"}))
    before = contents(other)
    for name in ("checkpoints", "weights"):
        shutil.rmtree(run / "store" / name)
        (run / "store" / name).symlink_to(other / "store" / name)
    assert main(["rm", str(run), "--yes"]) == 0
    assert contents(other) == before
    assert not run.exists()


def test_links_that_lead_in_a_circle_end(run: Path) -> None:
    (run / "store/archive/again").symlink_to(run / "store/archive")
    (run / "store/archive/up").symlink_to(run / "store")
    assert main(["rm", str(run), "--yes"]) == 0
    assert not run.exists()


def place_of(folder: Path) -> RunPlace:
    return find_run_place(str(folder))


def test_a_config_that_names_another_runs_store_or_log_deletes_nothing(
    run: Path, finished: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(finished, tmp_path / "other")
    settings = json.loads((run / "config.json").read_text())
    store = read_identity(open_store(f"file:{other}/store"))
    assert store is not None
    (other / "store/run.json").write_text(json.dumps({"id": "1" * 16, "run": "another"}))
    before = contents(other)
    (run / "config.json").write_text(json.dumps(settings | {"store": f"file:{other}/store"}))
    with pytest.raises(ConfigurationError, match="holds the run 'another'"):
        removal.plan_removal(place_of(run), ())
    bus = open_bus(f"sqlite:{tmp_path}/log")
    bus.create(catalogue(1))
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    writer.append([("run", Configured("hash", "revision", 0, run_id="2" * 16))])
    bus.close()
    (run / "config.json").write_text(json.dumps(settings | {"bus": f"sqlite:{tmp_path}/log"}))
    with pytest.raises(ConfigurationError, match="is of another run"):
        removal.plan_removal(place_of(run), ())
    assert contents(other) == before


def test_a_removal_that_was_interrupted_after_run_json_is_completed(run: Path) -> None:
    plan = removal.plan_removal(place_of(run), ())
    parts = removal.remove(plan, ())
    assert [next(parts), next(parts)] == ["log", "store"]
    assert not (run / "store").exists()
    mark = read_removal(run)
    assert mark is not None
    assert mark["id"] == plan.proof.id
    foreign = fill(run / "store", ("weights/v00000001-t0001/config.json",))
    assert main(["rm", str(run), "--yes"]) == 0
    assert contents(run) == {f"store/{name}": text for name, text in foreign.items()}


def test_another_run_in_the_store_of_an_interrupted_removal_stays(run: Path) -> None:
    parts = removal.remove(removal.plan_removal(place_of(run), ()), ())
    assert [next(parts), next(parts)] == ["log", "store"]
    read_or_create_identity(open_store(f"file:{run}/store"), "tiny")
    before = contents(run)
    with pytest.raises(ConfigurationError, match="holds another run"):
        removal.plan_removal(place_of(run), ())
    assert contents(run) == before


def test_retention_leaves_files_of_others(run: Path) -> None:
    store = open_store(f"file:{run}/store")
    versions, checkpoints = listed_versions(store), stored_checkpoints(store)
    folders = [f"weights/{versions[0]}", checkpoints[0].id.folder]
    mine = [f"{folder}/notes.txt" for folder in folders] + ["weights/v00000900-t0001/notes.txt"]
    for key in mine:
        store.put(key, b"mine")
    delete_versions(store, RetentionPlan((versions[0],), ()), term=9)
    delete_checkpoints(store, [checkpoints[0].id])
    left = [entry.key for folder in folders for entry in store.list(f"{folder}/")]
    assert left == mine[:2]
    assert listed_versions(store) == versions[1:]
    assert stored_checkpoints(store) == checkpoints[1:]


def test_a_licence_that_a_manifest_names_goes_with_its_version(run: Path) -> None:
    c = load(run / "config.json")
    store = open_store(f"file:{run}/store")
    version = listed_versions(store)[0]
    key = f"weights/{version}/manifest.json"
    manifest = json.loads(store.get(key))
    entry = {"name": "LICENSE.txt", "bytes": 1, "hash": "0" * 32}
    manifest["model_files"] = [*manifest["model_files"], entry]
    store.put(key, json.dumps(manifest).encode())
    store.put(f"weights/{version}/LICENSE.txt", b"x")
    assert main(["rm", str(run), "--yes"]) == 0
    assert not run.exists(), c.run


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_a_store_that_only_a_folder_names_is_removed_after_an_answer_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """With `--yes` nobody reads which folder the config.json of somebody else names."""
    shutil.move(run / "store", tmp_path / "elsewhere")
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"store": f"file:{tmp_path}/elsewhere"}))
    before = contents(tmp_path / "elsewhere")
    assert main(["rm", str(run), "--yes"]) == 2
    assert contents(tmp_path / "elsewhere") == before
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    assert main(["rm", str(run)]) == (0 if answer == "yes" else 130)
    assert (tmp_path / "elsewhere").exists() == (answer == "no")


def test_a_store_that_the_user_named_is_removed_without_an_answer(
    run: Path, tmp_path: Path
) -> None:
    shutil.move(run / "store", tmp_path / "elsewhere")
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"store": f"file:{tmp_path}/elsewhere"}))
    remember_urls([f"file:{tmp_path}/elsewhere"])
    assert main(["rm", str(run), "--yes"]) == 0
    assert not (tmp_path / "elsewhere").exists()
