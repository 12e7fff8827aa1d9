"""The user's private folder: where it is, what it never creates, and whose files it believes."""

import os
from pathlib import Path

import pytest

from rollstream.private_state import read_private, state_folder, write_private


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "deep" / "state"
    monkeypatch.setenv("ROLLSTREAM_STATE", str(path))
    return path


def test_the_variable_wins_over_xdg_and_relative_values_count_as_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROLLSTREAM_STATE", "state")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "rollstream"
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local/state/rollstream"


def test_reading_creates_nothing(folder: Path):
    assert read_private("audits/a.json") is None
    assert not folder.exists()


def test_what_is_written_is_read_back_and_closed_to_others(folder: Path):
    assert write_private("audits/a.json", b"1")
    assert write_private("audits/a.json", b"2")
    assert read_private("audits/a.json") == b"2"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "audits/a.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder / "audits") == ["a.json"]


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROLLSTREAM_STATE", str(tmp_path / "file" / "state"))
    assert not write_private("a.json", b"1")
    assert read_private("a.json") is None


def test_links_and_files_that_others_can_write_are_not_believed(folder: Path, tmp_path: Path):
    write_private("a.json", b"1")
    (folder / "a.json").chmod(0o666)
    (tmp_path / "elsewhere").write_bytes(b"2")
    (folder / "link.json").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "pipe.json")
    assert [read_private(name) for name in ("a.json", "link.json", "pipe.json")] == [None] * 3
