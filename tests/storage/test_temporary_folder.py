"""Temporary folders of dead processes are removed by the next process, those of living ones not."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollstream.temporary_folder import FRESH_S, TemporaryFolder

HOLDER = """
import sys
from rollstream.temporary_folder import TemporaryFolder
print(TemporaryFolder("log").path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def make_older(folder: Path) -> None:
    at_s = folder.stat().st_mtime - 2 * FRESH_S
    os.utime(folder, (at_s, at_s))


def test_the_folder_of_a_killed_process_is_removed_that_of_a_living_one_stays(temporary: Path):
    user = temporary / "rollstream-log-of-the-user"
    user.mkdir()
    make_older(user)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        make_older(held)
        TemporaryFolder("log").close()
        assert held.is_dir()
        process.send_signal(signal.SIGKILL)
    with TemporaryFolder("log") as path:
        assert not held.exists()
        assert {entry.name for entry in temporary.iterdir()} == {path.name, user.name}
    assert [entry.name for entry in temporary.iterdir()] == [user.name]
