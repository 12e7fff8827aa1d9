"""A full disk ends no run: what the supervisor cannot write is lost, with a warning."""

import errno
import os
import sys
from pathlib import Path

import pytest

from rollstream.run.supervisor.process import ProcessSpec
from rollstream.run.supervisor.supervisor import RunLock
from tests.supervisor.test_supervision import Run


def spec(name: str, code: str) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", code], ends="run")


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nonces_that_cannot_be_written_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = RunLock(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        run = Run(tmp_path, spec("trainer", "print('trained')"), lock=lock)
        assert run.outcome().kind == "complete"
    lock.close()
    assert run.lines("trainer") == ["trained"]
    assert not [*tmp_path.glob("*partial")]
    (line,) = [one.getMessage() for one in caplog.records]
    assert "nonces.json is not written: No space left on device" in line
    assert "free space" in line


def test_nonces_are_written_through_no_link(tmp_path: Path) -> None:
    """The folder of a received run may have one under any name that can be guessed."""
    other, run = tmp_path / "other", tmp_path / "run"
    other.write_text("mine")
    run.mkdir()
    for name in ("nonces.json", "nonces.partial", ".nonces.json.partial"):
        (run / name).symlink_to(other)
    lock = RunLock(run)
    lock.keep_nonces({"trainer": "1"})
    assert lock.nonces() == {"trainer": "1"}
    lock.close()
    assert other.read_text() == "mine"


def test_events_and_logs_that_cannot_be_written_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "logs", spec("trainer", "pass"))
    monkeypatch.setattr(run.supervisor, "_record", full)
    monkeypatch.setattr(Path, "mkdir", full)
    assert run.outcome().kind == "complete"
    text = caplog.text
    assert "the event 'start' is lost" in text
    assert "the process runs without a log" in text


def test_a_lock_is_taken_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", full)
    lock = RunLock(tmp_path)
    assert lock.nonces() == {}
    lock.close()
