"""Checkpoints: the trainer's whole state, tensors and one JSON value, its manifest written last.

A restart reads the newest whole one; one that is half-written or damaged is passed over, with the
reason, for the one before. One of a newer release is refused (`NewerRelease`), never passed over.
Only a trainer that starts lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage.documents import FORMAT, create_same, seal, unseal
from storage.hashing import content_hash
from storage.manifest import FileEntry, TensorFiles
from storage.objects import ObjectStore
from storage.versions.pointer import read_pointer
from streams.errors import CorruptObject, Fenced, ObjectMissing

if TYPE_CHECKING:  # torch comes with the tensors: an audit reads manifests and states without it
    import torch

    from storage.spread import Tensors

SHARD_BYTES = 1 << 30
STATE = "state.json"
_NAME = re.compile(r"s(\d{8,})-t(\d{4,})")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """After `step`, by the trainer of `term`, which orders first: a zombie's step is no newer."""

    term: int
    step: int

    def __str__(self) -> str:
        return f"s{self.step:08d}-t{self.term:04d}"

    @property
    def folder(self) -> str:
        return f"checkpoints/{self}"


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What makes a checkpoint whole."""

    step: int
    term: int
    tensors: TensorFiles
    state: FileEntry
    format: int = FORMAT
    """Of the whole checkpoint, its state included."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint; the tensors are the caller's own."""

    id: CheckpointId
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint's folder; not `whole` until it has its manifest."""

    id: CheckpointId
    whole: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """The newest checkpoint that reads whole (None: there is none), and why newer ones do not."""

    checkpoint: Checkpoint | None
    skipped: tuple[tuple[CheckpointId, str], ...]


def write_checkpoint(
    store: ObjectStore,
    step: int,
    term: int,
    tensors: Tensors,
    state: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> CheckpointId:
    """Create the checkpoint whole; calling it again with the same content changes nothing.

    (1) the tensors, (2) the state, (3) the manifest. `state` is JSON without NaN. `Fenced` if a
    trainer of a higher term has taken the weights' pointer by then.
    """
    from storage.shards import write_shards

    wanted = CheckpointId(term, step)
    text = json.dumps(state, sort_keys=True, allow_nan=False, indent=1).encode()
    files = write_shards(store, wanted.folder, "state", tensors, shard_bytes)  # 1
    entry = FileEntry(STATE, len(text), create_same(store, f"{wanted.folder}/{STATE}", text))  # 2
    pointer = read_pointer(store)
    if pointer is not None and pointer[0].term > term:
        raise Fenced(f"checkpoint {wanted} is not completed: term {pointer[0].term} trains now")
    manifest = seal(CheckpointManifest(step, term, files, entry))
    create_same(store, _manifest_key(wanted), manifest)  # 3
    return wanted


def read_checkpoint(store: ObjectStore, wanted: CheckpointId) -> Checkpoint:
    """The checkpoint, all of it verified.

    `ObjectMissing` if it is not whole (any more), `CorruptObject` if it is damaged, `NewerRelease`
    if this release does not read it.
    """
    from storage.shards import read_shards

    manifest = checkpoint_manifest(store, wanted)
    state = _read_state(store, wanted, manifest)
    tensors = read_shards(store, wanted.folder, manifest.tensors, manifest.tensors.names)
    return Checkpoint(wanted, tensors, state)


def checkpoint_manifest(store: ObjectStore, wanted: CheckpointId) -> CheckpointManifest:
    """What it holds; `ObjectMissing` if it is not whole (any more), `CorruptObject` if damaged."""
    key = _manifest_key(wanted)
    return unseal(store.get(key), CheckpointManifest, key)


def checkpoint_state(store: ObjectStore, wanted: CheckpointId) -> dict[str, Any]:
    """The JSON part alone, verified; raises like `read_checkpoint`."""
    return _read_state(store, wanted, checkpoint_manifest(store, wanted))


def newest_checkpoint(store: ObjectStore, step_max: int | None = None) -> Restored:
    """The newest checkpoint that reads whole, of those up to a step; `skipped` says why each newer
    one was passed over.
    """
    skipped: list[tuple[CheckpointId, str]] = []
    for stored in reversed(stored_checkpoints(store)):
        if step_max is not None and stored.id.step > step_max:
            continue
        try:
            return Restored(read_checkpoint(store, stored.id), tuple(skipped))
        except (ObjectMissing, CorruptObject) as error:
            skipped.append((stored.id, str(error)))
    return Restored(None, tuple(skipped))


def stored_checkpoints(store: ObjectStore) -> list[StoredCheckpoint]:
    """All checkpoints, begun or whole, oldest first, by listing."""
    found: dict[CheckpointId, bool] = {}
    for entry in store.list("checkpoints/"):
        _, name, *rest = entry.key.split("/")
        match = _NAME.fullmatch(name)
        if match and rest:
            wanted = CheckpointId(term=int(match[2]), step=int(match[1]))
            found[wanted] = found.get(wanted, False) or entry.key == _manifest_key(wanted)
    return [StoredCheckpoint(wanted, found[wanted]) for wanted in sorted(found)]


def plan_checkpoints(stored: Sequence[StoredCheckpoint], keep: int) -> list[CheckpointId]:
    """Which to delete so that the newest `keep` whole ones stay, oldest first.

    One that was begun goes once a newer one is whole: nobody will complete it.
    """
    assert keep >= 1
    kept = sorted(one.id for one in stored if one.whole)[-keep:]
    newest = max(kept, default=CheckpointId(0, 0))
    return [one.id for one in stored if one.id not in kept and (one.whole or one.id < newest)]


def delete_checkpoints(store: ObjectStore, unwanted: Iterable[CheckpointId]) -> None:
    """Remove them, the manifest of each first; calling it again after an interruption is fine."""
    for old in unwanted:
        store.delete(_manifest_key(old))
        for entry in store.list(f"{old.folder}/"):
            store.delete(entry.key)


def _read_state(
    store: ObjectStore, wanted: CheckpointId, manifest: CheckpointManifest
) -> dict[str, Any]:
    text = store.get(f"{wanted.folder}/{STATE}")
    if content_hash(text) != manifest.state.hash:
        raise CorruptObject(f"object {wanted.folder}/{STATE} differs from its manifest's hash")
    return json.loads(text)


def _manifest_key(wanted: CheckpointId) -> str:
    return f"{wanted.folder}/manifest.json"
