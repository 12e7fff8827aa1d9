"""The folder into which a version is exported: it appears whole, and one that exists stays."""

import os

import pytest

from rollstream.errors import ConfigurationError, CorruptObject
from rollstream.storage.weights.fetch import export_version
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from tests.storage.weights.version_samples import History

NAMES = {"config.json", "model.safetensors.index.json"}


@pytest.fixture
def history():
    return History()


@pytest.mark.parametrize("kind", ["new", "empty", "link"])
def test_the_folder_holds_the_whole_model(history, tmp_path, kind):
    folder, place = tmp_path / "out", tmp_path / "place"
    if kind != "new":
        place.mkdir()
        folder.symlink_to(place) if kind == "link" else place.rename(folder)
    before = os.stat(folder).st_ino if folder.exists() else None
    done = export_version(history.store, Version(0, 1), folder, 1 << 20)
    assert {path.name for path in folder.iterdir()} == set(done.files) > NAMES
    assert before in (None, os.stat(folder).st_ino)  # a mount cannot be replaced


def test_a_failure_leaves_an_empty_folder_empty(history, tmp_path):
    key = next(one.key for one in history.store.list() if one.key.endswith(".safetensors"))
    history.store.put(key, bytes(len(history.store.get(key))))
    with pytest.raises(CorruptObject):
        export_version(history.store, Version(0, 1), tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_meanwhile_is_not_replaced(history, tmp_path, monkeypatch):
    replaced = os.replace

    def replace(source, target):
        (tmp_path / "config.json").write_text("mine")
        replaced(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ConfigurationError, match="not empty"):
        export_version(history.store, Version(0, 1), tmp_path, 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named_before_the_weights_are_read(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"exists: '{tmp_path}/file'$"):
        export_version(MemoryStore(), Version(0, 1), tmp_path / "file" / "out", 1 << 20)
