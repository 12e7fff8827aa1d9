"""The reference of the pipeline benchmark: a plain single-process loop that generates, trains and
repeats.

It imports the same engine and learner as the product, so only the schedule differs: nothing
overlaps, and a step trains after all of its samples are complete. It has no log, no store and no
other processes. `python -m benchmarks.pipeline.plain_loop RUN/config.json --threads 2` prints one
JSON object.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from rollstream.consumers.trainer.data.prepare import prepare_group
from rollstream.consumers.trainer.data.selection import pack_micro_batches
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Emission, Engine, GenerationRequest, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.tasks.base import Task
from rollstream.run.config.config import load
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import load_run_task
from rollstream.storage.starting_model.models import load_model
from rollstream.streams.records import GENERATED, PROMPT, Trajectory
from rollstream.streams.values import Sampling, Span, Version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(json.dumps(run(load(chosen.configuration), chosen.threads)))


def run(c: Configuration, threads: int) -> dict[str, float]:
    """Trains the configured steps; returns the trained tokens, and the seconds without start-up."""
    assert c.model.path is not None, "the benchmark gives every run the same warm model"
    model = load_model(c.model.path)
    settings = c.trainer.model_copy(update={"workers": 1, "threads": threads})
    slots = settings.groups_per_step * settings.samples_per_group
    config = model.config
    learner = TorchLearner(model, settings)
    engine = open_engine(
        "torch",
        config,
        learner.snapshot("float32"),
        Version(0, 1),
        EngineOptions(slots=slots, context_max=c.rollouts.context_max),
    )
    task = load_run_task(c, Path(c.folder or "."))
    rule = training_rule(settings, None, keep_version=False)
    tokens, generate_s, began = 0, 0.0, time.perf_counter()
    for step in range(settings.steps):
        started = time.perf_counter()
        groups = generate(c, task, engine, step)
        generate_s += time.perf_counter() - started
        samples = [
            sample
            for group, records in groups.items()
            for sample in prepare_group(group, records, {}, rule, step).samples
        ]
        for batch in pack_micro_batches(samples, settings.micro_batch_tokens):
            learner.submit(batch)
        learner.finish_update()
        engine.update(WeightUpdate(Version(step + 1, 1), learner.snapshot("float32")), "in_flight")
        tokens += sum(len(sample.logprobs) for sample in samples)
    seconds = time.perf_counter() - began
    return {
        "tokens": tokens,
        "seconds": seconds,
        "generate_s": generate_s,
        "train_s": seconds - generate_s,
    }


def generate(
    c: Configuration, task: Task, engine: Engine, step: int
) -> dict[int, list[Trajectory]]:
    """Returns all samples of one step by group, with rewards."""
    sampling = Sampling(1.0, 0, 1.0, c.sampling.tokens_max, tuple(task.stop))
    count = c.trainer.groups_per_step
    groups = range(step * count, (step + 1) * count)
    prompts = {group: task.prompt(c.seed, group) for group in groups}
    for group, prompt in prompts.items():
        tokens = np.array(prompt.tokens, np.uint32)
        sources = np.full(len(tokens), PROMPT, np.uint8)
        for index in range(c.trainer.samples_per_group):
            name, empty = f"{group}.{index}", np.empty(0, np.float32)
            engine.submit(GenerationRequest(name, group, tokens, sources, sampling, c.seed, empty))
    emissions: dict[str, list[Emission]] = {}
    while engine.stats().running or engine.stats().waiting:
        for emission in engine.poll(1.0):
            emissions.setdefault(emission.trajectory, []).append(emission)
    answered: dict[int, list[Trajectory]] = {group: [] for group in groups}
    for name, parts in emissions.items():
        group = int(name.split(".")[0])
        prompt = prompts[group]
        answered[group].append(
            finished(task, name, prompt.tokens, prompt.reference, parts, engine.version)
        )
    return answered


def finished(
    task: Task,
    name: str,
    prompt: tuple[int, ...],
    reference: str,
    parts: list[Emission],
    version: Version,
) -> Trajectory:
    """Returns the record that a rollout would have published."""
    answer = np.concatenate([part.tokens for part in parts])
    group, index = map(int, name.split("."))
    return Trajectory(
        trajectory=name,
        group=group,
        index=index,
        attempt=1,
        task=task.name,
        rollout="",
        rollout_term=1,
        tokens=np.concatenate([np.array(prompt, np.uint32), answer]),
        sources=np.repeat(np.array([PROMPT, GENERATED], np.uint8), [len(prompt), len(answer)]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        spans=(Span(0, len(answer), version),),
        finish="stop",
        reward=task.judge(reference, [answer.tolist()]).reward,
        trainer_version=version,
        started_s=0.0,
        finished_s=0.0,
    )


if __name__ == "__main__":
    main()
