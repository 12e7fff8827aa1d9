"""One rank of a sharded learner, as a process of its own (`forked_ranks.py`), with `torchrun`'s
variables in the environment. All ranks do the same jobs.

Jobs: `train:A-B` updates A to B of `stream`; `publish:N` version N, a delta where N − 1 was
published; `keep:N` a checkpoint; `resume:N` from a checkpoint, `restore:` from the newest that can
be read; `idle:S` waits for S seconds; `write_result:` writes rank 0's results to
FOLDER/result.json, as the end does; `until:NAME` waits for the file FOLDER/NAME; `follow:` waits at
the other ranks until rank 0 ends. `model=NAME` is another model than `MODEL`, `lora=RANK` trains
adapters of it, `store=NAME` is the store of the other ranks, `relays=BUS` the log of the relays
that every rank pushes to; `shortages=N`: memory ran out N times on every micro-batch.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rollstream.consumers.trainer.build import load_first
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.base import open_learner
from rollstream.consumers.trainer.sharded.learner import ShardedModel
from rollstream.consumers.trainer.sharded.ranks import Ranks, join_ranks
from rollstream.consumers.trainer.sharded.starting_model import StartingModel
from rollstream.storage.model_folder.lora import attach_adapters
from rollstream.storage.relay.push import PushingStore
from rollstream.storage.relay.topology import RelayDirectory
from rollstream.storage.settings import LoraSettings
from rollstream.storage.starting_model.manifest import read_model_manifest
from rollstream.storage.starting_model.models import load_empty_model
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.starting_model.rows import ModelRows
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.adapters import AdapterTensors, publish_adapter, publish_base
from rollstream.storage.weights.checkpoints import (
    CheckpointId,
    open_checkpoint,
    stored_checkpoints,
    write_checkpoint,
)
from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.storage.weights.tensors import Tensors
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Position
from rollstream.streams.values import Version
from testbed.waiting import let_pass
from tests.trainer.learning_reference import build, sample, settings

STATE = TrainerState(0, 0, Position(), {}, (), {}, "").encode()
COUNTS = (1, 2, 3, 5, 0, 4, 2, 7)
"""Micro-batches of each update: fewer than ranks, as many, more, and none that trains anything."""
MODEL = "qwen3_tied"


def stream(update: int) -> list[list[Sample]]:
    """The micro-batches of an update: of unequal size, the fifth update's without a trained token,
    and in each longer one a micro-batch of which nothing is trained. A scorer gave the
    log-probabilities of a reference.
    """
    rng = np.random.default_rng(100 + update)
    batches = [
        [referred(sample(rng, f"{update}-{m}-{i}", 1 + i % 3)) for i in range(1 + 2 * (m % 3))]
        for m in range(COUNTS[update] or 2)
    ]
    if COUNTS[update] == 0:
        return [hidden(batch) for batch in batches]
    return [hidden(batches[0]), *batches] if COUNTS[update] > 3 else batches


def referred(one: Sample) -> Sample:
    ahead = np.linspace(-1.0, 0.5, len(one.logprobs), dtype=np.float32)
    return replace(one, reference=one.logprobs + ahead)


def hidden(batch: Sequence[Sample]) -> list[Sample]:
    return [replace(one, mask=np.zeros_like(one.mask)) for one in batch]


def rules(**changed: object):
    kl = {"reference_kl": 0.1, "reference_by": "score"}
    return settings(
        lr=1e-2, lr_ramp_steps=2, weight_decay=0.1, gradient_norm_max=0.5, steps=8, **kl, **changed
    )


def starting(folder: Path, name: str, lora: LoraSettings) -> StartingModel:
    """The model, by rows if FOLDER/starting is a store with it, or FOLDER/NAME holds it."""
    if (folder / "starting").exists():
        store = open_store(f"file:{folder / 'starting'}")
        manifest = read_model_manifest(store)
        assert manifest is not None
        rows = ModelRows(StoredModel(store, manifest))
        cache = rows.model.host_folder("", None, folder / f"cache-{os.environ['RANK']}")
        stored = load_empty_model(str(cache), rows)
        assert stored is not None
        return StartingModel(with_adapters(stored[0], lora), stored[1])
    if not (folder / name).exists():
        return StartingModel(with_adapters(build(name), lora))
    found = load_empty_model(str(folder / name))
    assert found is not None
    return StartingModel(with_adapters(found[0], lora), found[1])


def with_adapters(model: PreTrainedModel, lora: LoraSettings) -> PreTrainedModel:
    if lora.rank:
        attach_adapters(model, lora, 3, torch.bfloat16, "base")
    return model


class Jobs:
    """One rank."""

    def __init__(
        self, folder: Path, ranks: Ranks, names: dict[str, str], changed: dict[str, object]
    ) -> None:
        self.folder, self.ranks, self.leads = folder, ranks, ranks.rank == 0
        store = "store" if self.leads else names.get("store", "store")
        self.store: ObjectStore = open_store(f"file:{folder / store}")
        if "relays" in names:
            directory = RelayDirectory(open_bus(names["relays"]), 5.0)
            self.store = PushingStore(self.store, directory, 1 << 30)
        lora = LoraSettings(rank=int(names.get("lora", 0)))
        shared = ShardedModel(starting(folder, names.get("model", MODEL), lora), ranks)
        self.learner = open_learner(shared, rules(**changed))
        rows = shared.start.rows
        if rows is not None:
            (folder / f"read-{ranks.rank}").write_text(str(rows.model.store_bytes))
        self.shortages = int(names.get("shortages", 0))
        self.published: tuple[Manifest, Tensors] | None = None
        self.result: dict[str, Any] = {"metrics": [], "hashes": [], "micro_batches": []}

    def do(self, job: str) -> None:
        kind, _, what = job.partition(":")
        getattr(self, kind)(what)

    def train(self, what: str) -> None:
        first, _, last = what.partition("-")
        for update in range(int(first), int(last) + 1):
            for batch in stream(update):
                self.learner.submit(batch, self.shortages)
            self.result["metrics"].append(self.learner.finish_update())
            self.result["hashes"].append(self.learner.state_hash())
            self.result["micro_batches"].append(self.learner.micro_batches)

    def publish(self, what: str) -> None:
        tensors = self.learner.snapshot("bfloat16")
        if isinstance(tensors, AdapterTensors):
            self.publish_adapter(Version(int(what), 1), tensors)
            return
        before, base = self.published or (None, None)
        version = Version(int(what), 1)
        new = NewVersion("run", version, tensors, {}, 4096, 0.0, self.leads)
        manifest = publish_version(self.store, new, before, base, base is None)
        self.published = (manifest, tensors)

    def publish_adapter(self, version: Version, tensors: AdapterTensors) -> None:
        base = publish_base(self.store, "run", tensors.base(), {}, 8192, 0.0, self.leads)
        publish_adapter(self.store, version, tensors, base, None, 0.0, self.leads)

    def keep(self, what: str) -> None:
        state = STATE | {"step": int(what)} if self.leads else None
        write_checkpoint(self.store, int(what), 1, self.learner.state(), state, 8192)

    def resume(self, what: str) -> None:
        self.learner.load_state(open_checkpoint(self.store, CheckpointId(1, int(what))).tensors)
        self.result["hashes"].append(self.learner.state_hash())

    def restore(self, what: str) -> None:
        found = [one.id for one in reversed(stored_checkpoints(self.store))]
        state = load_first(self.store, self.learner, found, self.ranks)
        assert state is not None
        self.result["restored"] = state.step

    def idle(self, what: str) -> None:
        print("idle", flush=True)
        let_pass(float(what))

    def follow(self, what: str) -> None:
        print("follows", flush=True)
        while not self.leads and not self.ranks.has_ended():
            let_pass(0.05)

    def write_result(self, what: str = "") -> None:
        if not self.leads:
            return
        half = self.folder / "result.half"
        half.write_text(json.dumps(self.result))
        half.rename(self.folder / "result.json")

    def until(self, what: str) -> None:
        while not (self.folder / what).exists():
            let_pass(0.05)
        print("continues", flush=True)


def main(folder: Path, timeout_s: float, changed: dict[str, object], jobs: list[str]) -> None:
    names = dict(job.split("=") for job in jobs if "=" in job)
    with join_ranks("cpu", timeout_s) as ranks:
        mine = Jobs(folder, ranks, names, changed)
        for job in jobs:
            if "=" not in job:
                mine.do(job)
        mine.write_result()
