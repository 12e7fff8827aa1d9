"""Where no Docker daemon can be started, the tests of the stack fail with what to do; they are not
skipped.
"""

import os
import shutil
from pathlib import Path

import pytest

from testbed.stack import daemon
from testbed.stack.daemon import NoDaemon, StackDaemon


def test_a_user_without_root_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoDaemon, match="needs root: run as root"):
        StackDaemon(tmp_path)


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(NoDaemon, match=r"as root run `apt-get install docker\.io` \(Debian\)"):
        daemon.require([("dockerd", "docker.io"), ("docker", "docker.io")])


def test_a_daemon_that_does_not_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    programs = {"docker": "exit 1", "unshare": "echo no namespaces here >&2; exit 1"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = StackDaemon(tmp_path / "stack")
    with pytest.raises(NoDaemon, match=r"did not start on this machine:\nno namespaces here"):
        started.start(is_isolated=True)
    started.close()
