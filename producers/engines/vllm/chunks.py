"""Checks an update and cuts it into the chunks that are sent to vLLM's workers. Pure.

Everything is checked before anything is written. Patches are used where they are exact: the served
version is their base, and vLLM stores its matrices unpacked. On the CPU vLLM packs them, so there a
version is always loaded whole.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.torch.checks import check_patch, check_tensors
from rollstream.producers.engines.vllm.messages import StagedMessage
from rollstream.producers.engines.vllm.parameter_map import ExpectedTensors
from rollstream.storage.weights.tensors import untie
from rollstream.storage.weights.resident import TensorPatch
from rollstream.streams.values import Version

Item = TypeVar("Item")

CHUNK_BYTES = 256 << 20
WHOLE_SHARE_MAX = 0.25  # of all elements; a patch of a whole tensor takes three times its bytes


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """A checked update; `patches` turn the weights of `base` into it. None: load all tensors.
    `messages` are its chunks as staged files, if the workers are in another process.
    """

    base: Version | None
    patches: tuple[TensorPatch, ...] | None
    messages: tuple[StagedMessage, ...] = ()


def check_update(update: WeightUpdate, needed: ExpectedTensors, held: Version | None, in_place: bool) -> PreparedUpdate:
    """Check an update. Raises `EngineRefused`, which names the wrong tensor."""
    own = needed.own(update.tensors)
    usable = in_place and update.base is not None and update.base == held
    if not usable or update.patches is None or _is_mostly_whole(update, own):
        check_tensors(needed.shapes, own)
        return PreparedUpdate(None, None)
    patches, whole = _named(update, needed)
    check_tensors(needed.shapes, own, finite=whole)
    for patch in patches:
        check_patch(patch.name, patch, needed.shapes[patch.name])
    return PreparedUpdate(update.base, (*patches, *(_as_patch(name, own[name]) for name in whole)))


def whole_chunks(
    needed: ExpectedTensors, tensors: Mapping[str, torch.Tensor], bytes_max: int = CHUNK_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """All tensors of a version in the order of its layers, at least one per chunk."""
    own = needed.own(tensors)
    return _cut(own.items(), [tensor.nbytes for tensor in own.values()], bytes_max)


def patch_chunks(patches: Sequence[TensorPatch], bytes_max: int = CHUNK_BYTES) -> Iterator[list[TensorPatch]]:
    """Chunks of patches, sized by the whole tensors that vLLM expands them to."""
    sizes = [torch.Size(p.shape).numel() * p.values.element_size() for p in patches]
    return _cut(patches, sizes, bytes_max)


def _cut(items: Iterable[Item], sizes: Sequence[int], bytes_max: int) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if chunk and total + size > bytes_max:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk


def _named(update: WeightUpdate, needed: ExpectedTensors) -> tuple[list[TensorPatch], set[str]]:
    """Patches, and names of whole tensors, under the names that vLLM loads. A delta holds tied
    tensors once, under any of their names. Tensors that the model does not have are left out.
    """
    owners = untie(update.tensors)[1]
    patches: list[TensorPatch] = []
    whole: set[str] = set()
    for name in needed.shapes:
        names = {name, *needed.tied.get(name, ())}
        names |= {owners[other] for other in names if other in owners}
        if names & set(update.whole):
            whole.add(name)
            continue
        for patch in update.patches or ():
            if patch.name in names and len(patch.values):
                values = (patch.shape, patch.dtype, patch.indices, patch.values)
                patches.append(TensorPatch(name, *values))
    return patches, whole


def _as_patch(name: str, tensor: torch.Tensor) -> TensorPatch:
    """A whole tensor as a patch of all its elements: vLLM takes no whole tensor beside patches."""
    flat = tensor.reshape(-1)
    return TensorPatch(name, tuple(tensor.shape), tensor.dtype, torch.arange(len(flat)), flat)


def _is_mostly_whole(update: WeightUpdate, own: Mapping[str, torch.Tensor]) -> bool:
    anew = sum(update.tensors[name].numel() for name in update.whole if name in update.tensors)
    return anew > WHOLE_SHARE_MAX * sum(tensor.numel() for tensor in own.values())
