"""The healthy run that each hostile run begins as: the recorded run of release 0.1.0, completed by
what later releases write (its identity, its starting model in the store, an archive of all topics).

It has log, store, archive, checkpoints, weights, model, metrics and configuration, takes a quarter
of a second to make, and every looking command reads it.
"""

import json
import shutil
import threading
from contextlib import closing
from pathlib import Path

import msgspec

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.settings import ArchiveSettings
from rollstream.keep.backup import back_up
from rollstream.storage.claim_check import open_log
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.starting_model.manifest import ModelSource
from rollstream.storage.starting_model.put import put_model
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import RolloutStatus
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import publish
from testbed.recorded import RUN_OF_0_1_0, unpack

RUN = "before"
STEP = 7
"""The newest step; the checkpoints are of steps 3 and 6."""
LOG_LINE = "dispatch: 12 groups are admitted\n"


def make_base_run(folder: Path) -> Path:
    """Writes the run into `folder`, and returns it."""
    unpack(RUN_OF_0_1_0, folder)
    configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    configuration |= {"folder": str(folder), "run": RUN}
    write_json(folder / "config.json", configuration)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "dispatch.log").write_text(LOG_LINE, encoding="utf-8")
    (folder / "report.html").write_text("<p>an older report</p>", encoding="utf-8")
    store = open_store(f"file:{folder / 'store'}")
    read_or_create_identity(store, RUN)
    for path in (folder / "store" / "roles").glob("*.json"):  # `rm` waits for a killed holder
        write_json(path, read_json(path) | {"released": True})
    put_model(store, RUN, ModelSource(folder / "model"), 1.0)
    with closing(open_log(f"sqlite:{folder / 'bus'}", f"file:{folder / 'store'}", "normal")) as bus:
        bus.create(catalogue())
        _say_goodbye(bus)
        stop = threading.Event()
        stop.set()
        ArchiveService(bus, store, RUN, ArchiveSettings()).run(stop)
    return folder


def _say_goodbye(bus: Bus) -> None:
    """Publishes for each rollout that it leaves: `rm` would wait for heartbeats of killed ones."""
    reader = TopicReader(bus, "status", from_begin(bus, "status"))
    newest = {received.key: received.record for received in reader.read_to(bus.end("status"))}
    for key, record in newest.items():
        if isinstance(record, RolloutStatus):
            publish(bus, "status", key, msgspec.structs.replace(record, health="leaving"))


def make_archive(run: Path, folder: Path) -> Path:
    """Writes what is left of `run` once its log is lost: settings, model, metrics and store."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("bus", "logs", "report.html"))
    return folder


def make_backup(run: Path, folder: Path) -> Path:
    """Writes a complete backup of `run` into `folder`."""
    store = open_store(f"file:{run / 'store'}")
    with closing(open_log(f"sqlite:{run / 'bus'}", f"file:{run / 'store'}", "normal")) as bus:
        back_up(bus, store, open_store(f"file:{folder}"), run)
    return folder


def read_json(path: Path) -> dict[str, object]:
    """Returns the object in a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, values: object) -> None:
    """Writes a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")
