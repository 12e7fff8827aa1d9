"""The two ends of a version's way in one process, and a store behind a slow link."""

# pyright: reportUnknownMemberType=false

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.torch.weights import ServedWeights, WeightView
from rollstream.producers.rollout.read_back import FetchedWeights
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.stores.base import Data, ListedObject, ObjectStat, ObjectStore
from rollstream.storage.weights.delta.coding import Changes
from rollstream.storage.weights.resident import TensorPatch
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter

Tensors = Mapping[str, torch.Tensor]

HIDDEN, INTERMEDIATE = 1024, 4096
FILES = {"config.json": b"{}"}


def large_tensors(megabytes: int) -> dict[str, torch.Tensor]:
    """Matrices and norms of a decoder of this size in bf16."""
    draw = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    layer = 0
    while sum(tensor.nbytes for tensor in found.values()) < megabytes * 1e6:
        shapes = {
            "qkv": (3 * HIDDEN, HIDDEN),
            "output": (HIDDEN, HIDDEN),
            "gate_up": (2 * INTERMEDIATE, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE),
            "norm": (HIDDEN,),
        }
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=draw) * 0.02
            found[f"layers.{layer}.{name}.weight"] = values.bfloat16()
        layer += 1
    return found


def nudged(tensors: Tensors, share: float, seed: int) -> dict[str, torch.Tensor]:
    """Each tensor with this share of its elements changed by one step of their mantissa."""
    draw = np.random.default_rng(seed)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        new = tensor.clone()
        bits = new.view(-1).view(torch.int16)
        count = max(1, int(share * bits.numel()))
        at = torch.from_numpy(draw.integers(0, bits.numel(), count))
        bits[at] ^= 1
        found[name] = new
    return found


class Receiver:
    """The torch engine's weight code over tensors served as the checkpoint has them."""

    def __init__(self, tensors: Tensors) -> None:
        self.version: Version | None = None
        memory = {name: tensor.clone() for name, tensor in tensors.items()}
        self._weights = ServedWeights(
            {name: (WeightView(tensor),) for name, tensor in memory.items()},
            {name: tuple(tensor.shape) for name, tensor in memory.items()},
        )

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        return self._weights.prepare(update)

    def update(self, update: WeightUpdate) -> None:
        self._weights.load(update)
        self.version = update.version

    def patch(self, tensors: Tensors, changes: Mapping[str, Changes | None]) -> None:
        """Takes decoded changes, as the follower would pass them."""
        patches = tuple(
            TensorPatch(
                name,
                tuple(tensors[name].shape),
                torch.bfloat16,
                torch.from_numpy(one.indices),
                torch.from_numpy(one.values.view(np.int16)).view(torch.bfloat16),
            )
            for name, one in changes.items()
            if one is not None
        )
        version = self._weights.held = Version(1, 1)
        self.update(self.prepare(WeightUpdate(version, tensors, version, patches)))


@dataclass(slots=True)
class Link:
    """A store behind a link: every byte of an object waits for its turn, in either direction."""

    store: ObjectStore
    bytes_per_s: float
    open: bool = True

    def _pass(self, count: int) -> None:
        if not self.open:
            time.sleep(count / self.bytes_per_s)

    def put(self, key: str, data: Data) -> str:
        self._pass(len(data))
        return self.store.put(key, data)

    def create(self, key: str, data: Data) -> str:
        self._pass(len(data))
        return self.store.create(key, data)

    def swap(self, key: str, data: Data, etag: str) -> str:
        self._pass(len(data))
        return self.store.swap(key, data, etag)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = self.store.get(key, start, end)
        self._pass(len(data))
        return data

    def read(self, key: str) -> tuple[bytes, str]:
        data, etag = self.store.read(key)
        self._pass(len(data))
        return data, etag

    def stat(self, key: str) -> ObjectStat:
        return self.store.stat(key)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def delete_all(self, keys: Iterable[str]) -> None:
        self.store.delete_all(keys)


class Sides:
    """A trainer's writer and a rollout's follower on one log and store."""

    SHARD_BYTES = WeightsSettings().shard_bytes

    def __init__(self, store: ObjectStore, bus: Path, deltas: bool) -> None:
        self.store = store
        self.bus = open_bus(f"sqlite:{bus}")
        self.bus.create(catalogue(1))
        settings = WeightsSettings(deltas=deltas, anchor_every=1000)
        writer = FencedWriter(self.bus, "weights", "trainer", 1)
        self.versions = VersionWriter(store, writer, "b", 1, settings, FILES, lambda: ())
        self.versions.open()
        self.follower = WeightsFollower(self.bus, store)
        self._number = -1
        self._receiver: Receiver | None = None

    def start(self, tensors: Tensors) -> None:
        """Publishes the first version and takes it; this is not measured."""
        self._receiver = Receiver(tensors)
        self.follower.prepare = self._receiver.prepare
        self.publish_to_applied(tensors)

    def publish_to_applied(self, tensors: Tensors) -> float:
        """Seconds from the trainer's snapshot until the receiver has the version."""
        assert self._receiver is not None, "start comes first"
        began = time.perf_counter()
        version = self.publish(tensors)
        self._receiver.update(self.fetched(self._receiver.version).update)
        seconds = time.perf_counter() - began
        assert self._receiver.version == version, "it took another version"
        return seconds

    def publish(self, tensors: Tensors) -> Version:
        self._number += 1
        return self.versions.publish(self._number, tensors)

    def fetched(self, held: Version | None) -> FetchedWeights:
        """The newest version, prepared."""
        self.follower.read()
        self.follower.prefetch(held)
        while (fetched := self.follower.take()) is None:
            time.sleep(0.001)
        return fetched

    def close(self) -> None:
        self.bus.close()
