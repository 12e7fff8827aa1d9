"""Evaluates versions on held-out prompts: as a role beside the run, or stored ones on request.

Due are every `evaluation.every`-th version and the last; each has one line in `metrics/eval.jsonl`,
also after a kill, unless it was removed too early. Waiting ones are pinned: retention removes
others first.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field

from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.metric_values import MetricValues
from rollstream.producers.engine_factory import ConfiguredModel
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.rollout.evaluation import EvaluationPlan, evaluate
from rollstream.producers.tasks.base import Task, held_out_count, is_asynchronous
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.run_model import task_settings
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import (
    RoleContext,
    classify_engine_errors,
    load_run_task,
    set_torch_threads,
)
from rollstream.storage.metrics_file import MetricsFile, read_metrics
from rollstream.storage.starting_model.models import config_from_version
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.form import form_of
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.storage.weights.retention import (
    PINNED_MAX,
    VersionPins,
    is_whole,
    listed_versions,
    stored_versions,
)
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.values import Version

log = logging.getLogger(__name__)

POLL_S = 0.2
EVALUATION_OFF = "no evaluation (evaluation.enabled = false)"


def evaluate_announced(context: RoleContext) -> bool:
    """Appends a line for each due version until the last step's is done (True) or the role is
    stopped (False). Versions with a line are not repeated.
    """
    c = context.configuration
    set_torch_threads(c.evaluation.threads)
    path = RunFolder(context.folder).metrics / "eval.jsonl"
    evaluator = _open_evaluator(context)
    if not evaluator.prompts:
        return True
    evaluator.done = {int(line["step"]) for line in read_metrics(path)}
    reader = TopicReader(context.bus, "weights", from_begin(context.bus, "weights"))
    context.watch.offer(evaluator.metric_values, lambda: [reader])
    announced: dict[int, Version] = {}
    pins = VersionPins(context.store, context.name)
    with MetricsFile(path, bytes_max=None) as metrics, closing(pins):  # one line per evaluation
        while not context.stop.is_set() and c.trainer.steps not in evaluator.done:
            for received in reader.follow():
                if isinstance(received.record, WeightsAnnounced):
                    version = received.record.version
                    announced[version.number] = version
            newest = max(announced, default=-1)
            due = [n for n in due_numbers(c, newest) if n not in evaluator.done]
            evaluator.due = len(due)
            if not due:
                context.stop.wait(POLL_S)
                continue
            versions = kept_versions(context, due, announced)
            evaluator.give_up(number for number in due if number not in versions)
            waiting = [versions[number] for number in due if number in versions]
            pins.set(waiting[:PINNED_MAX])
            if not waiting:
                continue
            line = evaluator.line(waiting[0])
            evaluator.done.add(waiting[0].number)
            pins.set(waiting[1:][:PINNED_MAX])
            if line is not None:
                metrics.append(line)
                evaluator.evaluated(line)
    return c.trainer.steps in evaluator.done


def evaluate_stored(context: RoleContext, numbers: Iterable[int]) -> Iterator[dict[str, object]]:
    """Yields their lines. Raises `ObjectMissing` for a version that is not stored."""
    c = context.configuration
    set_torch_threads(c.evaluation.threads)
    evaluator = _open_evaluator(context)
    if not evaluator.prompts:
        raise ConfigurationError(f"task {evaluator.task.name!r} holds out no prompts to evaluate")
    for number in numbers:
        version = stored_version(context, number)
        if version is None:
            numbers_kept = ", ".join(str(v.version.number) for v in stored_versions(context.store))
            raise ObjectMissing(f"version {number} is not kept; kept are {numbers_kept}")
        line = evaluator.line(version)
        if line is not None:
            yield line


def _open_evaluator(context: RoleContext) -> "Evaluator":
    c, folder = context.configuration, context.folder
    task = load_run_task(c, folder)
    is_set = "prompts" in c.evaluation.model_fields_set
    # Here, not at the first version.
    prompts = held_out_count(task, c.evaluation.prompts, is_set)
    if prompts < c.evaluation.prompts:
        log.warning("evaluation.prompts = %d: no more are held out", prompts)
    pool = RewardPool(task_settings(c, folder), is_asynchronous=is_asynchronous(task))
    return Evaluator(context, task, pool, prompts)


def due_numbers(c: Configuration, newest: int) -> list[int]:
    """Returns those up to `newest`, evaluated or not; version 0 is due."""
    last = [c.trainer.steps] if newest >= c.trainer.steps else []
    return sorted({*range(0, newest + 1, c.evaluation.every), *last})


def kept_versions(
    context: RoleContext, numbers: Sequence[int], announced: Mapping[int, Version]
) -> dict[int, Version]:
    """Returns versions that still have objects: as announced, else of the highest term. The store
    is listed once.
    """
    listed = {version.number: version for version in sorted(listed_versions(context.store))}
    return {n: announced.get(n, listed[n]) for n in numbers if n in listed}


def stored_version(context: RoleContext, number: int) -> Version | None:
    """Returns a version that is complete, of the highest term (a replaced trainer made one too)."""
    listed = [v for v in listed_versions(context.store) if v.number == number]
    return next((v for v in sorted(listed, reverse=True) if is_whole(context.store, v)), None)


@dataclass(slots=True)
class Evaluator:
    """Evaluates one version after the other, each in a new engine."""

    context: RoleContext
    task: Task
    rewards: RewardPool
    prompts: int
    held: ResidentWeights = field(default_factory=ResidentWeights)
    """The previously evaluated version: only deltas to the next one are fetched."""
    done: set[int] = field(default_factory=set[int])
    """Versions that are evaluated, or that retention removed before."""
    has_no_start: bool = False
    """Version 0 was looked for in vain: it never comes back."""
    due: int = 0
    count: int = 0
    last: dict[str, float] = field(default_factory=dict[str, float])

    def give_up(self, numbers: Iterable[int]) -> None:
        """Versions that the store does not hold any more count as done."""
        gone = sorted(numbers)
        self.done.update(gone)
        if gone:
            log.warning("versions %s are gone before their evaluation", gone)

    def evaluated(self, line: dict[str, object]) -> None:
        self.count += 1
        self.last = {k: float(v) for k, v in line.items() if isinstance(v, int | float)}

    def metric_values(self) -> MetricValues:
        last = dict(self.last)
        version = {"eval_version": last.pop("step")} if last else {}
        return {
            "eval_versions_total": self.count,
            "eval_versions_due": self.due,
            "eval_last": last,
            **version,
        }

    def line(self, version: Version) -> dict[str, object] | None:
        """Returns the line of `eval.jsonl`; None if the version was removed before it
        was fetched.
        """
        c, store = self.context.configuration, self.context.store
        try:
            # Fetched and verified first, so its removal cannot disturb the evaluation.
            manifest = self.held.update(store, version).manifest
            config = config_from_version(store, manifest)
            tensors = form_of(manifest).model_tensors(store, manifest, self.held.tensors)
        except ObjectMissing as error:
            log.warning("version %s is gone before its evaluation: %s", version, error)
            return None
        kind = c.rollouts.kind.evaluating(c.rollouts)
        # If the engine refuses the first version, it cannot serve the model: a configuration error.
        # A refusal of a later version is no reason to give up: it ends the role, which restarts.
        with (
            nullcontext()
            if self.done
            else classify_engine_errors(kind.name, instead=EVALUATION_OFF)
        ):
            engine = kind.open(
                c,
                ConfiguredModel(config),
                tensors,
                version,
                EngineOptions(
                    slots=c.evaluation.slots,
                    context_max=c.rollouts.context_max,
                    device=kind.device(c.rollouts),
                    dtype=c.rollouts.dtype,
                ),
            )
        settings, tokens_max = c.evaluation, c.evaluation.tokens_max or c.sampling.tokens_max
        plan = EvaluationPlan(
            self.prompts, settings.samples, tokens_max, c.seed, settings.temperature
        )
        evaluation = evaluate(self.task, plan, self.rewards, engine)
        started_s = self.started_s()
        seconds = None if started_s is None else manifest.created_s - started_s
        return evaluation.line(version.number, seconds)

    def started_s(self) -> float | None:
        """Returns when version 0 was made, from which `seconds` counts to the creation of a line's
        version; None if it was removed before its time was kept.
        """
        path = RunFolder(self.context.folder).metrics / "started.json"
        if not path.exists():
            first = None if self.has_no_start else stored_version(self.context, 0)
            self.has_no_start = first is None
            if first is None:
                return None
            manifest, _ = fetch_tensors(self.context.store, first, tensors=())
            # Kept in a file, because version 0 may be removed.
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"started_s": manifest.created_s}))
            partial.replace(path)
        return float(json.loads(path.read_text())["started_s"])
