"""Stores the trainer's whole state as a checkpoint (tensors and one JSON value), restores it, and
deletes old ones. The manifest is written last, so a checkpoint with a manifest is complete.

A restart reads the newest checkpoint that is complete and undamaged (`restore_first`,
`newest_checkpoint`). Newer ones are skipped, and the reasons are reported. A checkpoint of a newer
release is never skipped: it raises `NewerRelease`. The store has no index of checkpoints: they are
found by listing it (`stored_checkpoints`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollstream.errors import CorruptObject, Fenced, ObjectMissing
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import (
    FORMAT,
    create_idempotent,
    decode_json,
    seal,
    unseal,
)
from rollstream.storage.stores.run_keys import MANIFESTS, RunKeys
from rollstream.storage.weights.manifest import FileEntry, TensorFiles, check_tensors
from rollstream.storage.weights.pointer import read_pointer

if TYPE_CHECKING:  # only tensors need torch: an audit reads manifests and states without it
    import torch

    from rollstream.storage.weights.tensors import Tensors

SHARD_BYTES = 128 << 20
"""Most bytes of a file of several tensors; a file is assembled in memory before it is written."""
PARTS_FORMAT = 2
"""Format of a checkpoint whose tensors are stored in parts, each some rows of a tensor (`part_name`
in `weights/shards.py`). It is the newest format that this release reads.
"""
STATE = "state.json"  # name of the object with the JSON value, in the checkpoint's folder
_NAME = re.compile(r"s(\d{8,})-t(\d{4,})")
CHECKPOINT_FILES = RunKeys(
    re.compile(
        rf"checkpoints/{_NAME.pattern}/"
        r"(?:state\.json|state(?:-rank\d+)?-\d{5}-of-\d{5}\.safetensors)"
    ),
    "later", "final", linked=True,
)  # fmt: skip
RUN_KEYS = (
    RunKeys(
        re.compile(rf"checkpoints/{_NAME.pattern}/manifest\.json"),
        "later", "final", MANIFESTS, linked=True,
    ),
    CHECKPOINT_FILES,
)  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Names the checkpoint after `step`, written by the trainer of `term`. A checkpoint of a higher
    term is newer, whatever its step: a zombie of a lower term may have reached a later step.
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
    """Describes a checkpoint: the files of its tensors, with a hash per tensor, and the file of its
    JSON value (`state`). This object, written last, completes the checkpoint.
    """

    step: int
    term: int
    tensors: TensorFiles
    state: FileEntry
    format: int = FORMAT
    """Format number of the whole checkpoint, including its state: `PARTS_FORMAT` if any tensor is
    stored in parts.
    """


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Holds a checkpoint's verified JSON value (`state`) and its tensors. These are in memory and
    verified (`read_checkpoint`), or a `StoredTensors`, which reads and verifies each tensor when it
    is requested (`open_checkpoint`).
    """

    id: CheckpointId
    tensors: Mapping[str, torch.Tensor]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """Names a checkpoint that the store has, complete or not; it is `whole` if it has its
    manifest.
    """

    id: CheckpointId
    whole: bool


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """Holds the newest checkpoint that can be read, None if there is none. `skipped` has each newer
    checkpoint that cannot be read, with the reason.
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
    """Create a checkpoint; idempotent for the same content. `hashes` has the hashes of tensors that
    were hashed already.

    It writes (1) the tensors, (2) the state, (3) the manifest. `state` is a JSON value without NaN;
    a process that has only a part of distributed tensors passes None and writes (1) alone. Raises
    `Fenced` before (3) if a trainer of a higher term has taken the pointer of the weight versions.
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
    """Returns the checkpoint with its state read, and tensors that are read and verified one by one
    when they are requested (`StoredTensors`).

    Raises `ObjectMissing` if it is not (or no longer) complete, `CorruptObject` if its manifest or
    state is damaged, `NewerRelease` if this release cannot read it.
    """
    from rollstream.storage.weights.shards import StoredTensors

    manifest = checkpoint_manifest(store, wanted)
    state = _read_state(store, wanted, manifest)
    return Checkpoint(wanted, StoredTensors(store, wanted.folder, manifest.tensors), state)


def read_checkpoint(store: ObjectStore, wanted: CheckpointId) -> Checkpoint:
    """Returns the checkpoint with all its tensors, every one verified, in memory that the caller
    owns. Raises as `open_checkpoint` does, and `CorruptObject` for a damaged tensor.
    """
    found = open_checkpoint(store, wanted)
    return replace(found, tensors=dict(found.tensors))


def checkpoint_manifest(store: ObjectStore, wanted: CheckpointId) -> CheckpointManifest:
    """Returns the checkpoint's manifest. Raises `ObjectMissing` if the checkpoint is not (or no
    longer) complete, `CorruptObject` if the manifest is damaged, `NewerRelease` if this release
    cannot read it.
    """
    key = _manifest_key(wanted)
    manifest = unseal(store.get(key), CheckpointManifest, key, PARTS_FORMAT)
    check_tensors(manifest.tensors, key)
    return manifest


def checkpoint_state(store: ObjectStore, wanted: CheckpointId) -> dict[str, Any]:
    """Returns the checkpoint's JSON value alone, verified; raises as `open_checkpoint` does."""
    return _read_state(store, wanted, checkpoint_manifest(store, wanted))


def newest_checkpoint(store: ObjectStore, step_max: int | None = None) -> RestoredCheckpoint:
    """Returns the newest checkpoint of the store that can be read; if `step_max` is given, only
    those up to that step count.
    """
    stored = (checkpoint.id for checkpoint in reversed(stored_checkpoints(store)))
    candidates = (found for found in stored if step_max is None or found.step <= step_max)
    return restore_first(candidates, lambda wanted: read_checkpoint(store, wanted))


def restore_first(
    candidates: Iterable[CheckpointId], restore: Callable[[CheckpointId], Checkpoint]
) -> RestoredCheckpoint:
    """Returns the first of these checkpoints for which `restore` raises neither `ObjectMissing` nor
    `CorruptObject`. `restore` may load the tensors one by one into a model: what a failed call left
    there is overwritten by the next one.
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
        name = entry.key.split("/")[1]
        match = _NAME.fullmatch(name)
        if match and any(keys.owns(entry.key) for keys in RUN_KEYS):
            wanted = CheckpointId(term=int(match[2]), step=int(match[1]))
            found[wanted] = found.get(wanted, False) or entry.key == _manifest_key(wanted)
    return [StoredCheckpoint(wanted, found[wanted]) for wanted in sorted(found)]


def plan_checkpoints(stored: Sequence[StoredCheckpoint], keep: int) -> list[CheckpointId]:
    """Returns the checkpoints to delete, so that the newest `keep` complete ones stay. `stored` is
    in ascending order, and so is the result.

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
    """Delete these checkpoints, the manifest of each first, so that none looks complete while it is
    deleted; a file of another user in its folder stays. After an interruption the call can be
    repeated.
    """
    for old in unwanted:
        store.delete(_manifest_key(old))
        listed = (entry.key for entry in store.list(f"{old.folder}/"))
        store.delete_all(key for key in listed if CHECKPOINT_FILES.owns(key))


def _read_state(
    store: ObjectStore, wanted: CheckpointId, manifest: CheckpointManifest
) -> dict[str, Any]:
    key = f"{wanted.folder}/{STATE}"
    text = store.get(key)
    if content_hash(text) != manifest.state.hash:
        raise CorruptObject(f"object {key} differs from its manifest's hash")
    return decode_json(text, dict[str, Any], key)


def _manifest_key(wanted: CheckpointId) -> str:
    return f"{wanted.folder}/manifest.json"
