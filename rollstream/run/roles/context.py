"""Opens a role's context, and builds parts that several roles need."""

import logging
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rollstream.consumers.trainer.data.training_rule import TrainingRule, training_rule
from rollstream.deadline import Deadline
from rollstream.errors import ConfigurationError, EngineRefused, EngineUnavailable
from rollstream.producers.prompt_source import PromptOrder
from rollstream.producers.tasks.base import Task
from rollstream.producers.tasks.registry import largest_token, load_task, too_few_tokens
from rollstream.run.config.run_folder import open_run_log_for_writing, store_url
from rollstream.run.config.run_model import (
    has_versions,
    local_model_folder,
    missing_model,
    model_folder,
    run_model,
    store_starting_model,
    task_settings,
)
from rollstream.run.config.settings import Configuration
from rollstream.run.metrics.endpoint import ProcessMetrics
from rollstream.run.metrics.metered import MeteredBus, MeteredStore
from rollstream.storage.model_folder.hf_folder import CONFIG, hf_vocabulary_size, read_hf_config
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.admissible import TrainingBounds
from rollstream.streams.bus import Bus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling

MODEL_WAIT_S, MODEL_POLL_S = 3600.0, 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLaunch:
    role: str
    configuration: Configuration
    folder: Path
    name: str
    """Of the process, e.g. `rollout-0`; log, metrics and term carry it."""
    stop: threading.Event
    nonce: str
    """Of this process as holder of a lease."""
    handed_nonce: str | None = None
    """Of the predecessor, whose process the supervisor saw end; its lease may be taken at once."""
    accept_config: bool = False
    """Continues a run whose recorded configuration is another one."""
    grace_s: float | None = None
    """Of a preemptible rollout after a request to stop; None for other roles."""
    until_complete: bool = False
    """A role without an end of its own ends with the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext(RoleLaunch):
    """A launched role with the opened log (`bus`) and store of the run."""

    bus: Bus
    store: ObjectStore
    watch: ProcessMetrics


@contextmanager
def open_role_context(launch: RoleLaunch, watch: ProcessMetrics) -> Generator[RoleContext]:
    """Opens log and store while the block runs; creates missing topics. The context's `stop` is
    that of `watch`, whose health follows from the polls of the role's loop.
    """
    bus = MeteredBus(open_run_log_for_writing(launch.configuration, launch.folder))
    try:
        url = store_url(launch.configuration, launch.folder)
        store = MeteredStore(open_store(url, launch.configuration.sync))
        watch.dependencies += [bus.metric_values, store.metric_values]
        bus.create(catalogue())
        options = {part.name: getattr(launch, part.name) for part in fields(RoleLaunch)}
        options["stop"] = watch.stop
        yield RoleContext(**options, bus=bus, store=store, watch=watch)
    finally:
        bus.close()


def await_model(context: RoleContext) -> bool:
    """Waits until the run's model is in the store or on this host; False if the role is stopped
    first. Raises `ConfigurationError` if there is no model after `MODEL_WAIT_S`.
    """
    c, folder = context.configuration, context.folder
    deadline, is_logged = Deadline(MODEL_WAIT_S), False
    while True:
        # Read before the store's model: that of a new run is there before its first version.
        is_old = has_versions(context.store)
        if run_model(c, folder) is not None:
            return True
        if (local_model_folder(c, folder) / CONFIG).is_file():
            # A trainer's first rank stores its host's model, and the others wait: all read the same
            # one.
            if is_old or context.role != "train":
                return True
            if os.environ.get("RANK", "0") == "0":
                store_starting_model(context.store, c, folder)
                return True
        if deadline.passed():
            raise missing_model(c)
        if not is_logged:
            log.warning("waiting for the run's model: %s", missing_model(c))
            is_logged = True
        if context.stop.wait(MODEL_POLL_S):
            return False


def set_torch_threads(threads: int) -> None:
    import torch

    # torch's default is one for each core, and several roles share few cores.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def check_vocabulary(configuration: Configuration, folder: Path, task: Task) -> None:
    """Raises `ConfigurationError` if the model of `model.path` has fewer tokens than the task's
    tokenizer, its first prompt or its stop tokens use. Tokens without room in the model (padding,
    images) pass until they are used.
    """
    path = configuration.model.path
    if path is None:
        # A warm-up's model has the tokenizer's size.
        return
    fields = read_hf_config(model_folder(configuration, folder))
    text: Mapping[str, Any] = fields.get("text_config") or fields
    size = text.get("vocab_size")
    largest = largest_token(task, task.prompt(configuration.seed, 0).tokens)
    if isinstance(size, int) and largest >= size:
        raise too_few_tokens(path, size, task.name, largest)


def prompt_tokens_max(configuration: Configuration) -> int:
    """Returns the most tokens, leaving room for the longest answer."""
    return configuration.rollouts.context_max - configuration.sampling.tokens_max


def load_run_task(configuration: Configuration, folder: Path) -> Task:
    """The run's model must exist: its tokenizer may be the task's."""
    return load_task(task_settings(configuration, folder), prompt_tokens_max(configuration))


def prompt_order(
    configuration: Configuration, folder: Path, loaded: Task | None = None
) -> PromptOrder:
    """`loaded` is the run's task, if the caller has it. Raises `ConfigurationError` if the model
    lacks its tokens.
    """
    c = configuration
    task = load_run_task(c, folder) if loaded is None else loaded
    check_vocabulary(c, folder, task)
    sampling = Sampling(
        c.sampling.temperature,
        c.sampling.top_k,
        c.sampling.top_p,
        c.sampling.tokens_max,
        tuple(task.stop),
    )
    samples, limit = c.trainer.samples_per_group, prompt_tokens_max(c)
    return PromptOrder(
        c.task.name, task.prompt, sampling, samples, c.seed, limit, c.task.redundancy
    )


def run_rule(c: Configuration, folder: Path) -> TrainingRule:
    """Returns the rule by which this run's trainer chooses trained samples."""
    bounds = training_bounds(c, hf_vocabulary_size(model_folder(c, folder)))
    return training_rule(c.trainer, c.dispatch.max_lag, bounds.keep_version, bounds)


def training_bounds(c: Configuration, vocabulary: int | None) -> TrainingBounds:
    """Returns the training bounds of trainable trajectories (`streams/admissible.py`); with
    `vocabulary` None any token id passes.
    """
    keep_version = c.rollouts.on_update == "keep_version"
    vocabulary_size = TrainingBounds().vocabulary if vocabulary is None else vocabulary
    return TrainingBounds(vocabulary_size, c.rollouts.context_max, keep_version)


@contextmanager
def classify_engine_errors(
    engine: str,
    *,
    is_server: bool = False,
    is_first: bool = True,
    instead: str = "another engine (rollouts.engine)",
) -> Generator[None]:
    """Changes an error of the block, which opens an engine: `ConfigurationError` ends the role,
    after `EngineUnavailable` the supervisor starts it again. `instead` names the alternative to
    another model.

    Final is a refusal of the model or a setting by a check of Rollstream. Not final are failures of
    a library or the machine (the error has a cause), a refusal of a later version than the first
    (`is_first`), since the next may be accepted, and wrong settings of an external server
    (`is_server`), whose own refusals pass unchanged.
    """
    try:
        yield
    except EngineRefused as error:
        if is_server:
            raise
        kind = ConfigurationError if is_first and error.__cause__ is None else EngineUnavailable
        raise kind(
            f"engine {engine!r} cannot serve this run's model: {error}; choose another model "
            f"(model.path) or {instead}"
        ) from error
    except ConfigurationError as error:
        if not is_server:
            raise
        raise EngineUnavailable(str(error)) from error
