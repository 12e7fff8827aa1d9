"""The chunks of an update as messages to vLLM's workers: tensors within a process, and for another
process a staged file with plain values that describe it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollstream.producers.engines.vllm.staging import StagedTensor, StagedFile, staged_tensors
from rollstream.storage.weights.tensors import DTYPE_NAMES, DTYPES
from rollstream.storage.weights.resident import TensorPatch

NamedTensors = Sequence[tuple[str, torch.Tensor]]
ChunkMessage = Mapping[str, Any]
"""Arguments of vLLM's `update_weights`: the fields of `transfer.Chunk`."""


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """A message whose tensors are in a file that exists until it is closed."""

    file: StagedFile
    patched: tuple[tuple[list[int], str], ...] | None = None
    """Shapes and types of the tensors that patches change; None: whole tensors."""

    @property
    def message(self) -> ChunkMessage:
        described = {"path": self.file.path, "entries": self.file.entries}
        return described if self.patched is None else described | {"patched": self.patched}


def stage_tensors(tensors: NamedTensors) -> StagedMessage:
    return StagedMessage(StagedFile(tensors))


def stage_patches(patches: Sequence[TensorPatch]) -> StagedMessage:
    return StagedMessage(StagedFile(patch_parts(patches)), describe_patches(patches))


def patch_parts(patches: Sequence[TensorPatch]) -> list[tuple[str, torch.Tensor]]:
    """The positions and the values of each patch, one after the other."""
    return [(p.name, part) for p in patches for part in (p.indices, p.values)]


def describe_patches(patches: Sequence[TensorPatch]) -> tuple[tuple[list[int], str], ...]:
    """Shapes and types of the tensors that the patches change."""
    return tuple((list(p.shape), DTYPE_NAMES[p.dtype]) for p in patches)


def read_staged_patches(
    path: str, entries: Sequence[StagedTensor], patched: Sequence[tuple[list[int], str]]
) -> list[TensorPatch]:
    """The patches in a staged file."""
    return patches_from_parts(staged_tensors(path, entries), patched)


def patches_from_parts(parts: NamedTensors, patched: Sequence[tuple[list[int], str]]) -> list[TensorPatch]:
    """Patches from their positions and values, which come one after the other."""
    return [
        TensorPatch(name, tuple(shape), DTYPES[kind], indices, values)
        for (shape, kind), (name, indices), (_, values) in zip(
            patched, parts[::2], parts[1::2], strict=True
        )
    ]
