"""Finds the store and the weight version that a user's arguments name."""

import sys
from pathlib import Path

from rollstream.analysis.locate import locate_run
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.manifest import Manifest, parse_version, read_manifest
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.retention import stored_versions
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.streams.values import Version

LATEST = "latest"


def find_store(named: str | None) -> ObjectStore:
    """Opens the store of a run's folder or config.json, or a store by its folder or URL; None means
    the newest run. Creates nothing.
    """
    if named is not None:
        path = Path(named.removeprefix("file:"))
        for folder in (path, path / "store"):
            if (folder / "weights").is_dir() and not (path / "config.json").is_file():
                return open_store(f"file:{folder.absolute()}")
    place = locate_run(named)
    if named is None:
        print(f"using the newest run, {place.name}", file=sys.stderr)
    if not place.has_store:
        raise ConfigurationError(f"{place.name} has no weights yet")
    return open_store(place.store)


def is_version(text: str) -> bool:
    """True if the text has the form of a version."""
    return text == LATEST or text.isdecimal() or parse_version(text) is not None


def find_version(store: ObjectStore, text: str) -> Manifest:
    """Finds a version by `latest`, a number (its highest kept term) or a full name.

    Raises `ObjectMissing`, listing the kept ones.
    """
    if not is_version(text):
        raise ConfigurationError(
            f"{text!r} is not a version: give a number, a name like {Version(12, 1)}, or {LATEST}"
        )
    pointer = believed_pointer(store)
    if text == LATEST and pointer is not None and pointer.version is not None:
        return read_manifest(store, pointer.version, pointer.manifest_hash)
    kept = [stored.version for stored in stored_versions(store) if stored.whole]
    named = parse_version(text)
    found = [v for v in kept if v == named or (text.isdecimal() and v.number == int(text))]
    if not found:
        names = ", ".join(map(str, kept)) or "none"
        raise ObjectMissing(f"version {text} is not kept; kept are: {names}")
    return read_manifest(store, max(found))
