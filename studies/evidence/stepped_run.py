"""Trains one run of the evidence in this process, step after step (`train`): the product's prompts,
engine, rules of training, packing and learner, without roles, log and clock. All bits follow from
the configuration and the starting model; the load of the machine changes the seconds alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedConfig

from rollstream.consumers.trainer.data.lags import lags_of
from rollstream.consumers.trainer.data.metrics import StepMetrics
from rollstream.consumers.trainer.data.prepare import PreparedGroup, prepare_group
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.data.selection import groups_of_update, pack_micro_batches
from rollstream.consumers.trainer.learn.base import Learner, open_learner
from rollstream.producers.engines.base import UpdateMode
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.rewards.pool import RewardOutcome, RewardVerdict
from rollstream.producers.rollout.evaluation import Evaluation, EvaluationPlan, evaluate
from rollstream.producers.tasks.base import Task, Turns
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import load_run_task, prompt_order, run_rule, set_torch_threads
from rollstream.run.roles.train import load_starting_model
from rollstream.storage.weights.tensors import untie
from rollstream.streams.records import PROMPT, Trajectory
from rollstream.streams.values import Version
from studies.evidence.generation import (
    TERM,
    Generator,
    Group,
    GroupSource,
    LaggedBatches,
    RecordedBatches,
    RunningBatch,
)

EVALUATION_SLOTS = 256


@dataclass(frozen=True, slots=True)
class Schedule:
    """How far behind the trainer the data is. With `mode` None every token of a step is exactly
    `lag` steps old; otherwise rollouts decode on across versions, `lag` steps behind.
    """

    lag: int
    mode: UpdateMode | None = None
    slots: int = 192


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A trained step: its metrics, the groups that it had, and the facts of their trajectories."""

    step: int
    metrics: dict[str, float]
    groups: Sequence[Group]
    facts: Sequence[dict[str, Any]]
    tokens: int


@dataclass
class SteppedRun:
    """A run that trains until `tokens` tokens are trained. `recorded` are the groups of another
    run's steps, which are trained in place of generated ones.
    """

    configuration: Configuration
    folder: Path
    schedule: Schedule
    recorded: Sequence[Sequence[Group]] = ()

    def __post_init__(self) -> None:
        set_torch_threads(1)
        c = self.configuration
        self.task: Task = load_run_task(c, self.folder)
        model = load_starting_model(c, self.folder)
        self.model_config = model.config
        stored, _ = untie(model.state_dict())
        first = {name: one.detach().clone() for name, one in stored.items()}
        self.source = self._source(first)
        self.source.published(0, first)
        self.learner: Learner = open_learner(model, c.trainer)
        self.rule = run_rule(c, self.folder)

    def _source(self, weights: dict[str, Tensor]) -> GroupSource:
        if self.recorded:
            return RecordedBatches(self.recorded)
        c, schedule = self.configuration, self.schedule
        engine = _engine(c, self.model_config, weights, schedule.slots, c.rollouts.dtype)
        generator = Generator(self.task, prompt_order(c, self.folder), engine)
        each = c.trainer.groups_per_step
        if schedule.mode is None:
            return LaggedBatches(generator, each, schedule.lag)
        return RunningBatch(generator, each, schedule.lag, schedule.mode)

    def train(self, tokens: int) -> Iterator[TrainedStep]:
        """Train steps until so many tokens are trained, and yield each."""
        done = 0
        for step in range(1, self.configuration.trainer.steps + 1):
            trained = self._step(step, self.source.groups(step))
            done += trained.tokens
            yield trained
            if done >= tokens or (self.recorded and step == len(self.recorded)):
                return
            self.source.published(step, self._weights())

    def _step(self, step: int, groups: Sequence[Group]) -> TrainedStep:
        settings = self.configuration.trainer
        found, metrics = StepMetrics(), dict[str, float]()
        facts: list[dict[str, Any]] = []
        at = 0
        for update in range(settings.updates_per_step):
            count = groups_of_update(update, len(groups), settings.updates_per_step)
            samples: list[Sample] = []
            for group in groups[at : at + count]:
                prepared = prepare_group(group[0].group, group, {}, self.rule, step - 1)
                facts += _facts(step, group, prepared)
                samples += prepared.samples
                if prepared.ending:
                    found.add_closed(prepared.ending, prepared.counts, group)
                else:
                    found.add_trained(group, prepared.samples, prepared.counts)
            at += count
            for batch in pack_micro_batches(samples, settings.micro_batch_tokens):
                found.add_consumed(batch, step - 1)
                self.learner.submit(batch)
            metrics |= self.learner.finish_update()
        metrics |= found.metrics()
        return TrainedStep(step, metrics, groups, facts, found.tokens)

    def evaluate(self, prompts: int, samples: int) -> Evaluation:
        """Evaluate the present weights in float32, with answers judged in this process."""
        model = self.model_config, self._weights()
        return held_out_evaluation(self.configuration, self.task, model, prompts, samples)

    def _weights(self) -> dict[str, Tensor]:
        found = self.learner.snapshot("float32")
        assert isinstance(found, dict), "one process trains"
        return found


def held_out_evaluation(
    c: Configuration,
    task: Task,
    model: tuple[PreTrainedConfig, dict[str, Tensor]],
    prompts: int,
    samples: int,
) -> Evaluation:
    """Evaluate a model, its configuration and weights, in this process."""
    engine = _engine(c, *model, EVALUATION_SLOTS, "float32")
    plan = EvaluationPlan(prompts, samples, c.sampling.tokens_max, c.seed)
    rewards: Any = DirectRewards(task)
    return evaluate(task, plan, rewards, engine)


def _engine(
    c: Configuration, config: PreTrainedConfig, weights: dict[str, Tensor], slots: int, dtype: str
) -> TorchEngine:
    options = EngineOptions(slots, c.rollouts.context_max, dtype=dtype)
    kind: torch.dtype = getattr(torch, dtype)
    return TorchEngine(config, weights, Version(0, TERM), options, dtype=kind)


@dataclass(slots=True)
class DirectRewards:
    """Judges each answer at once, in this process: what `evaluate` needs of a `RewardPool`."""

    task: Task
    _judged: list[tuple[str, RewardOutcome]] = field(
        default_factory=list[tuple[str, RewardOutcome]]
    )

    def can_submit(self) -> bool:
        return True

    def submit(self, key: str, reference: str, turns: Turns) -> None:
        score = self.task.judge(reference, turns)
        self._judged.append((key, RewardVerdict(score.reward, score.scores)))

    def poll(self) -> list[tuple[str, RewardOutcome]]:
        judged, self._judged = self._judged, []
        return judged


def _facts(step: int, group: Group, prepared: PreparedGroup) -> Iterator[dict[str, Any]]:
    """Yields a fact for each trajectory of a group, in their order."""
    samples = {one.trajectory: one for one in prepared.samples}
    for one in group:
        sample = samples.get(one.trajectory)
        trained = 0 if sample is None else int(np.count_nonzero(sample.mask))
        lags = None if sample is None else lags_of(sample, step - 1)[sample.mask]
        yield {
            "group": one.group,
            "index": one.index,
            "prompt": _prompt_hash(one),
            "fate": prepared.ending or ("trained" if trained else "dropped"),
            "finish": one.finish,
            "tokens": len(one.logprobs),
            "tokens_trained": trained,
            "reward": one.reward,
            "step": step,
            "version": min(span.version.number for span in one.spans),
            "lag": None if lags is None or not len(lags) else float(lags.mean()),
        }


def _prompt_hash(one: Trajectory) -> int:
    return xxhash.xxh3_64_intdigest(one.tokens[one.sources == PROMPT].tobytes())
