"""Which objects of a store are a run's own, by the keys that writers declare; `rm`, `backup` and
`restore` decide alike.
"""

from collections.abc import Collection, Iterable
from functools import cache
from importlib import import_module
from typing import cast

from rollstream.errors import RollstreamError
from rollstream.storage.archive.file_names import parse_archive_key
from rollstream.storage.claim_check import parse_blob_key
from rollstream.storage.identity import IDENTITY_KEY
from rollstream.storage.starting_model.manifest import read_model_manifest
from rollstream.storage.stores.base import ListedObject, ObjectStore
from rollstream.storage.stores.run_keys import RunKeys, undecided
from rollstream.storage.weights.manifest import parse_version, read_manifest
from rollstream.storage.weights.named_streams import split_key
from rollstream.streams.topics import catalogue

WRITERS = (
    "rollstream.run.config.config",
    "rollstream.storage.identity",
    "rollstream.consumers.audit.verdict",
    "rollstream.consumers.dispatch.persistence",
    "rollstream.producers.agents.keys",
    "rollstream.look.index.parentage",
    "rollstream.storage.archive.file_names",
    "rollstream.storage.weights.checkpoints",
    "rollstream.storage.claim_check",
    "rollstream.storage.skipped_rows",
    "rollstream.storage.stores.run_keys",
    "rollstream.storage.starting_model.manifest",
    "rollstream.storage.terms",
    "rollstream.storage.weights.manifest",
    "rollstream.storage.weights.named_streams",
    "rollstream.storage.weights.pointer",
    "rollstream.storage.weights.retention",
)
"""Modules that declare `RUN_KEYS`; a test compares them with what runs write."""


@cache
def declarations() -> tuple[RunKeys, ...]:
    return tuple(
        keys
        # Imported at the first decision, so that commands that only read do not pay for it.
        for module in WRITERS
        for keys in cast("tuple[RunKeys, ...]", import_module(module).RUN_KEYS)
    )


def declared_keys(key: str, names: Collection[str] = ()) -> RunKeys | None:
    """Returns None if no run writes such a key. `names` are those of `manifest_names`."""
    return next((keys for keys in declarations() if keys.owns(key, names)), None)


def sort_objects(
    listed: Iterable[ListedObject], run: str, names: Collection[str] = ()
) -> tuple[list[tuple[ListedObject, RunKeys]], list[ListedObject]]:
    """Returns the run's own objects, each with its declaration, and foreign ones, without I/O: keys
    without a declared form, and objects of another run (inside this store, or in the archive) or of
    an unknown topic.
    """
    entries, topics = list(listed), {topic.name for topic in catalogue()}
    # A run inside this store has a `run.json` of its own.
    nested = tuple(
        entry.key.removesuffix(IDENTITY_KEY)
        for entry in entries
        if entry.key.endswith(f"/{IDENTITY_KEY}")
    )
    own_objects: list[tuple[ListedObject, RunKeys]] = []
    foreign: list[ListedObject] = []
    for entry in entries:
        keys = declared_keys(entry.key, names)
        archived, blob = parse_archive_key(entry.key, entry.bytes), parse_blob_key(entry.key)
        of_another = archived is not None and archived.run != run
        unknown = blob is not None and blob.topic not in topics
        if keys is None or of_another or unknown or entry.key.startswith(nested):
            foreign.append(entry)
        else:
            own_objects.append((entry, keys))
    return own_objects, foreign


def manifest_names(store: ObjectStore, listed: Iterable[ListedObject]) -> frozenset[str]:
    """Returns files of the starting model and of versions that only the run's manifests can tell
    from a user's (a hub model's licence). An unreadable manifest names none.
    """
    odd = undecided(declarations(), (entry.key for entry in listed))
    names: set[str] = set()
    places = [split_key(key) for key in odd]
    for stream, folder in sorted({(s, "/".join(key.split("/")[:2])) for s, key in places}):
        names |= _version_names(stream.part(store), folder)
    if odd:
        names |= _model_names(store)
    return frozenset(names)


def _version_names(store: ObjectStore, folder: str) -> set[str]:
    version = parse_version(folder.removeprefix("weights/"))
    if version is None:
        return set()
    try:
        manifest = read_manifest(store, version)
    except RollstreamError:  # missing, damaged, or of a newer release
        return set()
    return {file.name for file in (*manifest.files, *manifest.model_files)}


def _model_names(store: ObjectStore) -> set[str]:
    try:
        manifest = read_model_manifest(store)
    except RollstreamError:
        return set()
    return set() if manifest is None else {file.name.rpartition("/")[2] for file in manifest.files}
