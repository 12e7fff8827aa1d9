"""A trainer's versions on a real log and store, an engine that follows them, and the worker around
it.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.producers.engines.base import UpdateMode, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.rollout.assignments import AssignmentQueue
from rollstream.producers.rollout.heartbeat import StatusSchedule
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.read_back import FetchedWeights
from rollstream.producers.rollout.single_turn import SingleTurn
from rollstream.producers.rollout.turn_driver import RolloutParts
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.starting_model.models import model_files
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.named_streams import POLICY, WeightStream
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Record
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter
from testbed.synchronous_sender import SynchronousSender
from testbed.waiting import wait_for

CONFIG = Qwen3Config(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    tie_word_embeddings=True,
)  # fmt: skip


class Followed:
    """A run with a writer of the `stream` and one rollout; `publish` makes the next version."""

    def __init__(self, folder: Path, stream: WeightStream = POLICY) -> None:
        self.bus = open_bus(f"sqlite:{folder / 'bus'}")
        self.bus.create([*catalogue(1), stream.topic])
        run_store = open_store(f"file:{folder / 'store'}")
        self.store = stream.part(run_store)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Qwen3ForCausalLM(CONFIG).to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
        self.tensors: Mapping[str, torch.Tensor] = {
            name: tensor.clone() for name, tensor in model.state_dict().items()
        }
        self._tie()
        writer = FencedWriter(self.bus, stream.topic.name, stream.topic.writer, 1)
        self.versions = VersionWriter(
            self.store, writer, "r", 1, WeightsSettings(),
            model_files(model, None, torch.bfloat16), lambda: (),
        )  # fmt: skip
        self.versions.open()
        self.number = -1
        self.published: dict[Version, Mapping[str, torch.Tensor]] = {}
        self.follower = WeightsFollower(self.bus, run_store, stream=stream)

    def _tie(self) -> None:
        self.tensors["lm_head.weight"] = self.tensors["model.embed_tokens.weight"]  # pyright: ignore[reportIndexIssue]

    def publish(self) -> Version:
        """The next version: some elements of each tensor change."""
        self.number += 1
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self._tie()
        for tensor in self.tensors.values():
            tensor.view(-1)[self.number :: 17] += 0.25
        version = self.versions.publish(self.number, self.tensors)
        self.published[version] = self.tensors
        return version

    def fetched(self, held: Version | None) -> FetchedWeights:
        self.follower.read()
        self.follower.prefetch(held)
        return wait_for(self.follower.take)

    def differing(self, engine: TorchEngine) -> list[str]:
        """The tensors that the engine serves in other bits than one that is opened with those of
        its version.
        """
        tensors = self.published[engine.version]
        dtype = engine._decoder.dtype
        fresh = TorchEngine(CONFIG, tensors, engine.version, EngineOptions(4, 64), dtype=dtype)
        mine, wanted = engine._decoder.served.views, fresh._decoder.served.views
        return [
            name
            for name, views in wanted.items()
            for own, other in zip(mine[name], views, strict=True)
            if not torch.equal(
                own.view.flatten().view(torch.uint8), other.view.flatten().view(torch.uint8)
            )
        ]

    def engine(self, dtype: torch.dtype = torch.float32) -> TorchEngine:
        """The engine serves the newest version; the follower prepares updates for it from now
        on.
        """
        fetched = self.fetched(None)
        engine = TorchEngine(
            CONFIG,
            fetched.update.tensors,
            fetched.announced.version,
            EngineOptions(4, 64),
            dtype=dtype,
        )
        self.follower.prepare = engine.prepare
        return engine

    def rollout(self, engine: TorchEngine, on_update: str = "in_flight") -> RolloutLoop:
        settings = RolloutSettings(slots=4, context_max=64, status_s=0.1, on_update=on_update)  # pyright: ignore[reportArgumentType]
        voice = RolloutPublisher(
            self.bus, SynchronousSender(self.bus), "a", 1, settings, StatusSchedule(0.1)
        )
        judging = Judging(RewardPool(TaskSettings()), 1, lambda: engine.version)
        driver = SingleTurn(RolloutParts(engine, judging, voice, settings))
        orders = AssignmentQueue(self.bus, "a", 1)
        return RolloutLoop(self.follower, orders, InProgress(driver))

    def records(self, topic: str, kind: type[Record]) -> list:
        reader = TopicReader(self.bus, topic, from_begin(self.bus, topic))
        found = [received.record for received in reader.read_to(self.bus.end(topic))]
        return [record for record in found if isinstance(record, kind)]

    def close(self) -> None:
        self.bus.close()


def damage_after_update(engine: TorchEngine) -> None:
    """Damage what the engine serves after its next update, before it is compared."""
    load = engine.update

    def faulty(update: WeightUpdate, mode: UpdateMode) -> None:
        load(update, mode)
        damage(engine)
        engine.update = load

    engine.update = faulty


def damage(engine: TorchEngine) -> None:
    """Changes one bit of the served weights past the engine."""
    place = engine._decoder.served.views["model.layers.1.mlp.down_proj.weight"][0]
    place.view[1, 2] += 1
