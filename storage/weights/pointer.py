"""Moves `weights/latest.json`, which names the believed version and the term of the trainer that
may move it (invariant 6). A new trainer first swaps in its own term at the same version; from then
on every swap of a lower term loses, also one that was already in flight.

Reading list: after `storage/weights/publish.py`, before `producers/rollout/weights.py`.
"""

import re
from dataclasses import dataclass, replace

from rollstream.errors import ConfigurationError, Fenced, ObjectExists, ObjectMissing, SwapLost
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import decode_json, encode_json
from rollstream.storage.stores.part import complete_key
from rollstream.storage.stores.run_keys import MANIFESTS, RunKeys
from rollstream.storage.weights.manifest import Manifest, manifest_key, read_manifest
from rollstream.streams.values import Version

POINTER_KEY = "weights/latest.json"
RUN_KEYS = (RunKeys(re.compile(re.escape(POINTER_KEY)), "cut", "final", MANIFESTS),)
SWAPS_MAX = 100  # competitors are trainers of lower terms, which publish every few seconds


@dataclass(frozen=True, slots=True)
class Pointer:
    """The believed `version` (None before the first) and its manifest's key; only the trainer of
    `term` may move it.
    """

    run: str
    term: int
    version: Version | None
    manifest: str
    manifest_hash: str
    parent: Version | None


def read_pointer(store: ObjectStore) -> tuple[Pointer, str] | None:
    """Returns the pointer and the etag to swap it by; None in a new store."""
    try:
        data, etag = store.read(POINTER_KEY)
    except ObjectMissing:
        return None
    return decode_json(data, Pointer, complete_key(store, POINTER_KEY)), etag


def believed_pointer(store: ObjectStore) -> Pointer | None:
    present = read_pointer(store)
    return present[0] if present and present[0].version else None


def take_pointer(store: ObjectStore, run: str, term: int) -> Pointer:
    """Gives the pointer `term` at its present version; idempotent. Raises `Fenced` if a higher term
    has the pointer, `ConfigurationError` if it belongs to another run.
    """
    key = complete_key(store, POINTER_KEY)
    for _ in range(SWAPS_MAX):
        present = read_pointer(store)
        try:
            if present is None:
                empty = Pointer(run, term, None, "", "", None)
                store.create(POINTER_KEY, encode_json(empty))
                return empty
            pointer, etag = present
            _check_owner(pointer, key, run, term)
            if pointer.term == term:
                return pointer
            taken = replace(pointer, term=term)
            # From this swap on no lower term can move the pointer.
            store.swap(POINTER_KEY, encode_json(taken), etag)
            return taken
        except (SwapLost, ObjectExists):
            continue
    raise SwapLost(f"{key}: lost {SWAPS_MAX} swaps in a row; is an old writer still running?")


def pointer_to(manifest: Manifest) -> Pointer:
    version, key = manifest.version, manifest_key(manifest.version)
    return Pointer(manifest.run, version.term, version, key, manifest.hash, manifest.parent)


def advance_pointer(store: ObjectStore, manifest: Manifest) -> Pointer:
    """Swaps the pointer to this version; idempotent.

    Raises `Fenced` if a higher term owns the pointer, `SwapLost` if a lower one does
    (`take_pointer` comes first) or the believed number is not below this one, `ObjectMissing` or
    `CorruptObject` if the stored manifest is not this one.
    """
    version, new_pointer = manifest.version, pointer_to(manifest)
    key = complete_key(store, POINTER_KEY)
    read_manifest(store, version, new_pointer.manifest_hash)
    present = read_pointer(store)
    if present is None:
        raise SwapLost(f"{key} does not exist: take the pointer before believing {version}")
    pointer, etag = present
    _check_owner(pointer, key, manifest.run, version.term)
    if pointer == new_pointer:
        return new_pointer
    _check_next(pointer, key, version)
    try:
        store.swap(POINTER_KEY, encode_json(new_pointer), etag)
    except SwapLost:
        after = read_pointer(store)
        # If they are equal, the swap took effect and its answer was lost.
        if after is None or after[0] != new_pointer:
            if after is not None:
                _check_owner(after[0], key, manifest.run, version.term)
            raise
    return new_pointer


def check_term(store: ObjectStore, term: int) -> Pointer | None:
    """Returns None in a new store. Raises `Fenced` if a writer of a higher term decides
    retention.
    """
    present = read_pointer(store)
    if present is not None and present[0].term > term:
        key = complete_key(store, POINTER_KEY)
        raise Fenced(f"{key}: a writer of term {present[0].term} decides what stays, not {term}")
    return None if present is None else present[0]


def _check_owner(pointer: Pointer, key: str, run: str, term: int) -> None:
    if pointer.run != run:
        raise ConfigurationError(
            f"this store belongs to run {pointer.run!r}, not to {run!r}: "
            "give each run its own store"
        )
    if pointer.term > term:
        raise Fenced(f"{key} carries term {pointer.term}: the writer of {term} must exit")


def _check_next(pointer: Pointer, key: str, version: Version) -> None:
    if pointer.term < version.term:
        raise SwapLost(f"{key} carries term {pointer.term}: take it before {version}")
    if pointer.version is not None and pointer.version.number >= version.number:
        raise SwapLost(f"{key} is at {pointer.version}: {version} would go back")
