"""A whole run in one process, step by step: every role except engine and rewards is the product's
own, on a bus and a store of the caller's, all of it under one baton.

Its supervisor restarts dead roles after a drawn pause, passes the dead holder's lease on as the
real one does, and starts successors of frozen processes, which then resume as zombies.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.dispatch.admission import AdmissionPace
from rollstream.consumers.dispatch.planned_policy import PlannedPolicy
from rollstream.consumers.dispatch.service import Dispatch
from rollstream.consumers.settings import ArchiveSettings, DispatchSettings, TrainerSettings
from rollstream.consumers.trainer.build import InitialModel, Provenance, TrainerPlan, build_trainer
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed
from rollstream.consumers.trainer.data.training_rule import Choices, training_rule
from rollstream.errors import Fenced, RollstreamError
from rollstream.producers.prompt_source import PromptOrder, PromptSource
from rollstream.producers.rollout.assignments import AssignmentQueue
from rollstream.producers.rollout.heartbeat import StatusSchedule
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.read_back import compare_all_tensors
from rollstream.producers.rollout.single_turn import SingleTurn
from rollstream.producers.rollout.turn_driver import RolloutParts
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.producers.tasks.base import Task
from rollstream.producers.tasks.registry import load_task
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.leases import LeaseCandidate, LeaseClaim
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.settings import CheckpointSettings, WeightsSettings
from rollstream.storage.starting_model.models import build_model, model_files
from rollstream.storage.stored_settings import configuration_key
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.stores.json_objects import create_idempotent, encode_json
from rollstream.storage.terms import next_term
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.bus import Bus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling
from testbed.stepped.baton import Baton, Crashed, Process, Stop
from testbed.stepped.crashes import Gate, Plan
from testbed.stepped.crashing_bus import CrashingBus
from testbed.stepped.crashing_store import CrashingStore
from testbed.stepped.fake_engine import FakeEngine, FakeRewards
from testbed.stepped.hand_fed_trainer import Breaking
from testbed.stepped.history import remembering
from testbed.stepped.publisher import SteppedPublisher
from testbed.stepped.restless_planner import Restless
from testbed.synchronous_sender import SynchronousSender

RUN = "stepped"
SIZES = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
HOLDERS = ("prompts", "dispatch", "trainer", "archive")
ROLES = (*HOLDERS, "rollout-0", "rollout-1")
TICK_S = 0.1
MAX_LAG = 3
TOKENS_MAX = 24

Medium = tuple[Bus, ObjectStore]


class AtOnceFollower(WeightsFollower):
    """Fetches in its caller's thread: one thread runs at a time."""

    def _begin(self, work: Callable[[], None]) -> None:
        self._run(work)


@dataclass(frozen=True)
class Shape:
    """The size of a run."""

    steps: int = 20
    groups: int = 2
    samples: int = 2
    checkpoint_every: int = 3
    keep_version: bool = False
    restless: bool = False
    """Dispatch moves all that it can."""
    is_slow: bool = False
    """Answers take long, every token of them is in a partial, and the log is not truncated."""
    drafts: bool = False
    """Rollouts fill a draft history from the log; the one with the lock writes."""
    micro_batch_tokens: int = 64
    uncomputable: str = ""
    """The learner raises on a micro-batch with this trajectory, which ends the trainer."""
    max_lag: int | None = MAX_LAG
    changed: tuple[tuple[str, Any], ...] = ()
    """Settings of `trainer`, `dispatch`, `sampling` and `task` that differ from a stepped run's
    own, by their dotted names.
    """

    def of(self, table: str) -> dict[str, Any]:
        """The changed settings of this table."""
        named = (key.split(".") for key, _ in self.changed)
        values = (value for _, value in self.changed)
        return {key: v for (at, key), v in zip(named, values, strict=True) if at == table}


@dataclass(eq=False)
class SteppedRun:
    """`reopen` opens bus and store again after all processes died."""

    reopen: Callable[[], Medium]
    folder: Path
    baton: Baton
    shape: Shape = Shape()
    plan: Plan = field(default_factory=Plan)
    current: dict[str, Process] = field(default_factory=dict[str, Process])
    zombies: list[Process] = field(default_factory=list[Process])
    starts: dict[str, int] = field(default_factory=dict[str, int])
    complete: bool = False
    asked: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.bus, self.store = self.reopen()
        self.bus.create(catalogue(2))
        self._stops = {name: Stop(self.baton) for name in ROLES}
        self._due: dict[str, float] = {}

    def alive(self) -> list[Process]:
        return [p for p in (*self.current.values(), *self.zombies) if not p.ended]

    # ---- supervisor ----------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until the last step is trained and everything is archived; raises a role's error."""
        for name in ROLES:
            self._start(name)
        while not self.complete:
            self._tend(ROLES)
        for stopping in (tuple(n for n in ROLES if n != "archive"), ("archive",)):
            for name in stopping:
                self._stops[name].set()
            while not all(self._is_done(name) for name in stopping):
                self._tend(ROLES)
        for process in self.alive():
            self.baton.kill(process)
        while self.alive():
            self.baton.wait(TICK_S)

    def run_to(self, step: int) -> None:
        """Runs until the version of this step is believed, then stops all processes at once."""
        for name in ROLES:
            self._start(name)
        while (pointer := believed_pointer(self.store)) is None or (
            pointer.version is None or pointer.version.number < step
        ):
            self._tend(ROLES)
        for process in self.alive():
            self.baton.kill(process)
        while self.alive():
            self.baton.wait(TICK_S)

    def _is_done(self, name: str) -> bool:
        process = self.current[name]
        return process.ended and not process.dead and process.error is None

    def _tend(self, names: tuple[str, ...]) -> None:
        self.baton.wait(TICK_S)
        for zombie in self.zombies:
            if zombie.error is not None and not isinstance(zombie.error, RollstreamError):
                raise zombie.error
        self.zombies = [zombie for zombie in self.zombies if not zombie.ended]
        if not self.alive() and all(process.dead for process in self.current.values()):
            self.bus.close()
            self.bus, self.store = self.reopen()
        for name in names:
            self._look(name)

    def _look(self, name: str) -> None:
        process, now = self.current[name], self.baton.now_s
        if process.frozen_s > now + 1.0 and not process.dead:
            if self.baton.random.random() < 0.1:
                self.zombies.append(process)
                self._start(name)
        elif process.ended and (process.dead or process.error is not None):
            if process.error is not None and not isinstance(process.error, Fenced):
                raise process.error
            if now >= self._due.setdefault(name, now + self.baton.random.uniform(0.0, 3.0)):
                del self._due[name]
                self._start(name)

    def _start(self, name: str) -> None:
        self.starts[name] = self.starts.get(name, 0) + 1
        process = self.current[name] = Process(name)
        gate = Gate(self.baton, process, self.plan)
        bus, store = CrashingBus(self.bus, gate), CrashingStore(self.store, gate)
        begin = {
            "prompts": self._prompts, "dispatch": self._dispatch, "trainer": self._trainer,
            "archive": self._archive,
        }.get(name, self._rollout)  # fmt: skip
        self.baton.start(process, lambda: begin(process, bus, store))

    # ---- roles ---------------------------------------------------------------------------------

    def _term(self, process: Process, store: ObjectStore) -> int:
        """With the lease; the nonce of the process before is passed on."""
        count = self.starts[process.name]
        handed = f"{process.name}-{count - 1}"
        who = LeaseCandidate(process.name, "here", f"{process.name}-{count}", 10.0, handed)
        claim = LeaseClaim(store, who, self.baton.clock)
        while (lease := claim.attempt()) is None:
            self.baton.wait(1.0)
        return lease.term

    def _prompts(self, process: Process, bus: Bus, store: ObjectStore) -> None:
        task, settings = _task(), trainer_settings(self.shape)
        drawn = {"tokens_max": TOKENS_MAX} | self.shape.of("sampling")
        sampling = Sampling(stop=tuple(task.stop), **drawn)
        more = self.shape.of("task").get("redundancy", 0)
        samples = settings.samples_per_group
        order = PromptOrder(task.name, task.prompt, sampling, samples, 0, redundancy=more)
        term, ahead = self._term(process, store), 4 * settings.groups_per_step
        source = PromptSource(bus, order, term, ahead, _recorded(store, order))
        source.run(self._stops["prompts"])  # type: ignore[arg-type]

    def _dispatch(self, process: Process, bus: Bus, store: ObjectStore) -> None:
        settings = DispatchSettings.model_validate(
            {
                "max_lag": self.shape.max_lag,
                "heartbeat_timeout_s": 2.0,
                "keep_s": 0.4,
                "repack_every_s": 0.5,
                "ready_groups_max": 64,
            }
            | self.shape.of("dispatch")
        )
        steps = trainer_settings(self.shape)
        pace = AdmissionPace(
            steps.groups_per_step, self.shape.max_lag, settings.ready_groups_max, steps.steps
        )
        term, keep = self._term(process, store), self.shape.keep_version
        dispatch = Dispatch(
            bus, store, settings, pace, keep, term, not self.shape.is_slow, self.baton.clock
        )
        if self.shape.restless:
            drawn = random.Random(self.baton.random.random())
            assert isinstance(dispatch.policy, PlannedPolicy)
            dispatch.policy.repack = Restless(
                0.1, self.shape.max_lag, self.shape.groups, random=drawn, asked=self.asked
            )
        dispatch.run(self._stops["dispatch"])  # type: ignore[arg-type]

    def _archive(self, process: Process, bus: Bus, store: ObjectStore) -> None:
        self._term(process, store)
        settings = ArchiveSettings(roll_s=1.0)
        ArchiveService(bus, store, RUN, settings, self.baton.clock).run(self._stops["archive"])  # type: ignore[arg-type]

    def _trainer(self, process: Process, bus: Bus, store: ObjectStore) -> None:
        term, shape = self._term(process, store), self.shape
        settings = trainer_settings(shape)
        begin = _begin()
        trainer = build_trainer(
            bus,
            store,
            TrainerPlan(
                settings,
                training_rule(settings, shape.max_lag, shape.keep_version),
                WeightsSettings(dtype="float32", versions_max=8),
                CheckpointSettings(every=shape.checkpoint_every),
                truncate=not shape.is_slow,
                archived=ArchiveSettings().topics,
            ),
            InitialModel(copy.deepcopy(begin.model), begin.model_files),
            Provenance(RUN, term, _store_choices(store, shape), "revision"),
            MetricsFile(self.folder / "trainer.jsonl"),
            self.baton.clock,
        )
        if shape.uncomputable:
            names = frozenset({shape.uncomputable})
            trainer.take_feeder.learner = Breaking(
                trainer.take_feeder.learner, names, ComputeFailed
            )  # type: ignore[assignment]
        inner, publisher = trainer.publisher, SteppedPublisher(trainer.publisher, self.baton)
        trainer.publisher = publisher  # type: ignore[assignment]
        self.baton.start(process, publisher.run)
        self.baton.start(process, publisher.delete)
        try:
            if trainer.run(self._stops["trainer"]):  # type: ignore[arg-type]
                self.complete = True
        except ComputeFailed:  # recorded; the process ends, its publisher too
            self.asked["trainer failed"] += 1
            self.baton.kill(process)
            raise Crashed from None
        finally:
            trainer.take_feeder.learner.close()
            inner.close()

    def _rollout(self, process: Process, bus: Bus, store: ObjectStore) -> None:
        name, stop = process.name, self._stops[process.name]
        on_update = "keep_version" if self.shape.keep_version else "in_flight"
        is_slow = self.shape.restless or self.shape.is_slow  # long enough to be moved
        tokens = 1 if is_slow else 4
        settings = RolloutSettings(
            slots=4, context_max=64, status_s=0.3, partial_tokens=tokens, on_update=on_update
        )
        clock, pause = self.baton.clock, self.baton.wait
        term = next_term(store, "rollouts", name, self.baton.random.uniform, pause)
        orders, follower = (
            AssignmentQueue(bus, name, term),
            AtOnceFollower(bus, store, clock, pause),
        )
        fetched = None
        while fetched is None and not stop.wait(0.05):
            follower.read()
            follower.prefetch(None)
            fetched = follower.take()
        if fetched is None:
            return
        version, slots = fetched.announced.version, settings.slots
        engine = FakeEngine(version, slots, clock, is_slow=is_slow)
        voice = RolloutPublisher(
            bus,
            SynchronousSender(bus),
            name,
            term,
            settings,
            StatusSchedule(settings.status_s),
            clock,
        )
        voice.applied(compare_all_tensors(fetched, engine.read_back, clock(), clock))
        rewards = FakeRewards()
        judging = Judging(rewards, term, lambda: engine.version, clock)  # type: ignore[arg-type]
        driver = SingleTurn(RolloutParts(engine, judging, voice, settings, clock))
        rollout = RolloutLoop(follower, orders, InProgress(driver), clock, pause)  # type: ignore[arg-type]
        if not self.shape.drafts:
            rollout.run(stop)  # type: ignore[arg-type]
            return
        whole = LogView(bus, store, RUN)
        with remembering(self.folder, bus, whole, self.asked, clock) as draft_feed:
            rollout.draft_feed = draft_feed
            rollout.run(stop)  # type: ignore[arg-type]


def trainer_settings(shape: Shape) -> TrainerSettings:
    return TrainerSettings.model_validate(
        {
            "steps": shape.steps,
            "groups_per_step": shape.groups,
            "samples_per_group": shape.samples,
            "micro_batch_tokens": shape.micro_batch_tokens,
            "workers": 1,
        }
        | shape.of("trainer")
    )


def _store_choices(store: ObjectStore, shape: Shape) -> str:
    """Stores the settings by which the trainer chooses samples, and returns their hash."""
    settings = trainer_settings(shape)
    choices = Choices(
        settings.survivors_min, settings.filter_equal_rewards, shape.max_lag, settings.overlong
    )
    digest = configuration_of(shape)
    create_idempotent(store, configuration_key(digest), encode_json(choices))
    return digest


def configuration_of(shape: Shape) -> str:
    """The hash by which a run of this shape names its configuration."""
    return content_hash(repr(shape).encode())


def _recorded(store: ObjectStore, order: PromptOrder) -> str:
    """Stores the settings of these prompts as a run does, and returns their hash."""
    sampling = order.sampling
    settings = encode_json(
        {
            "trainer.samples_per_group": order.samples,
            "sampling.temperature": sampling.temperature,
            "sampling.tokens_max": sampling.tokens_max,
            "seed": order.seed,
        }
    )
    digest = content_hash(settings)
    create_idempotent(store, configuration_key(digest), settings)
    return digest


@cache
def _task() -> Task:
    """Its prompts are drawn once, not at every start of their source."""
    return load_task(TaskSettings())


@cache
def _begin() -> InitialModel:
    model = build_model("Qwen3ForCausalLM", SIZES, seed=0)
    return InitialModel(model, model_files(model, None, model.dtype))
