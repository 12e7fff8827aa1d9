"""Keeps the tensors of one version in this process's memory and updates them in place.

A tensor with the new hash stays; one with a parent's hash gets the deltas and is checked; any other
is read from an anchor. Until every tensor matches, `version` is None and nothing may be served from
this memory. The next update repairs an interrupted one.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.anchors import find_fetch_paths, find_other_paths
from rollstream.storage.weights.delta.coding import Changes, squash
from rollstream.storage.weights.fetch_execution import FetchOutcome, execute_fetch
from rollstream.storage.weights.fetch_plan import FetchPath, HeldTensors
from rollstream.storage.weights.manifest import Manifest, TensorEntry, read_manifest
from rollstream.storage.weights.tensors import DTYPE_NAMES, DTYPES, tensor_bytes, tensor_hash
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

ROUNDS_MAX = 4  # attempts to read the tensors, each without the steps that did not match before


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """Lists a tensor's changed elements: flat int64 positions, ascending, and the new values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    indices: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ResidentUpdate:
    """Reports an update. Relative to `base` only the elements in `patches` and the tensors in
    `whole` differ; `patches` is None if the earlier content is unknown.
    """

    manifest: Manifest
    base: Version | None
    patches: tuple[TensorPatch, ...] | None
    whole: tuple[str, ...]
    fetched_bytes: int


class ResidentWeights:
    """Holds the tensors `names` of one version, by default all. For one thread only."""

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self._names = None if names is None else tuple(names)
        self._memory: dict[str, torch.Tensor] = {}  # by the name that `_last` stores it under
        self._last: Manifest | None = None
        self.version: Version | None = None
        self.manifest: Manifest | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by all names; tied names share memory. They change only in `update`
        and belong to no version while `version` is None.
        """
        if self._last is None:
            return {}
        tied = self._last.weights.tied
        return {name: self._memory[tied.get(name, name)] for name in self._wanted(self._last)}

    def update(
        self, store: ObjectStore, target: Version, manifest_hash: str | None = None
    ) -> ResidentUpdate:
        """Make the tensors those of `target`, every one verified, reading as few bytes as possible.
        The announced `manifest_hash` makes sure of exactly the announced version.

        Raises `ObjectMissing` if the version, one of its tensors, or every path to one is gone,
        `CorruptObject`, which names the tensor and object that differ, and any error of the store.
        """
        manifest = read_manifest(store, target, manifest_hash)
        owners = self._owners(manifest)
        base, before = self.version, self.manifest
        memory, hashes = self._prepare_memory(manifest, owners)
        paths = find_fetch_paths(
            store, manifest, owners, HeldTensors(hashes, base.number if base else 0)
        )
        # From here on the memory may be a mixture of versions.
        self._memory, self._last = memory, manifest
        self.version = self.manifest = None
        done = self._update_until_verified(store, manifest, paths)
        self.version, self.manifest = target, manifest
        if base is None or before is None or not self._same_names(before, manifest):
            return ResidentUpdate(manifest, None, None, tuple(owners), done.fetched_bytes)
        changed = {n: path.entry for n, path in paths.items() if hashes.get(n) != path.entry.hash}
        patches = tuple(
            _patch(name, entry, squash(done.changes[name]))
            for name, entry in changed.items()
            if done.changes.get(name)
        )
        rewritten = tuple(name for name in changed if not done.changes.get(name))
        return ResidentUpdate(manifest, base, patches, rewritten, done.fetched_bytes)

    def _same_names(self, before: Manifest, after: Manifest) -> bool:
        same = before.weights.tied == after.weights.tied
        return same and set(self._wanted(before)) == set(self._wanted(after))

    def _wanted(self, manifest: Manifest) -> tuple[str, ...]:
        return manifest.weights.names if self._names is None else self._names

    def _owners(self, manifest: Manifest) -> list[str]:
        names = self._wanted(manifest)
        unknown = sorted(set(names).difference(manifest.weights.names))
        if unknown:
            raise ObjectMissing(f"version {manifest.version} has no tensor {', '.join(unknown)}")
        return list(dict.fromkeys(manifest.weights.owner(name) for name in names))

    def _prepare_memory(
        self, manifest: Manifest, owners: Iterable[str]
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        tied = self._last.weights.tied if self._last else {}
        hashes: dict[str, str] = {}
        memory: dict[str, torch.Tensor] = {}
        used: set[str] = set()
        for name in owners:
            entry = manifest.weights.tensors[name]
            from_name = tied.get(name, name)
            present = self._memory.get(from_name)
            if present is None or not _fits(present, entry):
                memory[name] = _empty(name, entry)
                continue
            # Two names that were tied before need memory of their own now.
            memory[name] = present.clone() if from_name in used else present
            used.add(from_name)
            digest = self.manifest.weights.entry(name).hash if self.manifest else None
            hashes[name] = digest or _hash(present, entry)
        return memory, hashes

    def _update_until_verified(
        self, store: ObjectStore, manifest: Manifest, paths: Mapping[str, FetchPath]
    ) -> FetchOutcome:
        done = execute_fetch(store, paths, self._memory)
        for _ in range(ROUNDS_MAX - 1):
            if not done.failed:
                return done
            for name, error in done.failed.items():
                log.error("version %s, tensor %s: %s", manifest.version, name, error)
                done.changes.pop(name, None)
            others = find_other_paths(store, manifest, done.failed, done.broken)
            outcome = execute_fetch(store, others, self._memory)
            done.failed, done.broken = outcome.failed, done.broken | outcome.broken
            done.fetched_bytes += outcome.fetched_bytes
        for error in done.failed.values():
            raise error
        return done


def _empty(name: str, entry: TensorEntry) -> torch.Tensor:
    try:
        # The size is the manifest's statement; no byte of the tensor was read yet.
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    except (RuntimeError, MemoryError) as error:
        raise CorruptObject(
            f"tensor {name} of {entry.bytes:,} bytes has no room in memory; its manifest is "
            "damaged, or this machine is too small for the model"
        ) from error


def _patch(name: str, entry: TensorEntry, changes: Changes) -> TensorPatch:
    values = torch.from_numpy(np.ascontiguousarray(changes.values).view(np.uint8))  # pyright: ignore[reportUnknownMemberType]
    dtype = DTYPES[entry.dtype]
    indices = torch.from_numpy(changes.indices)  # pyright: ignore[reportUnknownMemberType]
    return TensorPatch(name, entry.shape, dtype, indices, values.view(dtype))


def _fits(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    return DTYPE_NAMES[tensor.dtype] == entry.dtype and tuple(tensor.shape) == entry.shape


def _hash(tensor: torch.Tensor, entry: TensorEntry) -> str:
    return tensor_hash(entry.dtype, entry.shape, tensor_bytes(tensor))
