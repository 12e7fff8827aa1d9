"""Loads versions into one vLLM engine: `prepare` runs beside decoding, `load` between two decode
steps. No weight is written before the check has passed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.torch.weights import check_patch, check_tensors
from rollstream.producers.engines.vllm.local.core import LocalCore
from rollstream.producers.engines.vllm.local.parameter_map import (
    ExpectedTensors,
    PartState,
    combined,
)
from rollstream.producers.engines.vllm.local.staging import (
    ChunkMessage,
    StagedChunks,
    StagedMessage,
    stage_patches,
    stage_tensors,
)
from rollstream.storage.weights.mapped import MappedTensors
from rollstream.storage.weights.resident import TensorPatch
from rollstream.storage.weights.tensors import untie
from rollstream.streams.values import Version

Item = TypeVar("Item")

CHUNK_BYTES = 256 << 20
# Of all elements. Above it an update is loaded whole, because a whole tensor that is passed as a
# patch takes three times its bytes.
WHOLE_SHARE_MAX = 0.25


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """`patches` turn the weights of `base` into the new version; None: load all tensors. If the
    workers are in another process, `chunks` has them in shared memory (`staging.py`).
    """

    base: Version | None
    patches: tuple[TensorPatch, ...] | None
    chunks: StagedChunks | None = None


def check_update(
    update: WeightUpdate, needed: ExpectedTensors, served_version: Version | None, in_place: bool
) -> PreparedUpdate:
    """Chooses patches only if their base is `served_version`, if vLLM stores its matrices as a
    checkpoint does (`in_place`), and if at most `WHOLE_SHARE_MAX` of the update is whole tensors.
    Raises `EngineRefused`, which names the wrong tensor.
    """
    needed.check_own(update.tensors)
    needed_tensors = needed.own(update.tensors)
    usable = in_place and update.base is not None and update.base == served_version
    if not usable or update.patches is None or _is_mostly_whole(update, needed_tensors):
        check_tensors(needed.shapes, needed_tensors)
        return PreparedUpdate(None, None)
    patches, whole_names = _named(update, needed)
    check_tensors(needed.shapes, needed_tensors, finite=whole_names)
    for patch in patches:
        check_patch(patch.name, patch, needed.shapes[patch.name])
    return PreparedUpdate(
        update.base,
        (*patches, *(_as_patch(name, needed_tensors[name]) for name in whole_names)),
    )


def whole_chunks(
    needed: ExpectedTensors, tensors: Mapping[str, torch.Tensor], bytes_max: int = CHUNK_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    needed_tensors = needed.own(tensors)
    return _cut(
        needed_tensors.items(), [tensor.nbytes for tensor in needed_tensors.values()], bytes_max
    )


def patch_chunks(
    patches: Sequence[TensorPatch], bytes_max: int = CHUNK_BYTES
) -> Iterator[list[TensorPatch]]:
    # vLLM expands a patch to its whole tensor.
    sizes = [torch.Size(p.shape).numel() * p.values.element_size() for p in patches]
    return _cut(patches, sizes, bytes_max)


def _cut(items: Iterable[Item], sizes: Sequence[int], bytes_max: int) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        # A larger item is a chunk alone.
        if chunk and total + size > bytes_max:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk


def _named(update: WeightUpdate, needed: ExpectedTensors) -> tuple[list[TensorPatch], set[str]]:
    owners = untie(update.tensors)[1]
    patches: list[TensorPatch] = []
    whole_names: set[str] = set()
    for name in needed.shapes:
        # vLLM loads by the names of `shapes`; a delta holds tied tensors once, under any of their
        # names.
        names = {name, *needed.tied.get(name, ())}
        names |= {owners[other] for other in names if other in owners}
        if names & set(update.whole):
            whole_names.add(name)
            continue
        for patch in update.patches or ():
            if patch.name in names and len(patch.values):
                values = (patch.shape, patch.dtype, patch.indices, patch.values)
                patches.append(TensorPatch(name, *values))
    return patches, whole_names


def _as_patch(name: str, tensor: torch.Tensor) -> TensorPatch:
    # vLLM does not take whole tensors and patches in one update.
    flat = tensor.reshape(-1)
    return TensorPatch(name, tuple(tensor.shape), tensor.dtype, torch.arange(len(flat)), flat)


def _is_mostly_whole(update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> bool:
    elements = sum(update.tensors[name].numel() for name in update.whole if name in update.tensors)
    return elements > WHOLE_SHARE_MAX * sum(tensor.numel() for tensor in tensors.values())


class VllmWeights:
    """With `in_place` vLLM stores its matrices as a checkpoint does, so that they can be patched
    (on the CPU it repacks them).
    """

    def __init__(self, core: LocalCore, needed: ExpectedTensors, in_place: bool) -> None:
        self._core, self._needed, self._in_place = core, needed, in_place
        self.held: Version | None = None
        """The version whose weights are served whole; None during a load and after a failed one."""

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """Returns the update with `prepared` set. Raises `EngineRefused`, which names the wrong
        tensor.
        """
        prepared = check_update(update, self._needed, self.held, self._in_place)
        if self._core.has_process:
            # The first chunks are copied to shared memory now, beside decoding, the others while
            # earlier ones are loaded.
            prepared = replace(prepared, chunks=StagedChunks(self._staged(update, prepared)))
        return replace(update, prepared=prepared)

    def load(self, update: WeightUpdate) -> None:
        """Serve these weights; what cannot be applied any more is prepared again. Raises
        `EngineRefused`: if preparing fails, `held` is still served; if loading fails, no version
        is.
        """
        prepared = update.prepared
        if not isinstance(prepared, PreparedUpdate) or not self._is_applicable(prepared):
            prepared = self.prepare(update).prepared
            assert isinstance(prepared, PreparedUpdate), "prepare sets it"
        self.held = None
        try:
            self._core.call("start_weight_update")
            for message in self._messages(update, prepared):
                self._core.call("update_weights", message)
            self._core.call("finish_weight_update")
        except Exception as error:
            self._core.call("give_up_update")
            raise EngineRefused(
                f"weights: version {update.version} was not loaded completely; nothing is served "
                f"until a version is: {error}"
            ) from error
        self._core.stamp(str(update.version))
        self.held = update.version

    def compare(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        """Compares at all workers: a tensor differs if it differs at any, and is counted only if
        every part of it was read.
        """
        needed_tensors, needed = self._needed.own(tensors), self._needed
        served_names = sorted({needed.named(name) for name in names} & set(needed.shapes))
        mapped = _mapped(tensors)
        states = {name: self._state(name, needed_tensors[name], mapped) for name in served_names}
        differing = tuple(name for name, state in states.items() if state == "differs")
        read = sum(state == "same" for state in states.values()) + len(differing)
        return WeightComparison(read, differing)

    def _is_applicable(self, prepared: PreparedUpdate) -> bool:
        # Staged files are loaded once.
        is_used = prepared.chunks is not None and prepared.chunks.is_used
        return not is_used and (prepared.patches is None or prepared.base == self.held)

    def _messages(self, update: WeightUpdate, prepared: PreparedUpdate) -> Iterator[ChunkMessage]:
        if prepared.chunks is not None:
            yield from prepared.chunks.messages()
        elif prepared.patches is not None:
            yield from ({"patches": some} for some in patch_chunks(prepared.patches))
        else:
            yield from ({"tensors": some} for some in whole_chunks(self._needed, update.tensors))

    def _staged(self, update: WeightUpdate, prepared: PreparedUpdate) -> Iterator[StagedMessage]:
        if prepared.patches is not None:
            yield from map(stage_patches, patch_chunks(prepared.patches))
        else:
            # Workers map a version's own file, and load their parts of it.
            mapped = _mapped(update.tensors)
            chunks = whole_chunks(self._needed, update.tensors)
            yield from (stage_tensors(chunk, mapped) for chunk in chunks)

    def _state(self, name: str, tensor: torch.Tensor, mapped: MappedTensors | None) -> PartState:
        names, tensors = [name, *self._needed.tied.get(name, ())], [(name, tensor)]
        states = self._core.call_with_tensors("compare_part", names, tensors=tensors, mapped=mapped)
        return combined(states)


def _mapped(tensors: Mapping[str, torch.Tensor]) -> MappedTensors | None:
    return tensors if isinstance(tensors, MappedTensors) else None
