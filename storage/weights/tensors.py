"""Converts tensors to bytes and back, hashes them (`tensor_hash`), and defines tensors that are
divided among processes (`DistributedTensors`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
import xxhash

from rollstream.storage.stores.base import Data, ObjectStore
from rollstream.storage.weights.manifest import Delta, Manifest, TensorFiles

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_hash(dtype: str, shape: tuple[int, ...], data: Data) -> str:
    """Returns xxh3-128 over `DTYPE[d0,d1,…]` in ASCII (safetensors' dtype name, no spaces), then
    the little-endian row-major bytes.
    """
    hasher = tensor_hasher(dtype, shape)
    hasher.update(data)
    return hasher.hexdigest()


def tensor_hasher(dtype: str, shape: tuple[int, ...]) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{dtype}[{','.join(map(str, shape))}]".encode())


def state_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    # In the order of names, so that equal states give equal hashes.
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode())
        hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


def tensor_of(data: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not data.nbytes:
        return torch.empty(shape, dtype=DTYPES[dtype])
    flat = torch.from_numpy(  # pyright: ignore[reportUnknownMemberType]
        np.frombuffer(data, dtype=np.uint8)
    )
    return flat.view(DTYPES[dtype]).reshape(shape)


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns each tensor under its first name, and the other names that share its memory → that
    name.
    """
    untied: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        # Tensors on the meta device have no address; tied ones are one storage there too.
        address = (
            tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
            if tensor.is_meta
            else tensor.data_ptr()
        )
        place = (tensor.device, address, tensor.dtype, tensor.shape, tensor.stride())
        owner = first.setdefault(place, name) if tensor.numel() else name
        if owner == name:
            untied[name] = tensor
        else:
            tied[name] = owner
    return untied, tied


_V = TypeVar("_V")


class DistributedTensors(ABC):
    """Each call is a collective: all processes make the same calls in the same order and get the
    results of all, and an error in one is raised in every one.

    A writing call returns once the objects of all are durable; then one process writes the manifest
    (invariant 6).
    """

    @abstractmethod
    def write_shards(
        self, store: ObjectStore, folder: str, stem: str, shard_bytes: int
    ) -> TensorFiles:
        """Write as `shards.write_shards`; no two processes write the same file."""

    @abstractmethod
    def differences(self, parent: Manifest, base: "DistributedTensors") -> "DistributedDifferences":
        """Encode as `publish.encode_version`; `base` holds the parent's tensors."""

    @abstractmethod
    def identities(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the hashes by name, and the tied names."""


class DistributedDifferences(ABC):
    weights: TensorFiles
    bytes: int

    @abstractmethod
    def write(self, store: ObjectStore, folder: str, parent: Manifest, shard_bytes: int) -> Delta:
        """Write as `publish.write_delta`."""


Tensors = Mapping[str, torch.Tensor] | DistributedTensors
"""Tensors of one process, or distributed over several."""


def local_tensors(tensors: Tensors) -> Mapping[str, torch.Tensor]:
    assert not isinstance(tensors, DistributedTensors), "these tensors are in several processes"
    return tensors


def tensor_hashes(tensors: Tensors) -> tuple[dict[str, str], dict[str, str]]:
    """Returns each tensor's hash by name, tied ones once, and the tied names."""
    if isinstance(tensors, DistributedTensors):
        return tensors.identities()
    untied, tied = untie(tensors)
    hashes = {
        name: tensor_hash(DTYPE_NAMES[t.dtype], tuple(t.shape), tensor_bytes(t))
        for name, t in untied.items()
    }
    return hashes, tied


def merge_files(parts: Iterable[TensorFiles]) -> TensorFiles:
    process_files = list(parts)
    return TensorFiles(
        tuple(chain.from_iterable(part.files for part in process_files)),
        merge_disjoint(part.tensors for part in process_files),
        merge_disjoint(part.tied for part in process_files),
    )


def merge_delta(parts: Iterable[Delta], parent: Manifest) -> Delta:
    process_deltas = list(parts)
    files = tuple(chain.from_iterable(part.files for part in process_deltas))
    return Delta(parent.hash, files, merge_disjoint(part.tensors for part in process_deltas))


def merge_disjoint(parts: Iterable[Mapping[str, _V]]) -> dict[str, _V]:
    union: dict[str, _V] = {}
    for part in parts:
        assert union.keys().isdisjoint(part), "two processes hold the same tensor"
        union.update(part)
    return union
