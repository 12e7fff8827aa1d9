"""Small version histories for the tests of deltas: tensors that change a little at each step."""

import numpy as np
import torch

from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.values import Version
from testbed.memory import MemoryStore

FILES = {"config.json": b"{}"}


def first_tensors(seed=0):
    draw = torch.Generator().manual_seed(seed)
    embed = torch.randn(40, 16, generator=draw).to(torch.bfloat16)
    return {
        "embed": embed,
        "head": embed,  # tied
        "layer.weight": torch.randn(64, 16, generator=draw),
        "layer.count": torch.arange(30),
        "layer.mask": torch.zeros(9, dtype=torch.bool),
        "scale": torch.tensor(1.5, dtype=torch.float16),
        "none": torch.empty(0, 4),
    }


def changed(tensors, seed, share=0.02):
    """A copy in which this share of elements (at least one a tensor) has other bits."""
    draw = np.random.default_rng(seed)
    copies: dict[int, torch.Tensor] = {}
    result = {}
    for name, tensor in tensors.items():
        key = tensor.data_ptr() if tensor.numel() else id(tensor)
        if key not in copies:
            copies[key] = _changed(tensor, draw, share)
        result[name] = copies[key]
    return result


def _changed(tensor, draw, share):
    copy = tensor.clone()
    flat = copy.reshape(-1)
    where = draw.integers(0, max(1, len(flat)), max(1, int(share * len(flat))))
    if len(flat):
        present = flat[where]
        new = ~present if flat.dtype == torch.bool else present * 1.25 + 1
        flat[where] = new.to(flat.dtype)
    return copy


class History:
    """Versions 0, 1, … of one run in `store`, each made from the one before."""

    def __init__(self, store=None, tensors=None, shard_bytes=1 << 20):
        self.store = MemoryStore() if store is None else store
        self.shard_bytes = shard_bytes
        self.tensors, self.manifests = [], []
        self.add(first_tensors() if tensors is None else tensors, anchor=True)

    def add(self, tensors=None, anchor=False, term=1, blind=False):
        """Publishes the next version, by default a small change; with `blind` its parent's tensors
        are not available.
        """
        number = len(self.manifests)
        tensors = changed(self.tensors[-1], seed=number) if tensors is None else tensors
        parent = self.manifests[-1] if self.manifests else None
        before = None if blind or not self.tensors else self.tensors[-1]
        self.manifests.append(self.write(Version(number, term), tensors, parent, before, anchor))
        self.tensors.append(tensors)
        return self.manifests[-1]

    def write(self, version, tensors, parent, before, anchor):
        size = self.shard_bytes
        new = NewVersion("run", version, tensors, FILES, size, 0.0)
        return publish_version(self.store, new, parent, before, anchor)

    def version(self, number):
        return self.manifests[number].version


def assert_same(got, want):
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got[name], tensor)]
        assert torch.equal(*bits), name
