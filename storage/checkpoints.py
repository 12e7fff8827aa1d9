"""Stores the trainer's whole state as a checkpoint (tensors and one JSON value) and restores it;
the manifest is written last, so a checkpoint with a manifest is complete.

A restart reads the newest complete checkpoint (`newest_checkpoint`). An incomplete or damaged one
is skipped, with the reason, in favour of the one before. A checkpoint of a newer release is refused
(`NewerRelease`), never skipped. Only a starting trainer lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollstream.errors import CorruptObject, Fenced, ObjectMissing
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import FORMAT, create_idempotent, seal, unseal
from rollstream.storage.weights.manifest import FileEntry, TensorFiles
from rollstream.storage.weights.pointer import read_pointer

if TYPE_CHECKING:  # only tensors need torch: an audit reads manifests and states without it
    import torch

    from rollstream.storage.weights.tensors import Tensors

SHARD_BYTES = 128 << 20
"""Size of a file of tensors; each file is joined in memory before it is written."""
PARTS_FORMAT = 2
"""Format in which tensors may be stored in parts (`part_name` in `weights/shards.py`); the newest
that this release reads.
"""
STATE = "state.json"
_NAME = re.compile(r"s(\d{8,})-t(\d{4,})")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Names the state after `step`, written by the trainer of `term`. The term orders first: a
    zombie's later step is not newer.
    """

    term: int
    step: int

    def __str__(self) -> str:
        return f"s{self.step:08d}-t{self.term:04d}"

    @property
    def folder(self) -> str:
        return f"checkpoints/{self}"


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Describes a checkpoint; this object, written last, completes it."""

    step: int
    term: int
    tensors: TensorFiles
    state: FileEntry
    format: int = FORMAT
    """Format number of the whole checkpoint, including its state: `PARTS_FORMAT` where tensors are
    stored in parts of rows.
    """


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Holds a checkpoint's verified state, and its tensors: in memory and verified, or
    `StoredTensors`, which verify each tensor when it is read.
    """

    id: CheckpointId
    tensors: Mapping[str, torch.Tensor]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """Names a checkpoint's folder; it is `whole` once it has its manifest."""

    id: CheckpointId
    whole: bool


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """Holds the newest checkpoint that can be read (None: there is none), and why newer ones
    cannot.
    """

    checkpoint: Checkpoint | None
    skipped: tuple[tuple[CheckpointId, str], ...]


def write_checkpoint(
    store: ObjectStore,
    step: int,
    term: int,
    tensors: Tensors,
    state: Mapping[str, Any] | None,
    shard_bytes: int = SHARD_BYTES,
    hashes: Mapping[str, str] | None = None,
) -> CheckpointId:
    """Create the complete checkpoint; idempotent for the same content. Tensors named in `hashes`
    are not hashed again.

    Written are (1) the tensors, (2) the state, (3) the manifest. `state` is JSON without NaN. A
    process that holds only a part of distributed tensors passes None and writes (1) alone. Raises
    `Fenced` if a trainer of a higher term has taken the weights' pointer before (3).
    """
    from rollstream.storage.weights.shards import has_parts, write_shards

    wanted = CheckpointId(term, step)
    files = write_shards(store, wanted.folder, "state", tensors, shard_bytes, hashes or {})  # 1
    if state is None:
        return wanted
    text = json.dumps(state, sort_keys=True, allow_nan=False, indent=1).encode()
    entry = FileEntry(
        STATE, len(text), create_idempotent(store, f"{wanted.folder}/{STATE}", text)
    )  # 2
    pointer = read_pointer(store)
    if pointer is not None and pointer[0].term > term:
        raise Fenced(f"checkpoint {wanted} is not completed: term {pointer[0].term} has taken over")
    number = PARTS_FORMAT if has_parts(files) else FORMAT
    manifest = seal(CheckpointManifest(step, term, files, entry, number))
    create_idempotent(store, _manifest_key(wanted), manifest)  # 3
    return wanted


def open_checkpoint(store: ObjectStore, wanted: CheckpointId) -> Checkpoint:
    """Returns the checkpoint with `StoredTensors`, which are read and verified one by one.

    Raises `ObjectMissing` if it is not (or no longer) complete, `CorruptObject` if its manifest or
    state is damaged, `NewerRelease` if this release cannot read it.
    """
    from rollstream.storage.weights.shards import StoredTensors

    manifest = checkpoint_manifest(store, wanted)
    state = _read_state(store, wanted, manifest)
    return Checkpoint(wanted, StoredTensors(store, wanted.folder, manifest.tensors), state)


def read_checkpoint(store: ObjectStore, wanted: CheckpointId) -> Checkpoint:
    """Returns the checkpoint with all its tensors in memory that the caller owns, every byte
    verified. Raises as `open_checkpoint` does.
    """
    found = open_checkpoint(store, wanted)
    return replace(found, tensors=dict(found.tensors))


def checkpoint_manifest(store: ObjectStore, wanted: CheckpointId) -> CheckpointManifest:
    """Returns the checkpoint's manifest. Raises `ObjectMissing` if it is not (or no longer)
    complete, `CorruptObject` if it is damaged.
    """
    key = _manifest_key(wanted)
    return unseal(store.get(key), CheckpointManifest, key, PARTS_FORMAT)


def checkpoint_state(store: ObjectStore, wanted: CheckpointId) -> dict[str, Any]:
    """Returns the JSON part alone, verified; raises as `read_checkpoint` does."""
    return _read_state(store, wanted, checkpoint_manifest(store, wanted))


def newest_checkpoint(store: ObjectStore, step_max: int | None = None) -> RestoredCheckpoint:
    """Returns the newest checkpoint that can be read, of those up to `step_max`; `skipped` gives
    the reason for each newer one.
    """
    stored = (checkpoint.id for checkpoint in reversed(stored_checkpoints(store)))
    candidates = (found for found in stored if step_max is None or found.step <= step_max)
    return restore_first(candidates, lambda wanted: read_checkpoint(store, wanted))


def restore_first(
    candidates: Iterable[CheckpointId], restore: Callable[[CheckpointId], Checkpoint]
) -> RestoredCheckpoint:
    """Returns the first of these checkpoints that `restore` can read. `restore` may load the
    tensors one by one into a model, which holds no usable state after an error.
    """
    skipped: list[tuple[CheckpointId, str]] = []
    for wanted in candidates:
        try:
            return RestoredCheckpoint(restore(wanted), tuple(skipped))
        except (ObjectMissing, CorruptObject) as error:
            skipped.append((wanted, str(error)))
    return RestoredCheckpoint(None, tuple(skipped))


def stored_checkpoints(store: ObjectStore) -> list[StoredCheckpoint]:
    """Returns all checkpoints, complete or not, oldest first, by listing."""
    found: dict[CheckpointId, bool] = {}
    for entry in store.list("checkpoints/"):
        _, name, *rest = entry.key.split("/")
        match = _NAME.fullmatch(name)
        if match and rest:
            wanted = CheckpointId(term=int(match[2]), step=int(match[1]))
            found[wanted] = found.get(wanted, False) or entry.key == _manifest_key(wanted)
    return [StoredCheckpoint(wanted, found[wanted]) for wanted in sorted(found)]


def plan_checkpoints(stored: Sequence[StoredCheckpoint], keep: int) -> list[CheckpointId]:
    """Returns the checkpoints to delete, oldest first, so that the newest `keep` complete ones
    stay.

    An incomplete one is deleted once a newer one is complete: no trainer will complete it.
    """
    assert keep >= 1
    kept = sorted(checkpoint.id for checkpoint in stored if checkpoint.whole)[-keep:]
    newest = max(kept, default=CheckpointId(0, 0))
    return [
        checkpoint.id
        for checkpoint in stored
        if checkpoint.id not in kept and (checkpoint.whole or checkpoint.id < newest)
    ]


def delete_checkpoints(store: ObjectStore, unwanted: Iterable[CheckpointId]) -> None:
    """Delete these checkpoints, the manifest of each first; can be repeated after an
    interruption.
    """
    for old in unwanted:
        store.delete(_manifest_key(old))
        store.delete_all(entry.key for entry in store.list(f"{old.folder}/"))


def _read_state(
    store: ObjectStore, wanted: CheckpointId, manifest: CheckpointManifest
) -> dict[str, Any]:
    text = store.get(f"{wanted.folder}/{STATE}")
    if content_hash(text) != manifest.state.hash:
        raise CorruptObject(f"object {wanted.folder}/{STATE} differs from its manifest's hash")
    return json.loads(text)


def _manifest_key(wanted: CheckpointId) -> str:
    return f"{wanted.folder}/manifest.json"
