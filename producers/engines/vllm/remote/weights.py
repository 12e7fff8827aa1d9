"""Loads weights into a vLLM server: `prepare` sends chunks while the server decodes, and its
workers check their hashes; `load` makes them load what they received.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.vllm.local.parameter_map import ExpectedTensors
from rollstream.producers.engines.vllm.local.staging import (
    ALIGNMENT,
    StagedTensor,
    describe_patches,
    patch_parts,
)
from rollstream.producers.engines.vllm.local.weights import (
    PreparedUpdate,
    check_update,
    patch_chunks,
    whole_chunks,
)
from rollstream.producers.engines.vllm.remote.core import RemoteCore
from rollstream.producers.engines.vllm.remote.http import LOAD_TIMEOUT_S
from rollstream.storage.weights.tensors import DTYPE_NAMES, DTYPES, tensor_bytes, tensor_hash
from rollstream.streams.values import Version

PIECE_BYTES = 4 << 20  # of a chunk in one request, because receiving a piece delays a decode step
NAMES_AT_ONCE = 4  # tensors whose hashes are requested at once, for the same reason

Parts = Sequence[tuple[str, torch.Tensor]]
Patched = tuple[tuple[list[int], str], ...]
"""Shape and type of each tensor that the patches of a chunk change, in their order."""


@dataclass(frozen=True, slots=True)
class SentUpdate:
    """An update in the workers' memory. `names` has the name of each chunk, and for a chunk of
    patches what they change. Patches turn the weights of `base` into the new ones.
    """

    base: Version | None
    is_patch: bool
    names: tuple[tuple[str, Patched | None], ...]


class RemoteWeights:
    """With `in_place` vLLM stores its matrices as a checkpoint does, so that they can be patched.
    With `is_parallel` they are split between GPUs and cannot be compared.
    """

    def __init__(
        self, core: RemoteCore, needed: ExpectedTensors, in_place: bool, is_parallel: bool
    ) -> None:
        self._core, self._routes, self._needed = core, core.routes, needed
        self._in_place, self._is_parallel = in_place, is_parallel
        self._updates_sent, self._is_loading = 0, False
        self.held: Version | None = None
        """The version whose weights are served whole; None during a load and after a failed one."""

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """Send the update to the workers, as patches where possible. Raises `EngineRefused`, which
        names the wrong tensor.
        """
        prepared = check_update(update, self._needed, self.held, self._in_place)
        self._updates_sent += 1
        names = [
            (self.send_chunk(f"{self._core.owner}.{self._updates_sent}/{number}", parts), patched)
            for number, (parts, patched) in enumerate(self._chunks(update, prepared))
        ]
        sent = SentUpdate(prepared.base, prepared.patches is not None, tuple(names))
        return replace(update, prepared=sent)

    def load(self, update: WeightUpdate) -> None:
        """If sending them first (not prepared, or patches of another version than the held one)
        raises `EngineRefused`, `held` stays; if the load itself does, no version is held.
        """
        sent = update.prepared
        if not isinstance(sent, SentUpdate) or (sent.is_patch and sent.base != self.held):
            sent = self.prepare(update).prepared
            assert isinstance(sent, SentUpdate), "prepare sets it"
        self.held = None
        if self._is_loading:
            self._give_up()
        try:
            self._is_loading = True
            self._routes.post("/start_weight_update")
            for name, patched in sent.names:
                info = {"upload": name} | ({} if patched is None else {"patched": patched})
                self._routes.post("/update_weights", {"update_info": info}, within_s=LOAD_TIMEOUT_S)
            version = {"weight_version": str(update.version)}
            self._routes.post("/finish_weight_update", version, within_s=LOAD_TIMEOUT_S)
        except EngineRefused as error:
            raise EngineRefused(
                f"weights: version {update.version} was not loaded whole, nothing is served until "
                f"one is: {error}"
            ) from error
        self._is_loading = False
        self._core.loads += 1
        self.held = update.version

    def compare(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        """Compares by hashes that the workers compute; nothing (count 0) where tensors are split
        between GPUs.
        """
        if self._is_parallel:
            return WeightComparison(0, ())
        needed_tensors, needed = self._needed.own(tensors), self._needed
        served_names = sorted({needed.named(name) for name in names} & set(needed.shapes))
        places = {name: (name, *needed.tied.get(name, ())) for name in served_names}
        served = self._served([place for name in served_names for place in places[name]])
        differing = [
            name
            for name in served_names
            if any(_differs(served[p], needed_tensors[name]) for p in places[name])
        ]
        return WeightComparison(len(served_names), tuple(differing))

    def _served(self, places: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
        hashes: dict[str, list[tuple[str, str]]] = {}
        for begin in range(0, len(places), NAMES_AT_ONCE):
            some = places[begin : begin + NAMES_AT_ONCE]
            # Dtype and hash of every copy that is served under each name.
            hashes |= self._routes.call("served_hashes", some, within_s=LOAD_TIMEOUT_S)[0]
        return hashes

    def _chunks(
        self, update: WeightUpdate, prepared: PreparedUpdate
    ) -> Iterator[tuple[Parts, Patched | None]]:
        if prepared.patches is None:
            chunks = whole_chunks(self._needed, update.tensors)
            yield from ((parts, None) for parts in chunks)
            return
        for patches in patch_chunks(prepared.patches):
            yield patch_parts(patches), describe_patches(patches)

    def send_chunk(self, name: str, parts: Parts) -> str:
        """Send a chunk to all workers piece by piece, in a staged file's layout; they then check
        its hashes. Returns the name.
        """
        entries, hashes, size = _laid_out(parts)
        owner, received = self._core.owner, 0
        for (_, tensor), entry in zip(parts, entries, strict=True):
            data, end = tensor_bytes(tensor), entry["begin"]
            for piece in (bytes(end - received), *_pieces(data)):
                if len(piece):
                    text = base64.b64encode(piece).decode("ascii")
                    self._routes.call("put_piece", owner, name, size, received, text)
                    received += len(piece)
        self._routes.call("check_chunk", owner, name, entries, hashes, within_s=LOAD_TIMEOUT_S)
        return name

    def _give_up(self) -> None:
        # The workers then accept a new load, which overwrites the partly loaded weights.
        self._routes.call("give_up_update")
        self._is_loading = False


def _laid_out(parts: Parts) -> tuple[list[StagedTensor], list[str], int]:
    entries: list[StagedTensor] = []
    hashes: list[str] = []
    end = 0
    for name, tensor in parts:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        shape, kind = tensor.shape, DTYPE_NAMES[tensor.dtype]
        entry = StagedTensor(
            name=name, dtype=kind, shape=list(shape), begin=begin, bytes=tensor.nbytes
        )
        entries.append(entry)
        hashes.append(tensor_hash(kind, tuple(shape), tensor_bytes(tensor)))
        end = begin + tensor.nbytes
    return entries, hashes, end


def _pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[begin : begin + PIECE_BYTES] for begin in range(0, data.nbytes, PIECE_BYTES))


def _differs(copies: Iterable[Sequence[str]], tensor: torch.Tensor) -> bool:
    for kind, served_hash in copies:
        # A copy may be served in another dtype.
        mine = tensor.to(DTYPES[kind])
        if tensor_hash(kind, tuple(mine.shape), tensor_bytes(mine)) != served_hash:
            return True
    return False
