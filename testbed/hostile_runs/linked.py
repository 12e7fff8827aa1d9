"""Cases of files that are not what they seem: links that leave the run, FIFOs, devices, folders in
place of files, and hard links. A stranger knows no path of the user's for sure; a relative link out
of the run, and links to places that most machines have, need no knowledge.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from testbed.hostile_runs.case import Case, Hosts, Mutation
from testbed.hostile_runs.scene import Scene

FOLDERS = (
    "bus", "store", "model", "metrics", "logs", "store/~writing", "store/~locks", "store/archive",
    "store/archive/topic=ledger", "store/weights", "store/weights/v00000006-t0001",
    "store/checkpoints", "store/model", "store/roles", "store/audit", "store/blobs",
    "store/configurations", "store/dispatch", "metrics/tensorboard", "metrics/endpoints",
)  # fmt: skip
"""Folders of the layout, some of which the healthy run does not have yet."""
DATABASES = ("bus/ledger.db", "bus/groups.db", "bus/ledger.db-wal", "bus/trajectories.db-shm")
FILES = (
    "config.json", "report.html", "token-scores.parquet", "replay.json", "simulation.json",
    "metrics/eval.jsonl", "metrics/trainer.jsonl", "metrics/forward-tensorboard.json",
    "metrics/forward-tensorboard.lock", "logs/dispatch.log", "store/run.json",
    "store/weights/latest.json", "store/weights/v00000007-t0001/manifest.json",
    "store/checkpoints/s00000006-t0001/state.json", "store/model/manifest.json",
    "store/audit/verdict", "store/forked_from.json", "model/tokenizer.json", "model/config.json",
    "token-scores.parquet.partial",
)  # fmt: skip
DANGLING = (
    "report.html", "token-scores.parquet", "metrics/tensorboard", "store/audit", "model", "store",
    "bus", "metrics/forward-tensorboard.json", "store/~locks", "store/~writing",
)  # fmt: skip
WAITING = (
    "config.json", "bus/ledger.db", "bus/extra.db", "store/run.json", "store/weights/latest.json",
    "store/model/manifest.json", "metrics/eval.jsonl", "model/tokenizer.json", "report.html",
    "token-scores.parquet", "replay.json", "metrics/forward-tensorboard.lock", "run.lock",
    "bus/groups.db", "bus/ledger.db-journal", "store/roles/trainer.json", "removing.json",
    "nonces.json",
)  # fmt: skip
ENDLESS = (
    "config.json", "bus/ledger.db", "store/run.json", "store/model/manifest.json",
    "metrics/eval.jsonl", "model/tokenizer.json",
)  # fmt: skip
HARD = ("report.html", "token-scores.parquet", "metrics/forward-tensorboard.json", "model/x.json")


def cases() -> Iterator[Case]:
    """Yields all cases of this file."""
    yield Case("link ~writing to the project, relative", _relative_writing)
    for name in FOLDERS:
        yield Case(f"link {name} to the project", _link(name, "project"))
    for name in ("bus", "store", "store/weights", "store/archive", "metrics"):
        yield Case(f"link {name} to the user's run", _link(name, f"own:{name}"))
    for name in DATABASES:
        yield Case(f"link {name} to a database", _link(name, "project/user.db"))
    for name in FILES:
        yield Case(f"link {name} to a key", _link(name, "home/.ssh/id_ed25519"))
    for name in DANGLING:
        yield Case(f"dangling link {name}", _link(name, "project/new"))
    yield Case("link a Parquet file to a key", _link_parquet)
    yield Case("link the folder itself", _link_received)
    yield Case("link loops", _loops)
    for name in WAITING:
        yield Case(f"FIFO {name}", _fifo(name))
    for name in ENDLESS:
        yield Case(f"device {name}", _link(name, "/dev/zero"))
    yield Case("FIFO in place of a Parquet file", _fifo_parquet)
    yield Case("socket in place of a database", _socket)
    yield Case("folders in place of files", _folders)
    for name in HARD:
        yield Case(f"hard link {name}", _hard(name))
    topic = _link("store/archive/topic=ledger", "project")
    yield Case("archive: link topic to the project", topic, "archive")
    yield Case("archive: link ~writing", _relative_writing, "archive")
    for name in ("~writing", "~locks", "log"):
        yield Case(f"backup: link {name}", _link(name, "project"), "backup")
    settings = _link("folder/config.json", "home/.ssh/id_ed25519")
    yield Case("backup: link config.json to a key", settings, "backup")
    yield Case("backup: FIFO backup.json", _fifo("backup.json"), "backup")


def replace(scene: Scene, name: str) -> Path:
    """Removes an entry of the received folder, and returns its path, whose parent exists."""
    path = scene.received / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def parquet(scene: Scene, topic: str = "ledger") -> Path:
    """Returns an archived file of the topic."""
    return sorted((scene.received / "store" / "archive" / f"topic={topic}").rglob("*.parquet"))[0]


def _link(name: str, target: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        if target.startswith("own:"):
            to = scene.own_run / target.removeprefix("own:")
        else:
            to = scene.root / "user" / target
        replace(scene, name).symlink_to(to)

    return mutate


def _relative_writing(scene: Scene, hosts: Hosts) -> None:
    """From `received/run/store` up to the folder that holds what the user received."""
    replace(scene, "store/~writing").symlink_to("../../../project")


def _link_parquet(scene: Scene, hosts: Hosts) -> None:
    path = parquet(scene)
    path.unlink()
    path.symlink_to(scene.home / ".ssh" / "id_ed25519")


def _link_received(scene: Scene, hosts: Hosts) -> None:
    """A folder inside the sent one is the run, and the run is a link to the user's project."""
    replace(scene, "").symlink_to(scene.project)


def _loops(scene: Scene, hosts: Hosts) -> None:
    for name in ("model", "metrics", "store/blobs"):
        replace(scene, name).symlink_to(".")
    replace(scene, "logs").symlink_to("logs")


def _fifo(name: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        os.mkfifo(replace(scene, name))

    return mutate


def _fifo_parquet(scene: Scene, hosts: Hosts) -> None:
    path = parquet(scene, "trajectories")
    path.unlink()
    os.mkfifo(path)


def _socket(scene: Scene, hosts: Hosts) -> None:
    path = replace(scene, "bus/ledger.db")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            # The path of a socket has at most 108 bytes.
            listening.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _folders(scene: Scene, hosts: Hosts) -> None:
    names = ("report.html", "bus/ledger.db", "store/run.json", "metrics/eval.jsonl", "replay.json")
    for name in names:
        replace(scene, name).mkdir()


def _hard(name: str) -> Mutation:
    def mutate(scene: Scene, hosts: Hosts) -> None:
        os.link(scene.project / "thesis.txt", replace(scene, name))

    return mutate
