"""Writes a version or a checkpoint from all ranks: each writes its tensors and receives the file
lists of the others; rank 0 completes it with the manifest. Each method here is a collective of the
publishing threads (`StepPublisher`).
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from rollstream.consumers.trainer.rank_plan import owners
from rollstream.consumers.trainer.sharded.ranks import Ranks
from rollstream.consumers.trainer.sharded.tensors import gather_rows
from rollstream.errors import StoreError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import create_idempotent
from rollstream.storage.weight_paths import settle
from rollstream.storage.weights.differences import (
    DELTA_STEM,
    EncodedDifferences,
    ParentVersion,
    encode_version,
    write_delta,
)
from rollstream.storage.weights.manifest import (
    Delta,
    FileEntry,
    Manifest,
    TensorEntry,
    TensorFiles,
)
from rollstream.storage.weights.shards import (
    pack_tensors,
    plan_shards,
    shard_name,
    write_shards,
)
from rollstream.storage.weights.tensors import (
    DistributedDifferences,
    DistributedTensors,
    merge_delta,
    merge_disjoint,
    merge_files,
    tensor_hashes,
)

log = logging.getLogger(__name__)


def rank_stem(stem: str, rank: int) -> str:
    """Ranks write different files to one folder."""
    return f"{stem}-rank{rank}"


def gather_results(work: Callable[[], Any], type_: Any, ranks: Ranks) -> list[Any]:
    """Every rank returns the results of all, in the order of ranks. If `work` fails at one rank,
    that one raises its own error and the others `StoreError`, which names the rank. `type_` is the
    type of a result.
    """
    result, failed = b"", None
    try:
        result = msgspec.msgpack.encode(work())
    except Exception as error:  # the other ranks would wait in vain
        log.exception("rank %d could not write", ranks.rank)
        failed = error
    problem = "" if failed is None else f"{type(failed).__name__}: {failed}"
    with ranks.collective():
        outcomes: list[tuple[str, bytes]] = ranks.gather(
            (problem, result), tuple[str, bytes], ranks.writing
        )
    if failed is not None:
        raise failed
    for rank, (problem, _) in enumerate(outcomes):
        if problem:
            raise StoreError(f"rank {rank} of the trainer could not write: {problem}")
    return [msgspec.msgpack.decode(encoded, type=type_) for _, encoded in outcomes]


def gather_written(
    store: ObjectStore, write: Callable[[], Any], type_: Any, ranks: Ranks
) -> list[Any]:
    """Gathers the results of `write` as `gather_results` does; on return all objects of all ranks
    are stored.

    With relays every rank pushes its parts to their chain while it uploads them, in this order:

    1. Every rank begins its push and its uploads (`PushingStore.create`).
    2. Every rank waits until its uploads are stored, then joins the gather of the file lists.
    3. Rank 0 pushes and stores the manifest, moves the pointer, and announces the version
       (`VersionWriter.publish`).

    Until the manifest arrives a relay offers nothing of the version. No rank waits for a push: a
    push may end between 1 and 2, after 3, or never. A part that no push brings is in the store (2)
    before any relay can detect that it is missing (3), and the head of the chain reads it there
    (`storage/relay/intake.py`). An upload that fails in 2 fails at all ranks, so 3 does not happen
    and no rollout acts on the pushed parts.
    """

    def write_through() -> Any:
        written = write()  # 1
        settle(store)  # 2
        return written

    return gather_results(write_through, type_, ranks)


class RankTensors(DistributedTensors):
    """`mine` is this rank's part, which no update may change until it is written."""

    def __init__(self, mine: dict[str, Tensor], ranks: Ranks) -> None:
        self.mine, self._ranks = mine, ranks

    def write_shards(
        self, store: ObjectStore, folder: str, stem: str, shard_bytes: int
    ) -> TensorFiles:
        rank_file_stem = rank_stem(stem, self._ranks.rank)
        return merge_files(
            gather_written(
                store,
                lambda: write_shards(store, folder, rank_file_stem, self.mine, shard_bytes),
                TensorFiles,
                self._ranks,
            )
        )

    def differences(self, parent: Manifest, base: DistributedTensors) -> DistributedDifferences:
        assert isinstance(base, RankTensors)
        return _RankDifferences(self.mine, ParentVersion(parent, base.mine), self._ranks)

    def identities(self) -> tuple[dict[str, str], dict[str, str]]:
        kind = tuple[dict[str, str], dict[str, str]]
        parts = gather_results(lambda: tensor_hashes(self.mine), kind, self._ranks)
        return merge_disjoint(part[0] for part in parts), merge_disjoint(part[1] for part in parts)


class FrozenTensors(DistributedTensors):
    """The base model of adapters, which training never changes. Tensors with a shape in `shapes`
    are divided among the ranks (`rows` is this rank's part), the others whole at every rank.
    Floating-point tensors are hashed and written as `dtype`.

    The files are those of a single process, so any number of ranks can repeat an interrupted write.
    A rank holds at most one whole file in memory.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        self._rows, self._shapes, self._tied = rows, shapes, tied
        self._dtype, self._ranks = dtype, ranks

    def write_shards(
        self, store: ObjectStore, folder: str, stem: str, shard_bytes: int
    ) -> TensorFiles:
        shards = plan_shards(self._sizes(), shard_bytes)
        files: list[FileEntry] = []
        entries: dict[str, TensorEntry] = {}
        failed: list[Exception] = []

        def create(number: int, tensors: Mapping[str, Tensor]) -> None:
            file = shard_name(stem, number, len(shards))
            data, placed = pack_tensors(tensors, file)
            digest = create_idempotent(store, f"{folder}/{file}", data)
            files.append(FileEntry(file, len(data), digest))
            entries.update(placed)

        def write() -> TensorFiles:
            for number, names in enumerate(shards, start=1):
                gathered = {
                    name: self._whole(name, (number - 1) % self._ranks.size) for name in names
                }
                mine = {name: tensor for name, tensor in gathered.items() if tensor is not None}
                if not mine or failed:
                    continue
                try:
                    create(number, mine)
                except Exception as error:  # noqa: BLE001  raised below: the others still gather
                    failed.append(error)
            for error in failed:
                raise error
            return TensorFiles(tuple(files), entries, self._own_ties())

        merged = merge_files(gather_written(store, write, TensorFiles, self._ranks))
        return replace(merged, files=tuple(sorted(merged.files, key=lambda file: file.name)))

    def differences(self, parent: Manifest, base: DistributedTensors) -> DistributedDifferences:
        raise AssertionError("frozen tensors have no differences")

    def identities(self) -> tuple[dict[str, str], dict[str, str]]:
        owner = owners(self._sizes(), self._ranks.size)

        def identify() -> tuple[dict[str, str], dict[str, str]]:
            hashes: dict[str, str] = {}
            for name in self._rows:
                tensor = self._whole(name, owner[name])
                hashes |= {} if tensor is None else tensor_hashes({name: tensor})[0]
            return hashes, self._own_ties()

        kind = tuple[dict[str, str], dict[str, str]]
        parts = gather_results(identify, kind, self._ranks)
        return merge_disjoint(part[0] for part in parts), merge_disjoint(part[1] for part in parts)

    def _whole(self, name: str, owner: int) -> Tensor | None:
        rows = self._rows[name].detach()
        rounded = rows.to("cpu", self._dtype if rows.is_floating_point() else rows.dtype)
        if name not in self._shapes:
            return rounded if self._ranks.rank == owner else None
        with self._ranks.collective():
            return gather_rows(rounded, self._shapes[name], owner, self._ranks, self._ranks.writing)

    def _sizes(self) -> dict[str, int]:
        item = self._dtype.itemsize
        return {
            name: math.prod(self._shapes[name]) * item
            if name in self._shapes
            else rows.numel() * (item if rows.is_floating_point() else rows.element_size())
            for name, rows in self._rows.items()
        }

    def _own_ties(self) -> dict[str, str]:
        return dict(self._tied) if self._ranks.rank == 0 else {}


class _RankDifferences(DistributedDifferences):
    """`bytes` and `weights` cover the parts of all ranks."""

    def __init__(self, mine: dict[str, Tensor], base: ParentVersion, ranks: Ranks) -> None:
        self._ranks = ranks
        self._encoded: list[EncodedDifferences] = []

        def encode() -> tuple[int, TensorFiles]:
            encoded = encode_version(mine, base)
            self._encoded.append(encoded)
            return encoded.bytes, encoded.weights

        parts = gather_results(encode, tuple[int, TensorFiles], ranks)
        self.bytes = sum(part[0] for part in parts)
        self.weights = merge_files(part[1] for part in parts)

    def write(self, store: ObjectStore, folder: str, parent: Manifest, shard_bytes: int) -> Delta:
        rank_file_stem, mine = rank_stem(DELTA_STEM, self._ranks.rank), self._encoded.pop()
        deltas = gather_written(
            store,
            lambda: write_delta(store, folder, mine, parent, shard_bytes, rank_file_stem),
            Delta,
            self._ranks,
        )
        return merge_delta(deltas, parent)
