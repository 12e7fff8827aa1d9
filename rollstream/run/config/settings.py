"""Holds all settings of a run in one frozen value (`Configuration`), and finds valid values that
cannot work together (`setting_problems`). A field's docstring is its text in the reference.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import Field

from rollstream.consumers.credit import GAE, scored_reference
from rollstream.consumers.settings import ArchiveSettings, DispatchSettings, TrainerSettings
from rollstream.foreign_json import parse_loose_json
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.engines.kind import ENGINES
from rollstream.producers.engines.paced_settings import PacedSettings
from rollstream.producers.engines.settings import OWN_ARGUMENTS
from rollstream.producers.settings import (
    EvaluationSettings,
    RolloutSettings,
    SamplingSettings,
    ScoringSettings,
    TaskSettings,
)
from rollstream.producers.tasks.code_environment import OWN_VARIABLES
from rollstream.run.config.objective_checks import objective_problems
from rollstream.storage.model_folder.hf_folder import (
    CONFIG,
    find_hf_folder,
    longest_positions,
    read_small_file,
)
from rollstream.storage.settings import (
    FIXED,
    INCIDENTAL,
    PROMPTED,
    CheckpointSettings,
    ModelSettings,
    RelaySettings,
    Settings,
    WeightsSettings,
)
from rollstream.storage.stores.kind import store_forms, store_kind
from rollstream.streams.kind import bus_forms, bus_kind


class WarmupSettings(Settings):
    """Supervised training of a new model before the first step, where no checkpoint is given
    (docs/explanation/quickstart-task.md).
    """

    enabled: bool = True
    """Make a model if `model.path` is not given and neither run folder nor store has one yet."""
    threads: Annotated[int, INCIDENTAL] = Field(default=2, ge=1)
    """Torch threads of the warm-up; no role runs at that time."""
    documents: int = Field(default=20_000, ge=1)
    """Number of examples (each a prompt and a correct answer) that the task makes for it."""
    steps: int = Field(default=800, ge=1)
    """Number of batches that are trained."""


class MetricsSettings(Settings):
    """Metrics and health that each process serves by HTTP (docs/reference/metrics.md)."""

    enabled: bool = True
    """Serve `/metrics` and `/healthz`."""
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` if other machines scrape the metrics."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: each process takes a free port and writes it to `metrics/endpoints/<name>.json`. Otherwise
    `rollstream run` listens on this port and its roles on the following ones; a role that is
    started alone listens on this port.
    """
    stalled_s: float = Field(default=300.0, gt=0)
    """Seconds without an iteration of a role's loop after which `/healthz` answers 503 (stalled);
    set it above the longest step or evaluation.
    """


class DevicesSettings(Settings):
    """GPUs of this machine by role (docs/how-to/several-gpus.md). A position is the index, from 0,
    among the GPUs that `rollstream run` sees. If neither `trainer` nor `rollouts` is set, every
    process sees all GPUs.
    """

    trainer: int | tuple[int, ...] | None = None
    """Number of GPUs for the trainer, or their positions; as many as `trainer.processes`."""
    rollouts: int | tuple[int, ...] | None = None
    """Number of GPUs for the rollouts, or their positions. They are cut into groups of one engine
    each, which the rollouts use in turn.
    """
    evaluation: Literal["rollouts", "trainer"] = "rollouts"
    """The role whose first GPUs the evaluation shares."""


class Configuration(Settings):
    """All settings of one run."""

    run: Annotated[str, FIXED] = Field(default="run", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run."""
    seed: Annotated[int, PROMPTED] = Field(default=0, ge=0)
    """Seed of the prompt order, the sampling and the warm-up."""
    folder: Annotated[str | None, INCIDENTAL] = None
    """The run's folder; default: `runs/<run>`."""
    bus: Annotated[str, FIXED] = "sqlite:bus"
    """URL of the log; a relative path is inside the run's folder."""
    store: Annotated[str, FIXED] = "file:store"
    """URL of the object store; a relative path is inside the run's folder."""
    sync: Annotated[Literal["normal", "full"], INCIDENTAL] = "normal"
    """When a write to a local log or store counts as done. `normal`: it survives the death of any
    process. `full`: it survives power loss and kernel crashes too, at the cost of a disk flush per
    write.
    """
    truncate: Annotated[bool | None, INCIDENTAL] = None
    """Whether records of the log are deleted once no role needs them to resume and the archive, if
    there is one, holds them. True: also without an archive. False: never. Default: only with an
    archive.
    """
    model: Annotated[ModelSettings, FIXED] = ModelSettings()
    """The model that is trained (the policy)."""
    task: TaskSettings = TaskSettings()
    """Prompts and rewards."""
    agent: AgentSettings = AgentSettings()
    """The program whose episodes are trained, if trajectories are episodes of a program."""
    sampling: Annotated[SamplingSettings, PROMPTED] = SamplingSettings()
    """How training trajectories are sampled."""
    scoring: ScoringSettings = ScoringSettings()
    """Scorers of this machine, which write late rewards."""
    devices: Annotated[DevicesSettings, INCIDENTAL] = DevicesSettings()
    """GPUs of this machine."""
    rollouts: Annotated[RolloutSettings, INCIDENTAL] = RolloutSettings()
    """Rollouts of this machine."""
    evaluation: Annotated[EvaluationSettings, INCIDENTAL] = EvaluationSettings()
    """Evaluation of versions on held-out prompts."""
    dispatch: DispatchSettings = DispatchSettings()
    """Admission, placement and recovery of groups."""
    trainer: TrainerSettings = TrainerSettings()
    """Steps, loss and optimiser."""
    paced: PacedSettings = PacedSettings()
    """Simulated speed of model and accelerators for the engine `paced`, which has neither."""
    weights: WeightsSettings = WeightsSettings()
    """How versions are published and kept."""
    relay: Annotated[RelaySettings, INCIDENTAL] = RelaySettings()
    """This node's cache of versions."""
    checkpoints: Annotated[CheckpointSettings, INCIDENTAL] = CheckpointSettings()
    """When the trainer's state is saved."""
    warmup: WarmupSettings = WarmupSettings()
    """Supervised training before the first step."""
    archive: Annotated[ArchiveSettings, INCIDENTAL] = ArchiveSettings()
    """The log as Parquet files."""
    metrics: Annotated[MetricsSettings, INCIDENTAL] = MetricsSettings()
    """Metrics and health of every process."""

    @property
    def has_model(self) -> bool:
        """Returns whether a model is trained and generates; without, the run only takes time."""
        return self.rollouts.kind.has_model

    @property
    def trainer_threads(self) -> int:
        """Returns the number of threads over which the metric `busy_s` of a step is a sum."""
        return self.trainer.workers if self.has_model and self.trainer.processes == 1 else 1


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """Names a setting, and the requirement that its value misses, e.g. `must be <
    rollouts.context_max (512)`.
    """

    key: str
    must: str


def setting_problems(configuration: Configuration) -> list[SettingProblem]:
    """Returns a problem for each combination of values that cannot work. An invalid Kafka URL
    raises its own error.
    """
    if configuration.rollouts.engine not in ENGINES:
        # The other checks ask the engine's kind.
        must = f"must be one of {', '.join(ENGINES)}"
        return [SettingProblem("rollouts.engine", must)]
    checks = (
        _check_urls,
        _check_model,
        _check_lora,
        _check_task,
        _check_verifier,
        _check_agent,
        _check_sampling,
        _check_evaluation,
        _check_rollouts,
        _check_paced,
        _check_admission,
        _check_training,
    )
    return [problem for check in checks for problem in check(configuration)]


def _check_urls(c: Configuration) -> Iterator[SettingProblem]:
    if c.folder is not None and not c.folder.strip():
        must = "must not be empty (--run, perhaps with an unset variable of the shell)"
        yield SettingProblem("folder", must)
    for key, url in (("bus", c.bus), ("store", c.store)):
        if "@" in url.partition("//")[2].partition("/")[0]:
            must = "must not hold credentials (give them in the environment of its client)"
            yield SettingProblem(key, must)
            continue
        scheme, _, path = url.partition(":")
        if scheme in ("file", "sqlite") and re.match("//[^/]", path):
            must = f"must be {scheme}:PATH, with one slash or three before an absolute path"
            # The first part would be a host's name.
            yield SettingProblem(key, must)
            continue
        kind = bus_kind(url) if key == "bus" else store_kind(url)
        if kind is None:
            forms = bus_forms() if key == "bus" else store_forms()
            yield SettingProblem(key, f"must be {' or '.join(forms)}")
        else:
            kind.check(url)


def _check_model(c: Configuration) -> Iterator[SettingProblem]:
    if c.model.path is None and c.has_model and not c.warmup.enabled:
        yield SettingProblem("model.path", "must be given when warmup.enabled is false")


def _check_lora(c: Configuration) -> Iterator[SettingProblem]:
    if not c.model.lora.rank:
        if c.model.lora.path is not None:
            yield SettingProblem("model.lora.path", "must not be set with model.lora.rank = 0")
        return
    problem = c.rollouts.kind.adapter_problem(c.rollouts)
    if problem is not None:
        yield SettingProblem(*problem)


def _check_task(c: Configuration) -> Iterator[SettingProblem]:
    t, mixture = c.task, 'with task.name = "mixture"'
    if t.parts and t.name != "mixture":
        yield SettingProblem("task.parts", f"must be given {mixture} only")
    if t.name == "mixture" and not t.parts:
        yield SettingProblem(
            "task.parts", f"must have a table for each task {mixture} ([[task.parts]])"
        )
    if t.name == "mixture" and t.options:
        yield SettingProblem("task.options", f"must be empty {mixture}: each part has its own")
    if t.system and t.template == "plain":
        yield SettingProblem(
            "task.system", 'must be empty with task.template = "plain": it is a message'
        )
    for name in t.environment:
        if name.startswith(OWN_VARIABLES):
            must = f"must not name {name}: roles read it (give the task a variable of its own)"
            yield SettingProblem("task.environment", must)


# Tasks whose option `verifier` judges answers.
VERIFIED = ("dataset", "tools")


def lacks_verifier(name: object, options: Mapping[str, object]) -> bool:
    """Returns whether no answer of this task, or part of a mixture, can be judged by the task."""
    return name in VERIFIED and bool(options.get("path")) and not options.get("verifier")


def _check_verifier(c: Configuration) -> Iterator[SettingProblem]:
    t = c.task
    is_scored = t.reward == "late" and bool(c.scoring.function)
    if is_scored and not c.evaluation.enabled:
        return
    must = "must have a verifier (`module:function`)"
    must += (
        ", which an evaluation calls, or evaluation.enabled must be false"
        if is_scored
        else '; only with task.reward = "late" and a scoring.function none is needed'
    )
    if lacks_verifier(t.name, t.options):
        yield SettingProblem("task.options", must)
    for part in t.parts:
        if lacks_verifier(part.name, part.options):
            yield SettingProblem("task.parts", f"{must} in the options of {part.name}")


def _check_agent(c: Configuration) -> Iterator[SettingProblem]:
    a = c.agent
    if not a.is_active:
        return
    if sum(map(bool, (a.episode, a.command, a.service))) > 1:
        yield SettingProblem("agent.episode", "must be the only one of episode, command, service")
    if c.evaluation.enabled:
        must = "must be false with [agent]: an evaluation asks for single answers"
        yield SettingProblem("evaluation.enabled", must)
    if a.endpoint.rpartition(":")[2] != "0" and c.rollouts.count > 1:
        must = f"must have port 0 with rollouts.count = {c.rollouts.count}, each has its own"
        yield SettingProblem("agent.endpoint", must)


def _check_sampling(c: Configuration) -> Iterator[SettingProblem]:
    reason = "(the kept set is not recorded, so its log-probabilities cannot be trained on)"
    if c.sampling.temperature == 0:
        yield SettingProblem(
            "sampling.temperature", "must be > 0 when training (greedy never explores)"
        )
    if c.sampling.top_k:
        yield SettingProblem("sampling.top_k", f"must be 0 when training {reason}")
    if c.sampling.top_p < 1:
        yield SettingProblem("sampling.top_p", f"must be 1 when training {reason}")
    if c.sampling.tokens_max >= c.rollouts.context_max:
        limit = f"rollouts.context_max ({c.rollouts.context_max}), which holds the prompt too"
        yield SettingProblem("sampling.tokens_max", f"must be < {limit}")


def _check_evaluation(c: Configuration) -> Iterator[SettingProblem]:
    tokens = c.evaluation.tokens_max
    if c.evaluation.enabled and tokens is not None and tokens >= c.rollouts.context_max:
        limit = f"rollouts.context_max ({c.rollouts.context_max}), which holds the prompt too"
        yield SettingProblem("evaluation.tokens_max", f"must be < {limit}")


def _check_rollouts(c: Configuration) -> Iterator[SettingProblem]:
    low, high = c.rollouts.kind.temperatures
    temperatures = {"sampling.temperature": c.sampling.temperature}
    if c.evaluation.enabled:
        temperatures["evaluation.temperature"] = c.evaluation.temperature
    for key, temperature in temperatures.items():
        if temperature and not low <= temperature <= high:
            must = f"must lie in [{low:g}, {high:g}] with rollouts.engine = {c.rollouts.engine!r}"
            yield SettingProblem(key, must)
    if c.rollouts.drafts == "history" and not c.rollouts.can_draft:
        with_url = "vllm.url: that server's owner configures its drafts"
        with_paced = f"engine = {c.rollouts.engine!r}: only 'torch' and 'vllm' draft"
        where = with_url if c.rollouts.has_server else with_paced
        yield SettingProblem("rollouts.drafts", f"must be 'auto' or 'off' with rollouts.{where}")
    if c.rollouts.has_server and c.rollouts.count != 1:
        yield SettingProblem(
            "rollouts.count", "must be 1 with rollouts.vllm.url (one for each server)"
        )
    yield from _check_engine_arguments(c)
    longest = model_positions(c.model.path, c.model.config)
    if isinstance(longest, int) and c.rollouts.context_max > longest:
        where = "model.config.max_position_embeddings"
        must = f"must be ≤ {where if c.model.path is None else 'what the model takes'} ({longest})"
        yield SettingProblem("rollouts.context_max", must)
    if c.dispatch.heartbeat_timeout_s < 4 * c.rollouts.status_s:
        # The heartbeat thread of a rollout repeats the status of a busy loop after two intervals;
        # the time-out must be at least twice that.
        beats = f"4 × rollouts.status_s ({c.rollouts.status_s:g})"
        must = f"must be ≥ {beats}, or living rollouts look dead"
        yield SettingProblem("dispatch.heartbeat_timeout_s", must)
    if c.dispatch.stuck_timeout_s < c.dispatch.heartbeat_timeout_s:
        minimum = f"dispatch.heartbeat_timeout_s ({c.dispatch.heartbeat_timeout_s:g})"
        yield SettingProblem("dispatch.stuck_timeout_s", f"must be ≥ {minimum}")


def _check_engine_arguments(c: Configuration) -> Iterator[SettingProblem]:
    args = c.rollouts.vllm.args
    if args and c.rollouts.has_server:
        must = "must be empty with rollouts.vllm.url: that server was started with its own"
        yield SettingProblem("rollouts.vllm.args", must)
    for name in sorted(args.keys() & OWN_ARGUMENTS):
        yield SettingProblem(
            "rollouts.vllm.args", f"must not have {name!r}, which is set by {OWN_ARGUMENTS[name]}"
        )


def _check_paced(c: Configuration) -> Iterator[SettingProblem]:
    p, engine = c.paced, c.rollouts.engine
    if c.trainer.learner != c.rollouts.kind.learner:
        must = f"must be {c.rollouts.kind.learner!r} with rollouts.engine = {engine!r}"
        yield SettingProblem("trainer.learner", must)
    if c.evaluation.enabled and not c.has_model:
        yield SettingProblem(
            "evaluation.enabled", f"must be false with rollouts.engine = {engine!r}"
        )
    if p.kv_tokens is not None and p.kv_tokens < c.rollouts.context_max:
        must = f"must be ≥ rollouts.context_max ({c.rollouts.context_max}): one sequence must fit"
        yield SettingProblem("paced.kv_tokens", must)
    if p.lengths.trace is not None and p.lengths.parts:
        yield SettingProblem("paced.lengths.parts", "must be empty with paced.lengths.trace")
    for key, parts in (("p99", (p.lengths,)), ("parts", p.lengths.parts)):
        for part in parts:
            if part.p99 < part.median:
                must = f"must have a p99 ≥ its median ({part.median:g})"
                yield SettingProblem(f"paced.lengths.{key}", must)


def model_positions(path: str | None, config: Mapping[str, object]) -> int | None:
    """Returns the longest sequence, in tokens, of `model_fields`; None if they do not state it."""
    return longest_positions(model_fields(path, config))


def model_fields(path: str | None, config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the model's configuration: the `config.json` in its folder `path`, or `config`
    without one; empty if the file cannot be read.
    """
    fields: object = config
    if path is not None:
        try:
            folder = find_hf_folder(path)
            fields = parse_loose_json(read_small_file(folder / CONFIG))
        # `_check_model` and the loader report the error.
        except (OSError, ValueError):
            return {}
    return cast(Mapping[str, object], fields) if isinstance(fields, Mapping) else {}


def _check_admission(c: Configuration) -> Iterator[SettingProblem]:
    if c.dispatch.max_lag is None and c.dispatch.ready_groups_max < c.trainer.groups_per_step:
        wave = c.trainer.groups_per_step
        must = f"must be ≥ trainer.groups_per_step ({wave}), or no step is ever complete"
        yield SettingProblem("dispatch.ready_groups_max", must)


def _check_training(c: Configuration) -> Iterator[SettingProblem]:
    t = c.trainer
    if t.groups_per_step < t.updates_per_step:
        must = f"must be ≥ trainer.updates_per_step ({t.updates_per_step}), which share the groups"
        yield SettingProblem("trainer.groups_per_step", must)
    if t.samples_per_group < 2 and t.advantage != GAE:
        must = f"must be ≥ 2: advantage {t.advantage} compares the samples of a group"
        yield SettingProblem("trainer.samples_per_group", must)
    if c.scoring.holds_reference and not scored_reference(t):
        must = "must not be 'reference' unless trainer.reference_by = 'score' and reference_kl > 0"
        yield SettingProblem("scoring.function", must)
    checkpoint_steps = c.checkpoints.every * (c.checkpoints.keep + 1)
    for key, must in objective_problems(
        t, c.dispatch.max_lag, c.weights.versions_max, checkpoint_steps
    ):
        yield SettingProblem(key, must)
    if t.survivors_min > t.samples_per_group:
        must = f"must be ≤ trainer.samples_per_group ({t.samples_per_group})"
        yield SettingProblem("trainer.survivors_min", must)
    if t.processes > 1 and not c.has_model:
        must = f"must be 1 with trainer.learner = {t.learner!r}: it has no model to share"
        yield SettingProblem("trainer.processes", must)
    if t.processes > 1 and (t.epochs > 1 or t.optimiser != "adamw"):
        must = "must be 1 with trainer.epochs > 1 or another trainer.optimiser than 'adamw'"
        yield SettingProblem("trainer.processes", must)
    if t.processes > 1 and ":" in t.device:
        must = "must be 'cpu', 'cuda' or 'auto' with trainer.processes > 1: each takes its own GPU"
        yield SettingProblem("trainer.device", must)
    if not all(0 <= beta < 1 for beta in t.betas):
        yield SettingProblem("trainer.betas", "must lie in [0, 1)")
