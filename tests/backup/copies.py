"""Backups and restores of a finished run, and what they must keep."""

from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path

from rollstream.keep.backup import Backup, back_up
from rollstream.keep.restore import plan_restore, restore
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import Bus, Message
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue

SAFE = [topic.name for topic in catalogue(2) if topic.cleanup == "safe"]


class Interrupted(Exception):
    """Raised where a kill would end the process."""


def store_of(folder: Path) -> ObjectStore:
    return open_store(f"file:{folder}/store")


def backed_up(
    run: Path, to: ObjectStore, progress: Callable[[str], None] = lambda part: None
) -> Backup:
    with closing(open_bus(f"sqlite:{run}/bus")) as bus:
        return back_up(bus, store_of(run), to, run, progress)


def restored(source: ObjectStore, folder: Path, *overrides: str) -> None:
    scratch = folder.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    restore(plan_restore(source, "backup", folder, overrides, scratch))


def messages(bus: Bus, topic: str) -> dict[int, list[Message]]:
    ends, found = bus.end(topic), dict[int, list[Message]]()
    for partition, at in bus.begin(topic).items():
        rows = found.setdefault(partition, [])
        while at < ends[partition]:
            rows += bus.read(topic, {partition: at})
            at = rows[-1].offset + 1
    return found


def history(folder: Path) -> dict[str, object]:
    """All that a log keeps: settings, begins, records with offsets and timestamps, commits."""
    with closing(open_bus(f"sqlite:{folder}/bus")) as bus:
        return {
            topic: (
                bus.settings(topic), bus.begin(topic), messages(bus, topic),
                {g: bus.committed(g, topic) for g in ("truncated", "dispatch", "archive")},
            )
            for topic in SAFE
        }  # fmt: skip


def objects(folder: Path, but: Collection[str] = ()) -> dict[str, bytes]:
    store = store_of(folder)
    return {e.key: store.get(e.key) for e in store.list() if not e.key.startswith(tuple(but))}
