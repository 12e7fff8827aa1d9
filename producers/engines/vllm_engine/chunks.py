"""An update, checked and cut into the chunks that go to vLLM's workers. Pure.

Everything is checked before anything is written. Patches are used where they are exact: the base is
what is served, and vLLM keeps its matrices in place; on the CPU it packs them, so there all of a
version is loaded, whatever changed.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from producers.engines.base import Update
from producers.engines.torch_engine.checks import check_patch, check_tensors
from producers.engines.vllm_engine.messages import StagedMessage
from producers.engines.vllm_engine.needed import Needed
from storage.tensors import untie
from storage.versions.held import Patch
from streams.records import Version

Item = TypeVar("Item")

CHUNK_BYTES = 256 << 20
WHOLE_SHARE_MAX = 0.25  # of all elements; a patch of a whole tensor costs three times its bytes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked update; `patches` turn what is served under `base` into it, None: load it all.
    `messages` are what the workers of another process get of it, if they are in one.
    """

    base: Version | None
    patches: tuple[Patch, ...] | None
    messages: tuple[StagedMessage, ...] = ()


def checked(update: Update, needed: Needed, held: Version | None, in_place: bool) -> Prepared:
    """`EngineRefused` names the tensor that is wrong."""
    own = needed.own(update.tensors)
    usable = in_place and update.base is not None and update.base == held
    if not usable or update.patches is None or _is_mostly_whole(update, own):
        check_tensors(needed.shapes, own)
        return Prepared(None, None)
    patches, whole = _named(update, needed)
    check_tensors(needed.shapes, own, finite=whole)
    for patch in patches:
        check_patch(patch.name, patch, needed.shapes[patch.name])
    return Prepared(update.base, (*patches, *(_as_patch(name, own[name]) for name in whole)))


def whole_chunks(
    needed: Needed, tensors: Mapping[str, torch.Tensor], bytes_max: int = CHUNK_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """All of a version in the order of its layers, at least one tensor at a time."""
    own = needed.own(tensors)
    return _cut(own.items(), [tensor.nbytes for tensor in own.values()], bytes_max)


def patch_chunks(patches: Sequence[Patch], bytes_max: int = CHUNK_BYTES) -> Iterator[list[Patch]]:
    """By what vLLM unfolds them to: a whole tensor each."""
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


def _named(update: Update, needed: Needed) -> tuple[list[Patch], set[str]]:
    """Patches and whole tensors under the names that vLLM loads: a delta holds tied tensors once,
    under any of their names. What the model does not need is left out.
    """
    owners = untie(update.tensors)[1]
    patches: list[Patch] = []
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
                patches.append(Patch(name, *values))
    return patches, whole


def _as_patch(name: str, tensor: torch.Tensor) -> Patch:
    """vLLM takes no whole tensor beside patches."""
    flat = tensor.reshape(-1)
    return Patch(name, tuple(tensor.shape), tensor.dtype, torch.arange(len(flat)), flat)


def _is_mostly_whole(update: Update, own: Mapping[str, torch.Tensor]) -> bool:
    anew = sum(update.tensors[name].numel() for name in update.whole if name in update.tensors)
    return anew > WHOLE_SHARE_MAX * sum(tensor.numel() for tensor in own.values())
