"""Receives a weight update beside decoding, in chunks. Only one whose tensors match their hashes
can be loaded.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollstream.errors import CorruptObject, EngineRefused
from rollstream.producers.engines.vllm.local.staging import StagedTensor
from rollstream.storage.weights.tensors import tensor_hash, tensor_of


@dataclass(slots=True)
class ChunkUpload:
    """The first `received` bytes of `data` are filled; `tensors` is None until the chunk is
    checked.
    """

    data: bytearray
    received: int = 0
    tensors: list[tuple[str, torch.Tensor]] | None = None

    def put(self, begin: int, piece: bytes) -> None:
        """Add a piece. Raises `EngineRefused` unless it follows the bytes received so far."""
        if begin != self.received or begin + len(piece) > len(self.data):
            raise EngineRefused(
                f"a piece at {begin} of {len(piece)} bytes does not follow {self.received} of "
                f"{len(self.data)}"
            )
        self.data[begin : begin + len(piece)] = piece
        self.received += len(piece)

    def check(self, entries: Sequence[StagedTensor], hashes: Sequence[str]) -> None:
        """Raises `CorruptObject`, which names the tensor, if bytes are missing or it differs from
        its hash.
        """
        if self.received != len(self.data):
            raise CorruptObject(f"{self.received} of {len(self.data)} bytes arrived")
        view = memoryview(self.data)
        tensors: list[tuple[str, torch.Tensor]] = []
        for entry, expected_hash in zip(entries, hashes, strict=True):
            begin, shape = entry["begin"], tuple(entry["shape"])
            part = view[begin : begin + entry["bytes"]]
            if tensor_hash(entry["dtype"], shape, part) != expected_hash:
                raise CorruptObject(f"tensor {entry['name']!r} differs from its hash")
            tensors.append((entry["name"], tensor_of(part, entry["dtype"], shape)))
        self.tensors = tensors


class ChunkUploads:
    """Uploads of the rollout that claimed the server last (`owner`); calls of any other are
    refused. Chunks are named `SET/NUMBER`.
    """

    def __init__(self) -> None:
        self.owner = ""
        self._set = ""
        self._chunks: dict[str, ChunkUpload] = {}

    def claim(self, owner: str) -> None:
        self.owner, self._set = owner, ""
        self._chunks.clear()

    def check_owner(self, owner: str) -> None:
        """Raise `EngineRefused` unless this rollout was the last to claim the server."""
        if owner != self.owner:
            raise EngineRefused(
                f"rollout {owner!r} no longer has this server, {self.owner!r} claimed it: "
                "one rollout for each server"
            )

    def put(self, owner: str, name: str, size: int, begin: int, piece: str) -> None:
        self.check_owner(owner)
        group = name.partition("/")[0]
        # At most one update is kept.
        if group != self._set:
            self._chunks.clear()
            self._set = group
        if name not in self._chunks:  # the buffer of a chunk is allocated once, not for each piece
            self._chunks[name] = ChunkUpload(bytearray(size))
        self._chunks[name].put(begin, base64.b64decode(piece, validate=True))

    def check(
        self, owner: str, name: str, entries: Sequence[StagedTensor], hashes: Sequence[str]
    ) -> None:
        """Check a received chunk, so that `pop` may return it. One that fails is dropped, and
        `CorruptObject` names the tensor.
        """
        self.check_owner(owner)
        chunk = self._chunks.get(name)
        if chunk is None:
            raise EngineRefused(f"chunk {name!r} is not here")
        try:
            chunk.check(entries, hashes)
        except CorruptObject:
            del self._chunks[name]
            raise

    def pop(self, name: str) -> list[tuple[str, torch.Tensor]]:
        """Removes a checked chunk and returns its tensors by name. Raises `EngineRefused` if it is
        missing or was not checked.
        """
        chunk = self._chunks.pop(name, None)
        if chunk is None or chunk.tensors is None:
            raise EngineRefused(f"weights: chunk {name!r} is not here, or was not checked")
        return chunk.tensors


UPLOADS = ChunkUploads()
"""The uploads of this worker's process: `worker.py` adds chunks, `transfer.py` removes them."""
