"""Two weight updates as one (`merged_update`), so that an engine can skip the first."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rollstream.producers.engines.base import WeightUpdate
from rollstream.storage.weights.resident import TensorPatch


def merged_update(first: WeightUpdate, then: WeightUpdate) -> WeightUpdate:
    """Returns the update `then` from the base of `first`; unchanged if its base is not the version
    of `first` or a difference is unknown.
    """
    if first.patches is None or then.patches is None or then.base != first.version:
        return then
    whole_names = tuple(dict.fromkeys((*first.whole, *then.whole)))
    by_name: dict[str, list[TensorPatch]] = {}
    for patch in (*first.patches, *then.patches):
        if patch.name not in whole_names:
            by_name.setdefault(patch.name, []).append(patch)
    patches = tuple(_merged_patch(parts, then.tensors) for parts in by_name.values())
    return replace(then, base=first.base, patches=patches, whole=whole_names, prepared=None)


def _merged_patch(parts: Sequence[TensorPatch], tensors: Mapping[str, torch.Tensor]) -> TensorPatch:
    if len(parts) == 1:
        return parts[0]
    indices = torch.unique(torch.cat([patch.indices for patch in parts]))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return replace(parts[-1], indices=indices, values=tensors[parts[-1].name].view(-1)[indices])
