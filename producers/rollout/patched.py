"""Merges two consecutive updates into one. Pure.

A version that was fetched ahead of time and never served then costs its engine nothing: the next
update is still a patch of the served version.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rollstream.producers.engines.base import WeightUpdate
from rollstream.storage.weights.resident import TensorPatch


def merged_update(first: WeightUpdate, then: WeightUpdate) -> WeightUpdate:
    """Return `then` as an update from the base of `first`, which was never served. Returns `then`
    unchanged if the two do not join.
    """
    if first.patches is None or then.patches is None or then.base != first.version:
        return then
    whole = tuple(dict.fromkeys((*first.whole, *then.whole)))
    by_name: dict[str, list[TensorPatch]] = {}
    for patch in (*first.patches, *then.patches):
        if patch.name not in whole:
            by_name.setdefault(patch.name, []).append(patch)
    patches = tuple(_merged_patch(parts, then.tensors) for parts in by_name.values())
    return replace(then, base=first.base, patches=patches, whole=whole, prepared=None)


def _merged_patch(parts: Sequence[TensorPatch], tensors: Mapping[str, torch.Tensor]) -> TensorPatch:
    """All elements that any of the patches changed, with their present values."""
    if len(parts) == 1:
        return parts[0]
    indices = torch.unique(torch.cat([patch.indices for patch in parts]))
    return replace(parts[-1], indices=indices, values=tensors[parts[-1].name].view(-1)[indices])
