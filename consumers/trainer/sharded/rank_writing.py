"""Writes a version or a checkpoint from all ranks at once: each rank writes the tensors that it
holds, and learns what the others have written.

Every rank publishes the same steps in the same order in a thread of its own (`publisher.py`), so
that all of them train meanwhile, and calls the methods below in the same order: each is a
collective of these threads. Rank 0 then completes the version with the manifest of all parts.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from rollstream.consumers.trainer.sharded.ranks import Ranks
from rollstream.errors import StoreError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.manifest import Delta, Manifest, TensorFiles
from rollstream.storage.weights.publish import (
    DELTA_STEM,
    EncodedDifferences,
    ParentVersion,
    encode_version,
    write_delta,
)
from rollstream.storage.weights.shards import write_shards
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
    """The file name stem of one rank."""
    return f"{stem}-rank{rank}"


def gather_results(work: Callable[[], Any], type_: Any, ranks: Ranks) -> list[Any]:
    """The results of `work` at all ranks, in the order of ranks, at every rank. Where it fails at
    one, that one raises its own error and the others raise `StoreError`, which names it.
    """
    result, failed = b"", None
    try:
        result = msgspec.msgpack.encode(work())
    except Exception as error:  # the other ranks would wait in vain
        log.exception("rank %d could not write", ranks.rank)
        failed = error
    problem = "" if failed is None else f"{type(failed).__name__}: {failed}"
    with ranks.collective():
        found: list[tuple[str, bytes]] = ranks.gather(
            (problem, result), tuple[str, bytes], ranks.writing
        )
    if failed is not None:
        raise failed
    for rank, (problem, _) in enumerate(found):
        if problem:
            raise StoreError(f"rank {rank} of the trainer could not write: {problem}")
    return [msgspec.msgpack.decode(one, type=type_) for _, one in found]


class RankTensors(DistributedTensors):
    """A copy of the model's tensors, of which every rank holds a part, this one `mine`."""

    def __init__(self, mine: dict[str, Tensor], ranks: Ranks) -> None:
        self.mine, self._ranks = mine, ranks

    def write_shards(
        self, store: ObjectStore, folder: str, stem: str, shard_bytes: int
    ) -> TensorFiles:
        own = rank_stem(stem, self._ranks.rank)
        return merge_files(
            gather_results(
                lambda: write_shards(store, folder, own, self.mine, shard_bytes),
                TensorFiles,
                self._ranks,
            )
        )

    def differences(self, parent: Manifest, base: DistributedTensors) -> DistributedDifferences:
        assert isinstance(base, RankTensors)
        return _RankDifferences(self.mine, ParentVersion(parent, base.mine), self._ranks)

    def identities(self) -> tuple[dict[str, str], dict[str, str]]:
        kind = tuple[dict[str, str], dict[str, str]]
        found = gather_results(lambda: tensor_hashes(self.mine), kind, self._ranks)
        return merge_disjoint(one[0] for one in found), merge_disjoint(one[1] for one in found)


class _RankDifferences(DistributedDifferences):
    """This rank's part of an encoded version, and what the manifest states about all parts."""

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
        own, mine = rank_stem(DELTA_STEM, self._ranks.rank), self._encoded.pop()
        found = gather_results(
            lambda: write_delta(store, folder, mine, parent, shard_bytes, own), Delta, self._ranks
        )
        return merge_delta(found, parent)
