"""A whole run in one process, small enough for tests: real bus, store, engine and learner, roles as
threads.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rollstream.consumers.dispatch.admission import AdmissionPace
from rollstream.consumers.dispatch.service import Dispatch
from rollstream.consumers.settings import DispatchSettings, TrainerSettings
from rollstream.consumers.trainer.build import InitialModel, Provenance, TrainerPlan, build_trainer
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.loop import Trainer
from rollstream.errors import Fenced
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.agents.episodes import AgentEpisodes
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Emission, Engine
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.prompt_source import PromptOrder, PromptSource
from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.rollout.assignments import AssignmentQueue
from rollstream.producers.rollout.heartbeat import Heartbeat, StatusSchedule
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.read_back import compare_all_tensors
from rollstream.producers.rollout.turn_driver import DriverScope, RolloutParts, open_driver
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.producers.tasks.base import is_asynchronous
from rollstream.producers.tasks.registry import load_task
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.model_folder.lora import attach_adapters
from rollstream.storage.settings import CheckpointSettings, LoraSettings, WeightsSettings
from rollstream.storage.starting_model.models import build_model, config_from_version, model_files
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.terms import next_term
from rollstream.storage.weights.form import form_of
from rollstream.storage.weights.manifest import read_manifest
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Record, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling
from testbed.synchronous_sender import SynchronousSender
from testbed.waiting import WAIT_S, let_pass

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip

DISPATCH = DispatchSettings(max_lag=2, heartbeat_timeout_s=1.0)
ROLLOUT = RolloutSettings(slots=8, context_max=64, status_s=0.1)
TASK = TaskSettings(reward_timeout_s=WAIT_S)
NO_LORA = LoraSettings()
WEIGHTS = WeightsSettings(dtype="float32")
NO_AGENT = AgentSettings()


class Died(Exception):
    """Ends a role as `kill -9` does: it writes nothing more."""


class OneStepAPoll:
    """An engine whose rollout looks around after each decoding step, however fast the machine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def poll(self, deadline_s: float) -> list[Emission]:
        let_pass(deadline_s)
        return self.engine.poll(0.0)


@dataclass
class TinyRun:
    """One run's log and store, and roles to start on them; `task` holds the settings of a
    registered task.
    """

    bus: Bus
    store: ObjectStore
    folder: Path
    trainer: TrainerSettings
    dispatch: DispatchSettings = DISPATCH
    rollout: RolloutSettings = ROLLOUT
    task: TaskSettings = TASK
    agent: AgentSettings = NO_AGENT
    checkpoint_every: int = 100
    tokens_max: int = 12
    truncate: bool = False
    archived: tuple[str, ...] = ()
    lora: LoraSettings = NO_LORA
    weights: WeightsSettings = WEIGHTS
    name: str = "tiny"
    configuration_hash: str = "configuration"
    accept: Callable[[str], bool] = lambda before: True
    threads: list[threading.Thread] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)
    fenced: int = 0
    passed_s: float = 0.0
    """How far the trainer's clock is ahead of the machine's."""

    @property
    def keep_version(self) -> bool:
        return self.rollout.on_update == "keep_version"

    def model(self) -> PreTrainedModel:
        return build_model("Qwen3ForCausalLM", SIZES, seed=0)

    def trained_model(self) -> PreTrainedModel:
        model = self.model()
        if self.lora.rank:
            start = None if self.lora.path is None else Path(self.lora.path)
            attach_adapters(model, self.lora, 0, torch.float32, "tiny", start)
        return model

    def start_all(self, rollouts: int = 2) -> None:
        """Starts all roles except the trainer."""
        self.start_prompts(1)
        self.start_dispatch(1)
        for number in range(rollouts):
            self.start_rollout(f"rollout-{number}")

    def start_prompts(self, term: int) -> None:
        task = load_task(self.task)
        sampling = Sampling(tokens_max=self.tokens_max, stop=tuple(task.stop))
        samples, more = self.trainer.samples_per_group, self.task.redundancy
        order = PromptOrder(task.name, task.prompt, sampling, samples, 0, redundancy=more)
        source = PromptSource(self.bus, order, term, ahead=4 * self.trainer.groups_per_step)
        self.start_thread(lambda: source.run(self.stop))

    def start_dispatch(self, term: int, stop: threading.Event | None = None) -> None:
        pace = AdmissionPace(
            self.trainer.groups_per_step, self.dispatch.max_lag, 64, self.trainer.steps
        )
        dispatch = Dispatch(
            self.bus, self.store, self.dispatch, pace, self.keep_version, term, self.truncate,
            has_adapters=self.lora.rank > 0,
        )  # fmt: skip
        self.start_thread(lambda: dispatch.run(stop or self.stop))

    def start_rollout(
        self, name: str, stop: threading.Event | None = None, dying: Bus | None = None
    ) -> None:
        """With the bus of a `dying` one it decodes step by step: it has work in progress."""
        self.start_thread(lambda: self._rollout(name, stop or self.stop, dying))

    def build_trainer(self, term: int) -> Trainer:
        model = self.model()
        rule = training_rule(self.trainer, self.dispatch.max_lag, self.keep_version)
        return build_trainer(
            self.bus,
            self.store,
            TrainerPlan(
                self.trainer,
                rule,
                self.weights,
                CheckpointSettings(every=self.checkpoint_every),
                truncate=self.truncate,
                archived=self.archived,
            ),
            InitialModel(self.trained_model(), model_files(model, None, model.dtype)),
            Provenance(self.name, term, self.configuration_hash, "revision", self.accept),
            MetricsFile(self.folder / "trainer.jsonl"),
            lambda: time.monotonic() + self.passed_s,
        )

    def train(self, term: int = 1, stop: threading.Event | None = None) -> bool:
        """Runs in this thread; an error of another role is raised here."""
        done = self.build_trainer(term).run(stop or threading.Event())
        if self.failures:
            raise self.failures[0]
        return done

    def start_trainer(self, term: int = 1) -> threading.Event:
        """Trains in another thread; the event is set when the run is complete."""
        trained, trainer = threading.Event(), self.build_trainer(term)

        def work() -> None:
            if trainer.run(threading.Event()):
                trained.set()

        self.start_thread(work)
        return trained

    def records(self, topic: str, kind: type[Record] | None = None) -> list:
        reader = TopicReader(self.bus, topic, from_begin(self.bus, topic))
        found = [received.record for received in reader.read_to(self.bus.end(topic))]
        return [r for r in found if kind is None or isinstance(r, kind)]

    def pass_deadlines(self, ready: Callable[[int], bool]) -> None:
        """From now on the deadline of every group passes for the trainer whenever `ready` returns
        True for the number of admitted groups, so the work before it may take any time.
        """

        def look() -> None:
            while not self.stop.wait(0.05):
                if (admitted := len(self.records("admissions", Admitted))) and ready(admitted):
                    self.passed_s += self.dispatch.group_deadline_s

        self.start_thread(look)

    def finished(self) -> int:
        """Trajectories with a completion."""
        return len({record.trajectory for record in self.records("trajectories", Trajectory)})

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(timeout=WAIT_S)

    def start_thread(self, work) -> None:
        def guarded() -> None:
            try:
                work()
            except Fenced:
                self.fenced += 1  # replaced: it ends as expected
            except Died:
                return
            except BaseException as error:
                self.failures.append(error)
                raise

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self.threads.append(thread)

    def _rollout(self, name: str, stop: threading.Event, dying: Bus | None) -> None:
        bus = dying or self.bus
        term = next_term(self.store, "rollouts", name)
        orders = AssignmentQueue(bus, name, term)
        follower = WeightsFollower(bus, self.store)
        fetched = None
        while fetched is None and not stop.wait(0.01):
            follower.read()
            follower.prefetch(None)
            fetched = follower.take()
        if fetched is None:
            return
        manifest = read_manifest(self.store, fetched.announced.version)
        opening = form_of(manifest).opening(self.store, manifest, fetched.update.tensors)
        engine = open_engine(
            "torch",
            config_from_version(self.store, manifest),
            opening.tensors,
            opening.version,
            EngineOptions(slots=self.rollout.slots, context_max=self.rollout.context_max),
        )
        if opening.version != manifest.version:
            engine.update(fetched.update, self.rollout.on_update)
        task = load_task(self.task)
        rewards = RewardPool(self.task, is_asynchronous=is_asynchronous(task))
        status_s = self.rollout.status_s
        voice = RolloutPublisher(
            bus, SynchronousSender(bus), name, term, self.rollout,
            StatusSchedule(status_s),
            heartbeat=Heartbeat(bus, status_s),
        )  # fmt: skip
        voice.applied(compare_all_tensors(fetched, engine.read_back, time.perf_counter()))
        judging = Judging(rewards, term, lambda: engine.version, late=self.task.reward == "late")
        served: Any = OneStepAPoll(engine) if dying else engine
        driver = open_driver(
            RolloutParts(served, judging, voice, self.rollout),
            task,
            DriverScope(self.task, self.agent, self.store, "tiny"),
        )
        try:
            RolloutLoop(follower, orders, InProgress(driver)).run(stop)
        finally:
            rewards.close()
            driver.close()
            if isinstance(driver, AgentEpisodes) and driver.endpoint is not None:
                driver.endpoint.close()


@contextmanager
def tiny_run(folder: Path, **changed) -> Generator[TinyRun]:
    """A run over `sqlite:` and `file:` in this folder, or the URLs `bus` and `store`; its roles are
    stopped at the end.
    """
    bus = open_bus(changed.pop("bus", f"sqlite:{folder / 'bus'}"))
    bus.create(catalogue(2))
    store = open_store(changed.pop("store", f"file:{folder / 'store'}"))
    settings = {
        "steps": 4, "groups_per_step": 3, "samples_per_group": 4, "micro_batch_tokens": 256,
        "workers": 1,
    } | changed.pop("trainer", {})  # fmt: skip
    run = TinyRun(bus, store, folder, TrainerSettings(**settings), **changed)
    try:
        yield run
    finally:
        run.end()
        bus.close()
