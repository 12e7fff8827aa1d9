"""What `rollstream check` says of this machine's disks, ports and file systems."""

import fcntl
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollstream.run.checks import machine
from rollstream.run.checks.findings import Finding
from rollstream.run.checks.machine import machine_findings
from rollstream.run.checks.model import ModelFacts
from rollstream.run.config.config import load
from rollstream.run.config.run_model import store_starting_model
from rollstream.run.config.settings import Configuration
from rollstream.storage.stores.connect import open_store
from rollstream.streams.sqlite import bus
from testbed.run_process import random_model

GB = 10**9
LARGE = ModelFacts(Path("model"), {}, 7_600_000_000, 15 * GB, ("bfloat16",), ())


def settings(tmp_path: Path, *more: str) -> Configuration:
    file = tmp_path / "small.toml"
    file.write_text('run = "small"\n')
    return load(file, ["metrics.enabled=false", *more], {})


def disk_lines(c: Configuration, folder: Path) -> list[Finding]:
    return [one for one in machine_findings(c, folder, LARGE) if one.subject == "disk"]


@pytest.fixture
def ten_gigabytes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every disk has 10 GB free; returns the places that are asked about."""
    places: list[Path] = []

    def usage(place: Path) -> SimpleNamespace:
        places.append(place)
        return SimpleNamespace(free=10 * GB)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return places


@pytest.mark.usefixtures("ten_gigabytes")
def test_a_resume_needs_no_room_for_the_model_that_its_store_has(tmp_path):
    run, model = tmp_path / "run", random_model(tmp_path / "model")
    c = settings(tmp_path, f"model.path={model}", f"store=file:{run / 'store'}")
    assert [line.verdict for line in disk_lines(c, run)] == ["refused"]
    store_starting_model(open_store(c.store), c, run)
    assert [line.verdict for line in disk_lines(c, run)] == ["warning"]


def test_the_disk_of_a_store_elsewhere_is_asked(tmp_path, ten_gigabytes, monkeypatch):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second disk")
    c = settings(tmp_path, f"store=file:{other / 'rollstream-no-store'}")
    own, store = disk_lines(c, tmp_path / "run")
    assert (own.verdict, store.verdict) == ("ok", "refused")
    assert store.text.endswith("needs 15.0 GB at its start; set another store")
    assert ten_gigabytes == [tmp_path.resolve(), other]


def test_a_log_on_a_network_file_system_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bus, "read_mounts", lambda: f"server:/home {tmp_path} nfs4 rw 0 0\n")
    lines = [one.text for one in machine_findings(settings(tmp_path), tmp_path / "run", None)]
    assert any("network file system (nfs4)" in line and "--run DIR" in line for line in lines)


def test_the_ports_of_the_run_itself_are_no_fault_of_the_ports(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine, "_ports", lambda c: [("127.0.0.1", port, "metrics.port")])
        refused = lambda: [  # noqa: E731
            (one.subject, one.text)
            for one in machine_findings(settings(tmp_path), tmp_path, None)
            if one.verdict == "refused"
        ]
        assert [subject for subject, _ in refused()] == ["ports"]
        lock = os.open(tmp_path / "run.lock", os.O_RDWR | os.O_CREAT)
        os.write(lock, b"4711\n")
        fcntl.flock(lock, fcntl.LOCK_EX)
        [(subject, text)] = refused()
        os.close(lock)
    assert subject == "run"
    assert "running already (supervisor: process 4711)" in text
