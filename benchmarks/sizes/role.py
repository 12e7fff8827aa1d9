"""One role as a process whose peak memory is measured: `python -m benchmarks.sizes.role KIND FILE`.

It prints `ready` once everything is imported and waits for a line, so that the memory of a process
without a model is known; then it works through the role's phases: a trainer trains, publishes,
encodes a delta and writes a checkpoint; a rollout loads a version, decodes full rows and takes the
next version in flight.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.sizes.rollout_memory import fetched_version
from benchmarks.weights.sides import Sides, nudged
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.publisher import CheckpointRetention, StepPublisher, StepSnapshot
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.starting_model.models import build_model
from rollstream.storage.stores.file import FileStore
from rollstream.streams.connect import open_bus
from rollstream.streams.records import GENERATED, PROMPT, Position, StepDone
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling, Span, Version

STEPS = 3
CHANGED = 0.01
NEW_TOKENS = 48


def main(kind: str, file: Path) -> None:
    torch.set_num_threads(2)
    spec: dict[str, Any] = json.loads(file.read_text())
    print("ready", flush=True)
    sys.stdin.readline()
    {"trainer": train, "versions": write_versions, "rollout": roll_out}[kind](spec, file.parent)


def model_of(spec: Mapping[str, Any]) -> PreTrainedModel:
    return build_model("Qwen3ForCausalLM", spec["model"], seed=0)


def train(spec: Mapping[str, Any], folder: Path) -> None:
    """Steps of one micro-batch as the trainer's loop takes them, with a checkpoint in the last but
    one, which is written while the last one is trained.
    """
    settings = TrainerSettings(
        workers=1, threads=2, micro_batch_tokens=spec["tokens"], lr=1e-5, lr_ramp_steps=0,
        compute=spec["compute"], gradient_checkpointing=spec["recompute"],
    )  # fmt: skip
    learner = TorchLearner(model_of(spec), settings)
    sides = Sides(FileStore(folder / "store"), folder / "bus", deltas=True)
    ledger = Ledger(sides.bus, 1)
    ledger.open(Position())
    metrics = MetricsFile(folder / "trainer.jsonl")
    publisher = StepPublisher(sides.store, sides.versions, ledger, metrics, CheckpointRetention(1))
    samples = [sample_of(spec, number) for number in range(spec["tokens"] // spec["context"])]
    for step in range(STEPS):
        learner.submit(samples)
        publisher.await_lent()
        learner.finish_update()
        done = StepDone(step, Version(step, 1), learner.state_hash(), 1, {}, {}, 0.0)
        publisher.await_room()
        checkpoint = (learner.state(publisher.state_buffers), {}) if step == STEPS - 2 else None
        tensors = learner.snapshot("bfloat16", publisher.weight_buffers)
        is_lent = checkpoint is not None and learner.lends_state
        publisher.submit(StepSnapshot(done, tensors, checkpoint, None, {}, {}, is_lent))
    publisher.close()
    learner.close()
    sides.close()


def sample_of(spec: Mapping[str, Any], number: int) -> Sample:
    """A trajectory of the whole context, of which all but an eighth is trained."""
    draw, context = np.random.default_rng(number), spec["context"]
    generated = context - context // 8
    return Sample(
        trajectory=f"t{number}",
        group=0,
        tokens=draw.integers(0, spec["model"]["vocab_size"], context).astype(np.uint32),
        sources=np.repeat(
            np.array([PROMPT, GENERATED], np.uint8), [context - generated, generated]
        ),
        logprobs=np.full(generated, -9.0, np.float32),
        spans=(Span(0, generated, Version(0, 1)),),
        reward=1.0,
        advantage=1.0 if number % 2 else -1.0,
        temperature=1.0,
        mask=np.ones(generated, np.bool_),
    )


def write_versions(spec: Mapping[str, Any], folder: Path) -> None:
    """An anchor and a delta after it, for the rollout."""
    tensors = {n: t.detach().bfloat16() for n, t in model_of(spec).named_parameters()}
    sides = Sides(FileStore(folder / "store"), folder / "bus", deltas=True)
    for number in range(2):
        sides.publish(tensors)
        tensors = nudged(tensors, CHANGED, number)
    sides.close()


def roll_out(spec: Mapping[str, Any], folder: Path) -> None:
    """Rows that reach the engine's context, and an update while they decode."""
    bus = open_bus(f"sqlite:{folder / 'weights'}")
    bus.create(catalogue(1))
    follower = WeightsFollower(bus, FileStore(folder / "store"))
    config: Any = build_model_config(spec)
    first = fetched_version(follower, Version(0, 1)).update.tensors
    options = EngineOptions(spec["slots"], spec["context"])
    engine = TorchEngine(config, first, Version(0, 1), options)
    assert not engine.read_back(first, first).differing
    del first
    follower.prepare = engine.prepare
    prompt = spec["context"] - NEW_TOKENS
    for row in range(spec["slots"]):
        tokens = np.random.default_rng(row).integers(0, spec["model"]["vocab_size"], prompt)
        sources = np.zeros(prompt, np.uint8)
        nothing = np.zeros(0, np.float32)
        request = GenerationRequest(
            f"t{row}", row, tokens.astype(np.uint32), sources, Sampling(tokens_max=NEW_TOKENS), 0,
            nothing,
        )  # fmt: skip
        engine.submit(request)
    engine.poll(0.0)
    fetched = fetched_version(follower, Version(1, 1))
    engine.update(fetched.update, "in_flight")
    follower.compare(fetched, engine.read_back, 0.0)
    del fetched
    while (verdict := follower.verdict()) is None:
        engine.poll(0.0)
    assert not verdict.compared.differing
    del verdict
    end = time.monotonic() + 120
    while engine.running() and time.monotonic() < end:
        engine.poll(1.0)
    bus.close()


def build_model_config(spec: Mapping[str, Any]) -> object:
    """The configuration of the model, without its weights."""
    with torch.device("meta"):
        return model_of(spec).config


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
