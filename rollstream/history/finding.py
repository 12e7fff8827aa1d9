"""From what a person names (a run, a store, a version) to the store and the version."""

import sys
from pathlib import Path

from rollstream.analysis.place import find_place
from storage.connect import open_store
from storage.manifest import Manifest, parse_version, read_manifest
from storage.objects import ObjectStore
from storage.versions.pointer import believed
from storage.versions.retention import stored_versions
from streams.errors import ConfigurationError, ObjectMissing
from streams.records import Version

LATEST = "latest"


def find_store(named: str | None) -> ObjectStore:
    """The store of a run's folder or config.json, or a store by its folder or URL; None is the
    newest run. Nothing is made.
    """
    if named is not None:
        path = Path(named.removeprefix("file:"))
        for folder in (path, path / "store"):
            if (folder / "weights").is_dir() and not (path / "config.json").is_file():
                return open_store(f"file:{folder.absolute()}")
    place = find_place(named)
    if named is None:
        print(f"using the newest run, {place.name}", file=sys.stderr)
    if not place.has_store:
        raise ConfigurationError(f"{place.name} has no weights yet")
    return open_store(place.store)


def is_version(text: str) -> bool:
    """Whether a person could mean a version by it."""
    return text == LATEST or text.isdecimal() or parse_version(text) is not None


def find_version(store: ObjectStore, text: str) -> Manifest:
    """Of `latest`, a number or a version's whole name; of a number the highest term that is kept.

    `ObjectMissing` says which are kept.
    """
    if not is_version(text):
        raise ConfigurationError(
            f"{text!r} is no version: give a number, a name as {Version(12, 1)}, or {LATEST}"
        )
    pointer = believed(store)
    if text == LATEST and pointer is not None and pointer.version is not None:
        return read_manifest(store, pointer.version, pointer.manifest_hash)
    kept = [stored.version for stored in stored_versions(store) if stored.whole]
    named = parse_version(text)
    found = [v for v in kept if v == named or (text.isdecimal() and v.number == int(text))]
    if not found:
        names = ", ".join(map(str, kept)) or "none"
        raise ObjectMissing(f"version {text} is not kept; kept are: {names}")
    return read_manifest(store, max(found))
