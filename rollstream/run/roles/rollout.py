"""Runs a rollout as a role. Also measures an engine's profile, which belongs to a machine, an
engine and a shape of model, not to weights.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollstream.errors import ConfigurationError, EngineRefused
from rollstream.foreign_json import parse_json
from rollstream.producers.engine_factory import ConfiguredModel
from rollstream.producers.engines.base import Engine
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.profile import (
    CONTEXT_MIN,
    EngineProfile,
    StepTiming,
    TimedEngine,
    fit_profile,
    model_key,
    profile_path,
    read_profile,
)
from rollstream.producers.engines.roofline import batch_max
from rollstream.producers.rewards.pool import CAPACITY, RewardPool
from rollstream.producers.rollout.assignments import AssignmentQueue
from rollstream.producers.rollout.chain import ChainPrefetch
from rollstream.producers.rollout.heartbeat import Heartbeat, StatusSchedule
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.read_back import FetchedWeights, compare_all_tensors
from rollstream.producers.rollout.sender import BackgroundSender
from rollstream.producers.rollout.turn_driver import (
    DriverScope,
    RolloutParts,
    TurnDriver,
    open_driver,
)
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.producers.tasks.base import Task, is_asynchronous
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.run_model import (
    has_local_weights,
    local_model_folder,
    run_model,
    task_settings,
)
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import (
    RoleContext,
    classify_engine_errors,
    load_run_task,
    prompt_tokens_max,
    set_torch_threads,
    training_bounds,
)
from rollstream.run.roles.roles import with_weight_source
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import ROLLOUTS, hold_name, next_term
from rollstream.storage.weights.fetch import fetch_model_file
from rollstream.storage.weights.form import form_of
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.streams.bus import Bus
from rollstream.streams.release import ABANDONED, SHARED_FEATURES
from rollstream.streams.values import Version

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from rollstream.producers.drafts.opening import RolloutDrafts

# Between two looks for the first version.
POLL_S = 0.02


def run_profile(
    configuration: Configuration, folder: Path, model: "PreTrainedConfig"
) -> EngineProfile | None:
    """Returns that of `rollouts.profile`, else in the run's folder. Raises `ConfigurationError` if
    it is of another engine or shape of model, or if the configured file is no profile.
    """
    engine = configuration.rollouts.engine
    rollouts = configuration.rollouts
    key = model_key(model, rollouts.kind.timed_settings(rollouts))
    configured_path = configuration.rollouts.profile
    path = profile_path(folder, engine, key) if configured_path is None else Path(configured_path)
    if configured_path is None and not path.exists():
        return None
    profile = read_profile(path)
    if (profile.engine, profile.model) != (engine, key):
        raise ConfigurationError(
            f"{path} is a profile of engine {profile.engine} and model {profile.model}, the run "
            f"has {engine} and {key}; make its own with `rollstream profile CONFIG`"
        )
    return profile


def measure_profile(
    configuration: Configuration, folder: Path, progress: Callable[[StepTiming], None]
) -> EngineProfile:
    """Measures the profile on the run's model, before the warm-up on an untrained one. Raises
    `ConfigurationError` if the engine or the context cannot be measured.
    """
    c = configuration
    kind = c.rollouts.kind
    if kind.roofline(c) is not None:
        raise ConfigurationError(
            f"rollouts.engine: {kind.name!r} has nothing to measure, its step times are computed "
            "from its settings; profile a configuration with a real engine"
        )
    if c.rollouts.context_max < CONTEXT_MIN:
        raise ConfigurationError(
            f"rollouts.context_max must be ≥ {CONTEXT_MIN} to be profiled, "
            f"got {c.rollouts.context_max}"
        )
    set_torch_threads(c.rollouts.threads)
    model = _load_or_build_model(c, folder)
    slots, context_max = c.rollouts.slots, c.rollouts.context_max
    weights, device = model.state_dict(), kind.device(c.rollouts)
    engine = kind.open(
        c,
        ConfiguredModel(model.config),
        weights,
        Version(0, 0),
        EngineOptions(slots=slots, context_max=context_max, device=device, dtype=c.rollouts.dtype),
    )
    timing = TimedEngine(engine, slots, context_max, int(model.config.vocab_size))
    points: list[StepTiming] = []
    for point in timing.points():
        points.append(point)
        progress(point)
    key = model_key(model.config, kind.timed_settings(c.rollouts))
    profile = fit_profile(c.rollouts.engine, key, slots, context_max, points)
    return replace(profile, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _load_or_build_model(configuration: Configuration, folder: Path) -> "PreTrainedModel":
    from rollstream.run.roles.train import load_starting_model
    from rollstream.run.warmup.warmup import untrained_model
    from rollstream.storage.starting_model.models import load_model

    # Then no store is needed.
    if has_local_weights(configuration, folder):
        return load_model(str(local_model_folder(configuration, folder)))
    if run_model(configuration, folder) is not None:
        return load_starting_model(configuration, folder)
    task = load_task(configuration.task, prompt_tokens_max(configuration))
    return untrained_model(configuration.model, task, configuration.seed)


def run_rollout(context: RoleContext) -> bool:
    """Generates until the role is stopped. Returns False: a rollout is never done."""
    rollout = build_rollout(with_weight_source(context))
    if rollout is not None:
        context.watch.offer(rollout.metric_values, rollout.readers)
        rollout.run(context.stop)
    return False


def build_rollout(context: RoleContext) -> RolloutLoop | None:
    """Takes the rollout's next term and waits for a version; returns once the engine serves it and
    an `Applied` record states so, or None if the role was stopped before.
    """
    c = context.configuration
    set_torch_threads(c.rollouts.threads)
    os.nice(c.rollouts.niceness)
    # While the trainer still publishes the first version.
    c.rollouts.kind.import_ahead()
    task = load_run_task(c, context.folder)
    term = next_term(context.store, ROLLOUTS, context.name)
    assignments = AssignmentQueue(context.bus, context.name, term)
    follower = _open_follower(context)
    fetched = _first_weights(context, follower)
    if fetched is None:
        return None
    started = time.perf_counter()
    drafts = _open_drafts(context)
    engine, batch_bound = _open_first_engine(context, fetched, drafts)
    schedule = StatusSchedule(c.rollouts.status_s)
    publisher = RolloutPublisher(
        context.bus,
        BackgroundSender(context.bus),
        context.name,
        term,
        c.rollouts,
        schedule,
        batch_max=batch_bound,
        preemptible=context.grace_s is not None,
        heartbeat=Heartbeat(context.bus, c.rollouts.status_s),
    )
    publisher.applied(compare_all_tensors(fetched, engine.read_back, started))
    judging = _open_judging(
        context,
        task,
        term,
        lambda: engine.version if follower.newest is None else follower.newest.version,
    )
    driver = _open_driver(context, task, RolloutParts(engine, judging, publisher, c.rollouts))
    # No bound for the vocabulary: an engine emits no token beyond its own.
    in_progress = InProgress(
        driver, bounds=training_bounds(c, None), prefetch=ChainPrefetch(context.bus)
    )
    rollout = RolloutLoop(
        follower,
        assignments,
        in_progress,
        draft_feed=None if drafts is None else drafts.feed,
    )
    if context.grace_s is not None:
        # The other half is for publishing.
        rollout.outcome_wait_s = context.grace_s / 2
    return rollout


def _open_follower(context: RoleContext) -> WeightsFollower:
    c = context.configuration
    follower = WeightsFollower(context.bus, context.store)
    episodes = {ABANDONED} if c.agent.is_active else frozenset[str]()
    follower.writes = SHARED_FEATURES | c.rollouts.kind.needs(c.rollouts) | episodes
    # After each fetch: takes the rollout's name again, should its object have been deleted.
    follower.hold_name = lambda: hold_name(context.store, ROLLOUTS, context.name)
    return follower


def _open_judging(
    context: RoleContext, task: Task, term: int, newest: Callable[[], Version]
) -> Judging:
    c = context.configuration
    pool = RewardPool(
        task_settings(c, context.folder),
        capacity=max(CAPACITY, 2 * c.rollouts.episodes_max),
        is_asynchronous=is_asynchronous(task),
    )
    return Judging(pool, term, newest, late=c.task.reward == "late")


def _open_driver(context: RoleContext, task: Task, parts: RolloutParts) -> TurnDriver:
    c = context.configuration
    scope = DriverScope(task_settings(c, context.folder), c.agent, context.store, c.run)
    return open_driver(parts, task, scope)


def _open_drafts(context: RoleContext) -> "RolloutDrafts | None":
    c, bus = context.configuration, context.bus
    if not c.rollouts.is_drafting:
        return None
    from rollstream.producers.drafts.opening import open_drafts
    from rollstream.producers.drafts.shared_memory import segment_folder

    def earlier() -> Bus:
        if not c.archive.enabled:
            return bus
        from rollstream.storage.archive.log_view import LogView

        return LogView(bus, context.store, c.run)

    folder = segment_folder(c.run, context.folder, socket.gethostname())
    return open_drafts(bus, earlier, folder, c.rollouts)


def _open_first_engine(
    context: RoleContext, fetched: FetchedWeights, drafts: "RolloutDrafts | None"
) -> tuple[Engine, int]:
    rollouts = context.configuration.rollouts
    is_first = fetched.announced.version.number == 0
    with classify_engine_errors(rollouts.engine, is_server=rollouts.has_server, is_first=is_first):
        return open_rollout_engine(context, fetched, drafts)


def open_rollout_engine(
    context: RoleContext, fetched: FetchedWeights, drafts: "RolloutDrafts | None" = None
) -> tuple[Engine, int]:
    """Returns the engine, which serves the fetched version, and its B_max: the configured one, else
    that of its step times, else all slots.
    """
    c, announced = context.configuration, fetched.announced
    manifest = read_manifest(context.store, announced.version, announced.manifest_hash)
    slots, context_max = c.rollouts.slots, c.rollouts.context_max
    kind, model = c.rollouts.kind, VersionModel(context.store, manifest)
    opening = form_of(manifest).opening(context.store, manifest, fetched.update.tensors)
    engine = kind.open(
        c,
        model,
        opening.tensors,
        opening.version,
        EngineOptions(
            slots=slots,
            context_max=context_max,
            device=kind.device(c.rollouts),
            dtype=c.rollouts.dtype,
            drafts=None if drafts is None else drafts.source,
            gate=None if drafts is None else drafts.gate,
            adapter_rank=c.model.lora.rank,
        ),
    )
    if opening.version != announced.version:
        # The base never changes, so it is compared here once.
        wrong = engine.read_back(opening.tensors, opening.tensors).differing
        if wrong:
            raise EngineRefused(
                f"weights: the engine does not serve {wrong[0]} of the base as given"
            )
        engine.update(fetched.update, c.rollouts.on_update)
    roofline = kind.roofline(c)
    if roofline is None and (profile := run_profile(c, context.folder, model.config())) is not None:
        roofline = profile.roofline
    profiled = slots if roofline is None else batch_max(roofline, slots)
    return engine, c.rollouts.batch_max or profiled


@dataclass(frozen=True)
class VersionModel:
    """Describes the model by the version's files, read once."""

    store: ObjectStore
    manifest: Manifest

    def vocabulary(self) -> int:
        text = fetch_model_file(self.store, self.manifest, "config.json")
        return int(parse_json(text, dict[str, Any])["vocab_size"])

    def config(self) -> "PreTrainedConfig":
        return self._config

    @cached_property
    def _config(self) -> "PreTrainedConfig":
        from rollstream.storage.starting_model.models import config_from_version

        return config_from_version(self.store, self.manifest)


def _first_weights(context: RoleContext, follower: WeightsFollower) -> FetchedWeights | None:
    while not context.stop.wait(POLL_S):
        follower.read()
        follower.prefetch(None)
        if (fetched := follower.take()) is not None:
            return fetched
    return None
