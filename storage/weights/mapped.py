"""Keeps one version's tensors in a mapped file and updates it in place: the copy that a rollout
holds beside its engine, and that the engine's workers map. Until every tensor matches, `version` is
None and nothing may be served from the file.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.delta.codec import bits_of
from rollstream.storage.weights.delta.coding import Bits, Indices, element_of
from rollstream.storage.weights.fetch_plan import HeldTensors
from rollstream.storage.weights.manifest import Manifest, TensorEntry, read_manifest
from rollstream.storage.weights.resident import ResidentUpdate, TensorPatch
from rollstream.storage.weights.streamed import (
    ScratchFile,
    StreamedTensors,
    WrongBase,
    stream_tensors,
)
from rollstream.storage.weights.tensors import (
    DTYPE_NAMES,
    DTYPES,
    tensor_bytes,
    tensor_hash,
    tensor_of,
)
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes, of each tensor's begin in a file
INDEX_BYTES = 8  # of the position of a changed element in a patch (int64)


@dataclass(frozen=True, eq=False)
class MappedTensors(Mapping[str, torch.Tensor]):
    """Maps all names of a version to tensors whose memory is the mapped file; tied names share one.
    They change only in `MappedWeights.update`.
    """

    manifest: Manifest
    file: ScratchFile
    _tensors: Mapping[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self.manifest.weights.owner(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.weights.names)

    def __len__(self) -> int:
        return len(self.manifest.weights.names)

    def begin(self, tensor: torch.Tensor) -> int:
        """Returns where one of these tensors begins in the file, in bytes, for other processes that
        map it; 0 without elements.
        """
        if not tensor.nbytes:
            return 0
        begin = tensor.data_ptr() - np.frombuffer(self.file.data, np.uint8).ctypes.data
        assert 0 <= begin <= len(self.file.data) - tensor.nbytes, "a tensor of this file"
        return begin

    def damaged(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `names` whose bytes in the file no longer have the manifest's hash."""
        return tuple(name for name in names if not self._is_intact(name))

    def _is_intact(self, name: str) -> bool:
        # The disk may return other bytes than were written.
        entry = self.manifest.weights.entry(name)
        return tensor_hash(entry.dtype, entry.shape, tensor_bytes(self[name])) == entry.hash


class MappedWeights:
    """Holds all tensors of one version in a `ScratchFile`. For one thread only."""

    def __init__(self) -> None:
        self._file: ScratchFile | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._layout: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._hashes: dict[str, str] = {}
        """Hashes of the tensors in the file, except of torn ones, which an update wrote only in
        part: the next update decodes these again.
        """
        self._number = 0
        """No tensor in the file is of a version before this number."""
        self.manifest: Manifest | None = None
        self.version: Version | None = None

    @property
    def tensors(self) -> MappedTensors:
        """Returns the tensors of the held version; `version` must not be None."""
        assert self.manifest is not None, "no version is held whole"
        assert self._file is not None, "it holds the version"
        return MappedTensors(self.manifest, self._file, dict(self._tensors))

    def update(
        self, store: ObjectStore, target: Version, manifest_hash: str | None = None
    ) -> ResidentUpdate:
        """Make the tensors in the file those of `target`, each compared with its hash, and report
        the changes. The announced `manifest_hash` makes sure of exactly the announced version.

        Raises `ObjectMissing` if the version, or every path to one of its tensors, is gone,
        `CorruptObject`, which names the tensor and object that differ, `StoreError` if the disk has
        no room, and any error of the store.

        1. If names, types or shapes differ, reserve a new file and give the held version up.
        2. Fetch and verify all needed bytes; after an error the file is unchanged.
        3. Decode each differing tensor, a segment at a time, into the file, and compare it with its
           hash. After an error `version` is None, and the next update repairs the file.

        Tensors with another base than expected repeat 2 and 3 once without one. Memory is a few
        segments of a tensor and two pieces of a fetched range.
        """
        manifest = read_manifest(store, target, manifest_hash)
        before = self.manifest
        layout = {name: (e.dtype, e.shape) for name, e in manifest.weights.tensors.items()}
        if layout != self._layout:
            self._lay_out(manifest.weights.tensors)  # 1
            self._layout, before = layout, None
        patches: dict[str, TensorPatch] = {}
        rewritten: dict[str, None] = {}
        fetched, wrong = 0, set[str]()
        while True:
            streamed = stream_tensors(store, manifest, HeldTensors(self._hashes, self._number))  # 2
            fetched += streamed.fetched_bytes
            self.manifest = self.version = None
            self._number = min(self._number, target.number)
            try:
                self._write(streamed, patches, rewritten)  # 3
                break
            except WrongBase as error:
                # Its hash is forgotten, so the next plan has no base for it.
                if error.name in wrong:
                    raise
                log.error("version %s is fetched again without a base: %s", target, error)
                wrong.add(error.name)
        self.manifest, self.version, self._number = manifest, target, target.number
        if before is None or before.weights.tied != manifest.weights.tied:
            return ResidentUpdate(manifest, None, None, tuple(layout), fetched)
        return ResidentUpdate(
            manifest, before.version, tuple(patches.values()), tuple(rewritten), fetched
        )

    def _lay_out(self, entries: Mapping[str, TensorEntry]) -> None:
        begins: dict[str, int] = {}
        end = 0
        for name, entry in entries.items():
            begins[name] = end
            end += -(-entry.bytes // ALIGNMENT) * ALIGNMENT
        # After an error here the old file still holds its version.
        file = ScratchFile(end)
        self.manifest = self.version = None
        self._hashes, self._number = {}, 0
        self._file = file
        self._tensors = {
            name: tensor_of(file.data[begin : begin + entry.bytes], entry.dtype, entry.shape)
            for (name, begin), entry in zip(begins.items(), entries.values(), strict=True)
        }

    def _write(
        self, streamed: StreamedTensors, patches: dict[str, TensorPatch], rewritten: dict[str, None]
    ) -> None:
        """Write the differing tensors. Each is reported in `patches`, or in `rewritten` if it was
        torn or more than half of its elements may change.
        """
        entries = streamed.manifest.weights.tensors
        differing = [name for name in entries if streamed.differs(name)]
        counts = {name: streamed.changes_max(name) for name in differing}
        kinds = {name: DTYPES[entries[name].dtype] for name in differing}
        scratch = ScratchTensors(
            sum(patch_bytes(counts[n], kinds[n]) for n in differing if counts[n])
        )
        for name in differing:
            bits = bits_of(tensor_bytes(self._tensors[name]), element_of(entries[name].dtype))
            # Torn from the first write on, until its hash is right.
            is_torn = self._hashes.pop(name, None) is None
            patch = None
            if counts[name]:
                patch = PatchParts(entries[name], *scratch.patch(counts[name], kinds[name]))
            for part in streamed.parts(name, lambda begin, end, bits=bits: bits[begin:end].copy()):
                into = bits[part.begin : part.begin + len(part.values)]
                if part.changed is None:
                    into[:] = part.values
                    continue
                into[part.changed] = part.values[part.changed]
                if patch is not None:
                    patch.add(part.changed + part.begin, part.values[part.changed])
            self._hashes[name] = entries[name].hash
            if patch is None or is_torn:
                rewritten[name] = None
            else:
                patches[name] = patch.finish(name)


@dataclass(slots=True)
class PatchParts:
    """Collects one tensor's changed elements: the first `count` of `indices` and `values`."""

    entry: TensorEntry
    indices: torch.Tensor
    values: torch.Tensor
    count: int = 0

    def add(self, indices: Indices, values: Bits) -> None:
        """Add positions in the flat tensor, and their new bits."""
        end = self.count + len(indices)
        self.indices.numpy()[self.count : end] = indices
        self.values.view(torch.uint8).numpy().view(values.dtype)[self.count : end] = values
        self.count = end

    def finish(self, name: str) -> TensorPatch:
        kind = DTYPES[self.entry.dtype]
        indices, values = self.indices[: self.count], self.values[: self.count]
        return TensorPatch(name, self.entry.shape, kind, indices, values)


class ScratchTensors:
    """Reserves a file for the tensors of one update, freed with the last of them: its memory is
    then none of this process, if it is large.
    """

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes: the sum of what `patch_bytes` returns."""
        self._data = ScratchFile(size).data if size else memoryview(b"")
        self._end = 0

    def patch(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns room for `count` positions (int64), and for as many elements."""
        middle = self._end + count * INDEX_BYTES
        end = middle + count * dtype.itemsize
        indices = tensor_of(self._data[self._end : middle], "I64", (count,))
        values = tensor_of(self._data[middle:end], DTYPE_NAMES[dtype], (count,))
        self._end = -(-end // ALIGNMENT) * ALIGNMENT
        return indices, values


def patch_bytes(count: int, dtype: torch.dtype) -> int:
    """Returns the room that a patch of so many elements takes in `ScratchTensors`."""
    return count * (INDEX_BYTES + dtype.itemsize) + ALIGNMENT
