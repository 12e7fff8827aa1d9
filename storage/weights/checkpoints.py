"""Stores and restores the trainer's whole state. The manifest is written last. A restart skips
incomplete and damaged ones, but never one of a newer release (`NewerRelease`).
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
"""Most bytes of a file of several tensors, which is assembled in memory."""
PARTS_FORMAT = 2
"""A checkpoint whose tensors are stored in parts, some rows each (`part_name` in
`weights/shards.py`); the newest format that this release reads.
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
    """A higher term is newer, whatever its step: a zombie of a lower term may have reached a later
    step.
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
    step: int
    term: int
    tensors: TensorFiles
    state: FileEntry
    format: int = FORMAT
    """`PARTS_FORMAT` if any tensor is stored in parts."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The verified JSON value (`state`), and tensors in memory (`read_checkpoint`), or a
    `StoredTensors`, which verifies each when it is requested.
    """

    id: CheckpointId
    tensors: Mapping[str, torch.Tensor]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """Names a checkpoint in the store; it is `whole` if it has its manifest."""

    id: CheckpointId
    whole: bool


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """The newest readable checkpoint, and each newer one with the reason why it was `skipped`."""

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
    """Create a checkpoint; idempotent for the same content. It writes (1) the tensors, (2) the
    state, (3) the manifest. `state` is a JSON value without NaN; a process with only a part of
    distributed tensors passes None and writes (1) alone. Raises `Fenced` before (3) if a trainer of
    a higher term has taken the pointer of the weight versions.
    """
    from rollstream.storage.weights.shards import has_parts, write_shards

    checkpoint_id = CheckpointId(term, step)
    files = write_shards(
        store, checkpoint_id.folder, "state", tensors, shard_bytes, hashes or {}
    )  # 1
    if state is None:
        return checkpoint_id
    text = json.dumps(state, sort_keys=True, allow_nan=False, indent=1).encode()
    entry = FileEntry(
        STATE, len(text), create_idempotent(store, f"{checkpoint_id.folder}/{STATE}", text)
    )  # 2
    pointer = read_pointer(store)
    if pointer is not None and pointer[0].term > term:
        raise Fenced(
            f"checkpoint {checkpoint_id} is not completed: term {pointer[0].term} has taken over"
        )
    number = PARTS_FORMAT if has_parts(files) else FORMAT
    manifest = seal(CheckpointManifest(step, term, files, entry, number))
    create_idempotent(store, _manifest_key(checkpoint_id), manifest)  # 3
    return checkpoint_id


def open_checkpoint(store: ObjectStore, checkpoint_id: CheckpointId) -> Checkpoint:
    """Returns the checkpoint, whose tensors are read and verified when they are requested. Raises
    `ObjectMissing` if the checkpoint is not (or no longer) complete, `CorruptObject` if its
    manifest or state is damaged, `NewerRelease` if this release cannot read it.
    """
    from rollstream.storage.weights.shards import StoredTensors

    manifest = checkpoint_manifest(store, checkpoint_id)
    state = _read_state(store, checkpoint_id, manifest)
    return Checkpoint(
        checkpoint_id, StoredTensors(store, checkpoint_id.folder, manifest.tensors), state
    )


def read_checkpoint(store: ObjectStore, checkpoint_id: CheckpointId) -> Checkpoint:
    """Returns the checkpoint verified, in memory that the caller owns. Raises as `open_checkpoint`,
    and `CorruptObject` for a damaged tensor.
    """
    checkpoint = open_checkpoint(store, checkpoint_id)
    return replace(checkpoint, tensors=dict(checkpoint.tensors))


def checkpoint_manifest(store: ObjectStore, checkpoint_id: CheckpointId) -> CheckpointManifest:
    """Returns the checkpoint's manifest; raises as `open_checkpoint`."""
    key = _manifest_key(checkpoint_id)
    manifest = unseal(store.get(key), CheckpointManifest, key, PARTS_FORMAT)
    check_tensors(manifest.tensors, key)
    return manifest


def checkpoint_state(store: ObjectStore, checkpoint_id: CheckpointId) -> dict[str, Any]:
    """Returns the checkpoint's JSON value, verified; raises as `open_checkpoint`."""
    return _read_state(store, checkpoint_id, checkpoint_manifest(store, checkpoint_id))


def newest_checkpoint(store: ObjectStore, step_max: int | None = None) -> RestoredCheckpoint:
    stored = (checkpoint.id for checkpoint in reversed(stored_checkpoints(store)))
    candidates = (
        candidate for candidate in stored if step_max is None or candidate.step <= step_max
    )
    return restore_first(candidates, lambda checkpoint_id: read_checkpoint(store, checkpoint_id))


def restore_first(
    candidates: Iterable[CheckpointId], restore: Callable[[CheckpointId], Checkpoint]
) -> RestoredCheckpoint:
    """Returns the first for which `restore` raises neither `ObjectMissing` nor `CorruptObject`.
    `restore` may load into a model: the next call overwrites what a failed one loaded.
    """
    skipped: list[tuple[CheckpointId, str]] = []
    for candidate in candidates:
        try:
            return RestoredCheckpoint(restore(candidate), tuple(skipped))
        except (ObjectMissing, CorruptObject) as error:
            skipped.append((candidate, str(error)))
    return RestoredCheckpoint(None, tuple(skipped))


def stored_checkpoints(store: ObjectStore) -> list[StoredCheckpoint]:
    complete: dict[CheckpointId, bool] = {}
    for entry in store.list("checkpoints/"):
        name = entry.key.split("/")[1]
        match = _NAME.fullmatch(name)
        if match and any(keys.owns(entry.key) for keys in RUN_KEYS):
            stored_id = CheckpointId(term=int(match[2]), step=int(match[1]))
            complete[stored_id] = complete.get(stored_id, False) or entry.key == _manifest_key(
                stored_id
            )
    return [StoredCheckpoint(stored_id, complete[stored_id]) for stored_id in sorted(complete)]


def plan_checkpoints(stored: Sequence[StoredCheckpoint], keep: int) -> list[CheckpointId]:
    """Returns the checkpoints to delete: the newest `keep` complete ones stay. `stored` and the
    result are in ascending order.
    """
    assert keep >= 1
    retained = sorted(checkpoint.id for checkpoint in stored if checkpoint.whole)[-keep:]
    newest = max(retained, default=CheckpointId(0, 0))
    return [
        checkpoint.id
        for checkpoint in stored
        # No trainer will complete an incomplete one once a newer one is complete.
        if checkpoint.id not in retained and (checkpoint.whole or checkpoint.id < newest)
    ]


def delete_checkpoints(store: ObjectStore, unwanted: Iterable[CheckpointId]) -> None:
    """Deletes the manifest of each first, so that none looks complete meanwhile. Another user's
    files stay. The call can be repeated after an interruption.
    """
    for old in unwanted:
        store.delete(_manifest_key(old))
        listed = (entry.key for entry in store.list(f"{old.folder}/"))
        store.delete_all(key for key in listed if CHECKPOINT_FILES.owns(key))


def _read_state(
    store: ObjectStore, checkpoint_id: CheckpointId, manifest: CheckpointManifest
) -> dict[str, Any]:
    key = f"{checkpoint_id.folder}/{STATE}"
    text = store.get(key)
    if content_hash(text) != manifest.state.hash:
        raise CorruptObject(f"object {key} differs from its manifest's hash")
    return decode_json(text, dict[str, Any], key)


def _manifest_key(checkpoint_id: CheckpointId) -> str:
    return f"{checkpoint_id.folder}/manifest.json"
