"""`rollstream ls`: the runs of a folder, those that cannot be read with their problem."""

import json
import shutil
from pathlib import Path

import pytest

from rollstream.run.cli.main import main
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.identity import mark_deleted, read_or_create_identity
from rollstream.storage.stores.connect import open_store
from testbed.repository import EXAMPLES


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run, a prepared one, one with a foreign setting, and two folders without a run:
    notes and a model.
    """
    runs = tmp_path / "runs"
    shutil.copytree(EXAMPLES / "archive", runs / "done")
    for name in ("prepared", "foreign"):
        folder = RunFolder(runs / name)
        write_configuration(folder, Configuration(run=name, folder=str(folder.path)))
    text = (runs / "foreign" / "config.json").read_text()
    (runs / "foreign" / "config.json").write_text(
        text.replace("sqlite:bus", "kafka://127.0.0.1:9/x")
    )
    (runs / "notes").mkdir()
    (runs / "model").mkdir()
    (runs / "model" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 8}')
    return runs


def test_each_run_has_a_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(runs), "--json"]) == 0
    lines = {one["run"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(lines) == {"done", "prepared", "foreign"}
    assert (lines["prepared"]["state"], lines["prepared"]["newest_s"]) == ("new", None)
    assert lines["foreign"]["state"] == "unreadable"
    assert "no broker of kafka://127.0.0.1:9/x can be reached" in lines["foreign"]["problem"]
    size = sum(path.stat().st_size for path in (runs / "done").rglob("*") if path.is_file())
    assert lines["done"]["bytes"] == size
    assert not (runs / "prepared" / "bus").exists()
    assert not (runs / "prepared" / "store").exists()


def test_a_deleted_run_of_which_parts_are_kept_is_neither_new_nor_begun_again(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(f"file:{runs / 'prepared' / 'store'}")
    read_or_create_identity(store, "prepared")
    mark_deleted(store, "prepared")
    assert main(["ls", str(runs), "--json"]) == 0
    lines = {one["run"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (lines["prepared"]["state"], lines["prepared"]["step"]) == ("deleted", None)
    assert main(["top", str(runs / "prepared"), "--once"]) == 2
    assert "was deleted; what `rollstream rm --keep` left" in capsys.readouterr().err
    assert main(["run", str(runs / "prepared")]) == 2
    assert "the run prepared was deleted" in capsys.readouterr().err
    assert not (runs / "prepared" / "bus").exists()


def test_the_table_is_followed_by_the_problems(runs: Path, capsys) -> None:
    assert main(["ls", str(runs)]) == 0
    out, error = capsys.readouterr()
    assert "run" in out.splitlines()[0]
    assert any(line.split()[:2] == ["prepared", "new"] for line in out.splitlines())
    assert "rollstream: foreign: no broker of" in error


def test_a_folder_without_runs_is_no_error(tmp_path: Path, capsys) -> None:
    assert main(["ls", str(tmp_path)]) == 0
    assert "holds no run" in capsys.readouterr().err
